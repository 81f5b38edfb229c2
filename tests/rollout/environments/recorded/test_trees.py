"""Trees: samples that fork off after a turn of another sample of their group."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from asyncrl.core.experience import Group
from rollout_service.engine.protocol import Interrupted
from rollout_service.environments.protocol import Environment, NotRestored, Step
from rollout_service.environments.registry import Episodes
from rollout_service.environments.tools.calls import PatternCalls
from rollout_service.environments.tools.tool_use import ToolEpisode
from rollout_service.replica.parts import ReplicaSettings
from tests.rollout.environments.recorded.journal_parts import (
    PHRASES,
    SETTINGS,
    Bench,
    CountingTool,
    Killer,
    SpeakingEngine,
    calling,
    open_bench,
    prepare,
)
from tests.rollout.environments.recorded.test_recorded_turns import STARTS, TURNS, WHOLE

UNRECORDED = ReplicaSettings(4, 60.0, 10.0)
OWN = {1: {("4*5", 1): 1}, 2: {}}
"""Effects of the fork, by the turns that it shares."""


def grow(bench: Bench, episodes: Episodes, engine: Any, **more: Any) -> Group:
    """Return the group of one attempt with a tree of two samples."""
    attempt = bench.attempt(episodes, engine, Killer(), branches=2, **more)
    return bench.group(asyncio.run(attempt).ticket)


def num_shared_in(engine: SpeakingEngine) -> int:
    """Return how many turns sample 1 has not sampled itself."""
    return 3 - len([turn for sample, turn in engine.said if sample == 1])


def check_tree(group: Group, num_shared: int) -> None:
    """The first trains all that it said, the fork what it said itself."""
    first, fork = group.trajectories
    assert first.response_ids.tolist() == fork.response_ids.tolist() == WHOLE
    for turn, (start, ids) in enumerate(zip(STARTS, TURNS, strict=True)):
        said = slice(start, start + len(ids))
        assert set(first.loss_mask[said].tolist()) == {1}
        assert set(fork.loss_mask[said].tolist()) == {int(turn >= num_shared)}
        assert fork.logprobs[said].tolist() == first.logprobs[said].tolist()
    assert fork.loss_mask.sum() == sum(map(len, TURNS[num_shared:]))


@pytest.mark.parametrize("settings", [SETTINGS, UNRECORDED], ids=["recorded", "kept here"])
def test_a_fork_goes_on_from_a_turn_of_the_first_sample_and_trains_its_own_turns(
    tmp_path: Path, settings: ReplicaSettings
):
    seen = set()
    for seed in range(4):
        (tmp_path / str(seed)).mkdir()
        with open_bench(tmp_path / str(seed)) as bench:
            version, _ = prepare(bench)
            tool, engine = CountingTool(is_idempotent=False), SpeakingEngine(version)
            group = grow(bench, calling(tool), engine, settings=settings, seed=seed)
            seen.add(num_shared := num_shared_in(engine))
            assert engine.said[:3] == [(0, 0), (0, 1), (0, 2)], (
                "the whole first sample comes before its forks"
            )
            assert engine.said[3:] == [(1, turn) for turn in range(num_shared, 3)]
            assert tool.effects == {("2*3", 0): 1, ("4*5", 0): 1, **OWN[num_shared]}
            check_tree(group, num_shared)
    assert seen == {1, 2}, "after any turn but the last"


@pytest.mark.parametrize("sample", [0, 1], ids=["the first", "the fork"])
@pytest.mark.parametrize("at", range(4))
def test_a_killed_replica_s_tree_is_the_same_elsewhere(tmp_path: Path, at: int, sample: int):
    tool, killer = CountingTool(is_idempotent=True), Killer(at, sample)
    with open_bench(tmp_path) as bench:
        first, _ = prepare(bench)
        died, heir = SpeakingEngine(first), SpeakingEngine(first)
        asyncio.run(bench.attempt(calling(tool), died, killer, branches=2))
        group = grow(bench, calling(tool), heir)
        said = [turn for index, turn in (*died.said, *heir.said) if index == 1]
        assert said == sorted(set(said)) and said[-1] == 2, "each turn of the fork once"
        check_tree(group, said[0])
        assert max(tool.effects.values()) == 1
        assert bench.learner.status().residue == 0


def test_a_sample_of_one_turn_has_no_place_to_fork(tmp_path: Path):
    with open_bench(tmp_path) as bench:
        version, _ = prepare(bench)
        engine = SpeakingEngine(version, phrases=(PHRASES[-1],))
        group = grow(bench, calling(CountingTool(is_idempotent=True)), engine)
    assert engine.said == [(0, 0), (1, 0)]
    assert [one.loss_mask.all() for one in group.trajectories] == [True, True]


class Seeded(Environment):
    """Tells its seed."""

    made: list[int] = []
    is_deterministic = True

    def __init__(self, prompt: object, seed: int) -> None:
        self.seed, self.num_steps = seed, 0
        self.made.append(seed)

    async def step(self, answer: str) -> Step:
        self.num_steps += 1
        return Step("!6=", is_done=self.num_steps == 3)


class Forgetful(Seeded):
    """Cannot become what another one was."""

    async def restore(self, turns: Sequence[tuple[str, Step]]) -> None:
        raise NotRestored("it does not know how")


def test_a_fork_has_the_environment_of_the_sample_that_it_shares_turns_with(tmp_path: Path):
    Seeded.made.clear()
    with open_bench(tmp_path) as bench:
        version, _ = prepare(bench)
        grow(bench, Episodes(Seeded, is_restorable=True), SpeakingEngine(version))
    assert len(Seeded.made) == 2 and len(set(Seeded.made)) == 1


def test_a_fork_that_cannot_be_restored_begins_anew_and_trains_all(tmp_path: Path):
    with open_bench(tmp_path) as bench:
        version, _ = prepare(bench)
        engine = SpeakingEngine(version)
        group = grow(bench, Episodes(Forgetful, is_restorable=True), engine)
    assert num_shared_in(engine) == 0
    assert group.trajectories[0].loss_mask.tolist() == group.trajectories[1].loss_mask.tolist()


class Lasting(ToolEpisode):
    """Has calls that must not be made twice, and cannot be restored."""

    async def restore(self, turns: Sequence[tuple[str, Step]]) -> None:
        raise NotRestored("it does not know how")


def test_calls_of_shared_turns_do_not_keep_a_fork_from_beginning_anew(tmp_path: Path):
    tool = CountingTool(is_idempotent=False)
    call_format = PatternCalls(r"\?(.+)", "calculator", "expression", "!{result}=")
    episodes = Episodes(
        lambda prompt, seed: Lasting({tool.name: tool}, call_format),  # type: ignore[dict-item]
        is_restorable=True,
    )
    with open_bench(tmp_path) as bench:
        version, _ = prepare(bench)
        group = grow(bench, episodes, SpeakingEngine(version))
    assert [one.response_ids.tolist() for one in group.trajectories] == [WHOLE, WHOLE]
    assert set(tool.effects.values()) == {1}


class Stopping(SpeakingEngine):
    """Is interrupted in the first sample's last turn."""

    async def generate(self, prompt_ids: Any, sampling: Any, request_id: str) -> Any:
        if request_id.endswith("0.turn2"):
            raise Interrupted("the replica is told to leave", completion=None)  # type: ignore[arg-type]
        return await super().generate(prompt_ids, sampling, request_id)


def test_nothing_forks_off_a_sample_that_was_interrupted(tmp_path: Path):
    tool = CountingTool(is_idempotent=False)
    with open_bench(tmp_path) as bench:
        version, _ = prepare(bench)
        stopped, heir = Stopping(version), SpeakingEngine(version)
        asyncio.run(bench.attempt(calling(tool), stopped, Killer(), branches=2))
        assert [turn for sample, turn in stopped.said if sample == 1] == []
        check_tree(grow(bench, calling(tool), heir), num_shared_in(heir))
    assert heir.said[0] == (0, 2)
