"""Finding and ending the processes of one run, by pid and never by name.

Every process of a run carries the run's id in its environment; nothing else is ever touched.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time
from pathlib import Path

from asyncrl.control.launch.spec import RUN_VARIABLE

SHM = Path("/dev/shm")


def is_alive(pid: int, run_id: str) -> bool:
    """Tell whether `pid` is a living process of run `run_id`."""
    return _marker(run_id) in _environment(pid) and not _is_zombie(pid)


def pids_of_run(run_id: str) -> list[int]:
    """Return the living processes of a run, this one excepted."""
    found = (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())
    return [pid for pid in found if pid != os.getpid() and is_alive(pid, run_id)]


def end_leftovers(run_id: str, keep: frozenset[int] = frozenset(), deadline_s: float = 10.0) -> int:
    """Kill what is left of a run and return how many processes that were."""
    ended: set[int] = set()
    end = time.monotonic() + deadline_s
    while (left := set(pids_of_run(run_id)) - keep) and time.monotonic() < end:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        ended |= left
        time.sleep(0.05)
    return len(ended)


def remove_leftovers(run_id: str, socket_dir: Path) -> list[str]:
    """Remove a dead run's shared-memory segments and sockets; return what was still there."""
    segments = sorted(SHM.glob(f"asyncrl-{run_id}-*"))
    for segment in segments:
        segment.unlink(missing_ok=True)
    shutil.rmtree(socket_dir, ignore_errors=True)
    return [segment.name for segment in segments]


def _marker(run_id: str) -> bytes:
    return f"{RUN_VARIABLE}={run_id}".encode()


def _environment(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:  # it is gone, or not ours
        return []


def _is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True
