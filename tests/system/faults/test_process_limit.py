"""A whole run in a control group that allows few processes, from its start and from a moment in mid-run."""

from __future__ import annotations

import contextlib
import os
import signal
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.system.parts.up_run import UpRun, leftovers

PIDS = Path("/sys/fs/cgroup/pids")
pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(not os.access(PIDS / "cgroup.procs", os.W_OK), reason="no control groups of our own"),
]
QUICK = ("rollout.replicas=1", "rollout.engine=scripted", "eval.every_steps=0", "learner.steps=100000")
PATIENCE_S = 500.0
FEWER = 60
"""Than the run has: what a replica that is gone has left is not enough for the one that follows."""


@pytest.fixture
def group() -> Iterator[Path]:
    """Return a group of this test's own; removed once nothing is in it."""
    made = PIDS / f"asyncrl-test-{uuid.uuid4().hex[:8]}"
    made.mkdir()
    yield made
    (made / "pids.max").write_text("max")
    end = time.monotonic() + 60.0
    while (made / "cgroup.procs").read_text() and time.monotonic() < end:
        time.sleep(0.2)
    with contextlib.suppress(OSError):
        made.rmdir()


@contextlib.contextmanager
def within(group: Path) -> Iterator[None]:
    """Have what is started meanwhile be in the group."""
    own = next(line for line in Path("/proc/self/cgroup").read_text().splitlines() if ":pids:" in line)
    (group / "cgroup.procs").write_text(str(os.getpid()))
    try:
        yield
    finally:
        (PIDS / own.rpartition(":")[2].lstrip("/") / "cgroup.procs").write_text(str(os.getpid()))


def test_a_group_that_is_too_small_is_refused_by_name_before_anything_starts(
    up: Callable[..., UpRun], group: Path
) -> None:
    (group / "pids.max").write_text("200")
    with within(group):
        run = up("cramped", *QUICK)
    code, output = run.finish(PATIENCE_S)
    assert code == 2, output
    assert "this container may have 200 processes and threads" in output and str(group) in output
    assert not (run.folder / "logs").exists()


def test_a_limit_that_is_reached_in_mid_run_is_survived_or_named(
    up: Callable[..., UpRun], group: Path
) -> None:
    with within(group):
        run = up("narrowed", *QUICK)
    status = run.wait_for(lambda status: status["step"] >= 5, PATIENCE_S)
    used = int((group / "pids.current").read_text())
    (group / "pids.max").write_text(str(used - FEWER))
    os.kill(status["services"]["rollout.0"]["pid"], signal.SIGKILL)
    code, output = run.finish(PATIENCE_S)
    print(output[-1500:])
    assert code == 1, output
    assert f"this container may have {used - FEWER} ({group / 'pids.max'})" in output
    assert leftovers(run.folder) == []
    (group / "pids.max").write_text("max")
    again = up("narrowed", *QUICK[:-1], f"learner.steps={run.rows()[-1]['training/global_step'] + 3}")
    code, output = again.finish(PATIENCE_S)
    assert code == 0, output
    assert again.summary()["ledger_residue"] == 0
