"""Child process of a suite: in a session of its own, with a deadline for all of it.

Invariant: nothing that it has started in its session runs on once `run_child` has returned, whether the
child has ended, is over its time, or this process is interrupted.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

GRACE_S = 20.0
"""Between being asked to end and being ended: a benchmark takes its own processes down meanwhile."""
LATE = 124
"""Exit code of a child that was over its time, as of timeout(1)."""


@dataclass(frozen=True)
class Ended:
    """Exit code and output of a child; `is_late` if it was over its time."""

    code: int
    output: str
    is_late: bool = False


def run_child(
    command: Sequence[str],
    limit_s: float,
    environment: Mapping[str, str] | None = None,
    *,
    keeps_errors: bool = False,
) -> Ended:
    """Run `command` for `limit_s` seconds at most.

    Args:
        keeps_errors: Put what it says on stderr into its output; else it goes to this process's.
    """
    errors = subprocess.STDOUT if keeps_errors else None
    with tempfile.TemporaryFile() as output:  # a pipe would be waited for until its last holder is gone
        process = subprocess.Popen(
            command, stdout=output, stderr=errors, env=environment, start_new_session=True
        )
        is_late = False
        try:
            process.wait(limit_s)
        except subprocess.TimeoutExpired:
            is_late = True
        finally:
            _end(process)
        output.seek(0)
        text = output.read().decode(errors="replace")
    return Ended(LATE if is_late else process.returncode, text, is_late)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process that still runs, and all that is left of the session that it leads."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
