"""`kill -9` of the learner between any two of its phases: it resumes, and the account stays exact.

Real buffer, weight sync and Megatron learner; a scripted engine, so that a life costs seconds. The
harness starts the learner again after each kill.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl.buffer.journals.file_journal import FileJournal
from asyncrl.buffer.ledger.events import Reserved, Resumed, Trained
from asyncrl.cli.audit.report import verify_run
from asyncrl.core.config.load import load_config
from learner.checkpoint import CheckpointStore
from tests.system.parts.harness import Harness

QUICKSTART = Path(__file__).parents[3] / "configs" / "quickstart.yaml"
NUM_STEPS = 12
EVERY = 3

PHASES = (
    "learner.reserved@1",
    "learner.trained@2",
    "learner.updated@2",
    "learner.booked@2",
    "checkpoint.begun@3",
    "checkpoint.written@3",
    "checkpoint.synced@3",
    "checkpoint.renamed@3",
    "checkpoint.committed@3",
    "learner.publishing@5",
    "handoff.copied",
    "learner.published@7",
    "learner.updated@8",
)


@pytest.fixture
def harness(tmp_path: Path, digit_sort: Path) -> Harness:
    values = [
        "run.name=crashes",
        f"run.dir={tmp_path}",
        f"model.path={digit_sort}",
        f"data.train={digit_sort / 'train.parquet'}",
        "data.eval=null",
        "eval.every_steps=0",
        "rollout.engine=scripted",
        "rollout.replicas=1",
        "learner.groups_per_step=4",
        f"learner.steps={NUM_STEPS}",
        f"checkpoint.every_steps={EVERY}",
    ]
    return Harness(load_config(QUICKSTART, values), tmp_path / "crashes")


@pytest.mark.long
def test_killed_between_any_two_phases_the_learner_resumes_and_trains_no_group_twice(
    harness: Harness,
) -> None:
    with harness:
        for name in ("buffer.0", "weight_sync.0", "publisher.0", "receiver.0", "rollout.0"):
            harness.start(name)
        for phase in PHASES:
            harness.start("learner.0", fault=phase)
            harness.await_kill("learner.0")
        harness.start("learner.0")
        harness.await_end("learner.0")
        status = harness.buffer_status()
    assert status.residue == 0
    assert status.steps_trained == NUM_STEPS
    assert status.trained + sum(status.dropped.values()) >= NUM_STEPS * 4
    store = CheckpointStore(harness.run_dir / "checkpoints", keep=3)
    assert NUM_STEPS in store.steps()
    check_no_group_was_trained_at_two_steps_of_one_lineage(harness.run_dir)
    found = verify_run(str(harness.run_dir), "")
    assert found["findings"] == [] and found["lineages"] >= 6


def check_no_group_was_trained_at_two_steps_of_one_lineage(run_dir: Path) -> None:
    """Read the journal: a resume at step s allows what was trained from s on to be trained again."""
    reserved: dict[int, tuple[int, ...]] = {}
    step_of: dict[int, int] = {}
    num_resumes = 0
    for event in FileJournal(run_dir / "buffer", "never").events():
        match event:
            case Reserved(step, tickets):
                reserved[step] = tickets
            case Resumed(_, resumed_step):
                num_resumes += 1
                step_of = {ticket: step for ticket, step in step_of.items() if step < resumed_step}
            case Trained(step):
                again = set(reserved[step]) & set(step_of)
                assert not again, f"tickets {again} were trained twice in one lineage"
                step_of |= dict.fromkeys(reserved[step], step)
    assert num_resumes >= 5
