"""A checkpoint that cannot be written is told, training goes on, and another one is written later."""

from __future__ import annotations

import errno
import os
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from asyncrl.buffer.client import LearnerClient
from asyncrl.buffer.ledger.events import Checkpointed
from asyncrl.core.errors import CheckpointError
from learner.checkpoint import CheckpointStore
from learner.checkpoint.writer import BackgroundWriter, CheckpointKeeper
from learner.leader import checkpoints
from learner.leader.leader import Leader
from tests.learner.checkpoint.test_checkpoint_writer import WAIT_S, Journal, take
from tests.learner.guard.guarded_run import NUM_STEPS, Faults, make_config, running
from tests.small_disk import fill
from tests.waiting import wait_for
from tests.weight_sync.cluster import running_cluster


@pytest.fixture(autouse=True)
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints, "WRITE_AGAIN_S", 0.0)


def full(number: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_checkpoint_that_cannot_be_written_is_told_and_one_of_a_later_step_is_written(
    model: Path, tmp_path: Path
) -> None:
    told: list[dict[str, Any]] = []

    def before_write(number: int) -> None:
        if number == 1:
            full(number)
        told.extend(run.learner.status().obstacles)

    def await_failure(update: int) -> bool:
        """Let the failure of step 3 be there before step 4 is done."""
        sealer = run.leader.checkpoints.keeper._thread
        if update == 4 and sealer is not None:
            sealer.join(WAIT_S)
        return False

    faults, every = Faults(await_failure, before_write=before_write), {"every_steps": 3}
    with (
        running_cluster() as cluster,
        running(model, cluster, tmp_path, faults, {}, checkpoint=every) as run,
    ):
        run.go()
        assert len(run.rows()) == NUM_STEPS
        assert run.learner.status().obstacles == ()
        assert not list((tmp_path / "checkpoints").glob(".step-*"))
    assert told[0].cause == "checkpoint_fails"
    assert "step 3 could not be written: rank 0: [Errno 28] No space left on device" in told[0].reason
    steps = [event.step for event in run.events() if isinstance(event, Checkpointed)]
    assert (steps[0], steps[-1]) == (4, NUM_STEPS)


def test_a_run_whose_last_checkpoint_cannot_be_written_fails_with_that(model: Path, tmp_path: Path) -> None:
    with (
        running_cluster() as cluster,
        running(model, cluster, tmp_path, Faults(before_write=full), {}) as run,
        pytest.raises(CheckpointError, match=f"step {NUM_STEPS} could not be written"),
    ):
        run.go()


def test_a_rank_on_a_full_disk_says_so_at_once_and_rank_0_hears_it_when_there_is_room(
    small_disk: Path,
) -> None:
    store = CheckpointStore(small_disk, keep=2)
    keeper, writer = CheckpointKeeper(store, Journal().commit, 1, max_stall_s=0.0), BackgroundWriter(0)
    folder = keeper.begin(5)
    fill(small_disk / "ballast")
    writer.begin(folder, {"": take})
    keeper.seal_in_background(5, 1)
    wait_for(lambda: "No space left" in writer.problem)
    assert not keeper.commit_finished()
    (small_disk / "ballast").unlink()
    with pytest.raises(CheckpointError, match=r"step 5 could not be written: rank 0: .*No space"):
        keeper.commit_finished(WAIT_S)
    assert not folder.exists(), "its half is room that others may wait for"
    keeper.begin(6)
    writer.begin(store.temporary(6), {"": take})
    keeper.seal_in_background(6, 1)
    assert keeper.commit_finished(WAIT_S) and writer.problem == ""


def test_a_disk_that_takes_no_folder_is_told_as_a_checkpoint_that_cannot_be_written(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints", keep=2)
    with closing(LearnerClient("tcp://127.0.0.1:1")) as client:
        one = Leader(make_config(tmp_path), client, lambda token: None, store)
        (tmp_path / "checkpoints").rmdir()
        assert not one.checkpoints._begin(0)
    (told,) = one.checkpoints.failures.report()
    assert "step 0 could not be written: [Errno 2] No such file" in told.reason
