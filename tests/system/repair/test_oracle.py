"""The oracle: at `max_lag: 0` a run in which any process dies anywhere ends with the weights of one in which
none does, bit for bit.

Real buffer, weight sync and Megatron learner; a scripted engine, so that a run takes seconds.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.system.repair.oracle_run import make_task, oracle_config, play, service_of

FAULTS = (
    "buffer.appending@10",
    "buffer.appended@6",
    "buffer.committing@12",
    "buffer.committed@20",
    "buffer.sent@25",
    "buffer.committed@40",
    "learner.reserved@1",
    "learner.trained@2",
    "learner.updated@3",
    "learner.booked@4",
    "learner.publishing@5",
    "handoff.copied",
    "learner.published@3",
    "checkpoint.begun@2",
    "checkpoint.written@4",
    "checkpoint.synced@4",
    "checkpoint.renamed@2",
    "checkpoint.committed@4",
    "together.written",
    "rollout.sampled@5",
    "rollout.push@0",
    "rollout.push@3",
    "rollout.swapped@2",
    "rollout.evaluated",
    "publisher.commit@3",
    "coordinator.map@3",
    "coordinator.verified@2",
    "coordinator.commit@4",
    "receiver.map@3",
    "receiver.bucket@2",
    "receiver.verified@4",
    "receiver.commit@3",
    "receiver.hand_over@2",
)
SPREAD_FAULTS = (
    "publisher.commit@2",
    "publisher.transfer@2",
    "publisher.bucket@4",
    "publisher.sent@3",
    "coordinator.offer@2",
    "coordinator.transfer@3",
    "coordinator.verified@4",
    "coordinator.commit@2",
    "receiver.offer@2",
    "receiver.transfer@3",
    "receiver.bucket@3",
    "receiver.verified@2",
    "receiver.commit@4",
    "receiver.hand_over@3",
)
"""Where versions are sent: the receiver is on another node than the publisher, and maps nothing of it."""
NUM_SEEDS = 20
MIN_KILLS = 4
"""Of six: a kill elsewhere may lead a run past the version or step that a point waits for."""


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_task(tmp_path_factory.mktemp("oracle") / "task")


@pytest.fixture(scope="module")
def undisturbed(task: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    """The digests of runs in which nobody dies, by seed, as they are asked for."""
    found = {}
    for seed in (0, 1):
        outcome = play(oracle_config(task, tmp_path_factory.mktemp("undisturbed"), seed))
        assert outcome.killed == []
        found[seed] = outcome.digest
    assert found[0] != found[1], "other prompts make other weights"
    return found


@pytest.mark.long
@pytest.mark.parametrize(
    ("fault", "is_spread"), [(one, False) for one in FAULTS] + [(one, True) for one in SPREAD_FAULTS]
)
def test_a_run_with_a_kill_ends_with_the_weights_of_the_run_without(
    fault: str, is_spread: bool, task: Path, undisturbed: dict[int, str], tmp_path: Path
) -> None:
    outcome = play(oracle_config(task, tmp_path, 0), fault, is_spread=is_spread)
    print(f"{fault}: {outcome.seconds:.1f} s")
    assert outcome.killed == [service_of(fault)[0]], "the fault was never reached"
    assert outcome.digest == undisturbed[0]


@pytest.mark.long
@pytest.mark.parametrize(
    "fault",
    ["learner.1=learner.trained@3", "learner.0=learner.updated@3", "learner.1=abort:learner.trained@3"],
)
def test_a_learner_of_two_ranks_is_started_again_whole(fault: str, task: Path, tmp_path: Path) -> None:
    """Also where a rank aborts, as one does that NCCL's watchdog ends: it raises nothing."""
    plain = play(oracle_config(task, tmp_path / "plain", 0, "learner.tp=2"))
    outcome = play(oracle_config(task, tmp_path / "killed", 0, "learner.tp=2"), fault)
    assert outcome.killed == [service_of(fault)[0]]
    assert outcome.digest == plain.digest


@pytest.mark.long
@pytest.mark.parametrize("seed", range(NUM_SEEDS))
def test_whatever_the_seed_a_run_in_which_every_service_dies_once_changes_no_bit(
    seed: int, task: Path, tmp_path: Path
) -> None:
    """Each service dies at another of its points with each seed; half of the times versions are sent."""
    plain = play(oracle_config(task, tmp_path / "plain", seed))
    by_service: dict[str, list[str]] = {}
    is_spread = seed >= NUM_SEEDS // 2
    own = tuple(
        one for one in FAULTS if service_of(one)[0] not in ("publisher.0", "weight_sync.0", "receiver.0")
    )
    for fault in (*own, *SPREAD_FAULTS) if is_spread else FAULTS:
        by_service.setdefault(service_of(fault)[0], []).append(fault)
    faults = [points[seed % len(points)] for points in by_service.values()]
    outcome = play(oracle_config(task, tmp_path / "killed", seed), *faults, is_spread=is_spread)
    print(f"seed {seed}: {len(outcome.killed)} kills, {outcome.seconds:.1f} s, {plain.seconds:.1f} s without")
    assert len(outcome.killed) >= MIN_KILLS, f"only {outcome.killed} of {faults} died"
    assert outcome.digest == plain.digest
