"""Episodes whose replica dies at any point of a turn go on elsewhere, token for token, each effect once."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from asyncrl.core.experience import Group
from asyncrl.core.staleness import Span
from rollout_service.tasks.tool_product.vocabulary import encode
from tests.rollout.environments.parts import TOKENIZER
from tests.rollout.environments.recorded.journal_parts import (
    CALL_POINTS,
    PHRASES,
    CountingTool,
    Killer,
    SpeakingEngine,
    calling,
    open_bench,
    prepare,
)

EOS = TOKENIZER.eos_token_id
TURNS = [[*encode(phrase), EOS] for phrase in PHRASES]
TOLD = [encode("!6="), encode("!20=")]
WHOLE = [*TURNS[0], *TOLD[0], *TURNS[1], *TOLD[1], *TURNS[2]]
STARTS = [0, len(TURNS[0]) + len(TOLD[0]), len(WHOLE) - len(TURNS[2])]
"""Of each turn."""
NUM_POINTS = 10
"""Two points of each of three turns, two of each of two calls."""


def points(folder: Path) -> list[tuple[str, tuple[int | None, ...]]]:
    """Return the points that an undisturbed episode passes."""
    killer = Killer()
    with open_bench(folder) as bench:
        first, _ = prepare(bench)
        tool = CountingTool(is_idempotent=False)
        grant = asyncio.run(bench.attempt(calling(tool), SpeakingEngine(first), killer))
        check_group(bench.group(grant.ticket), (Span(first, 0, len(WHOLE)),))
        assert tool.effects == {("2*3", 0): 1, ("2*3", 1): 1, ("4*5", 0): 1, ("4*5", 1): 1}
    return killer.passed


def check_group(group: Group, spans: tuple[Span, ...]) -> None:
    """All samples say and hear the same; sample 0 has these spans, and each token its version's log-prob."""
    for trajectory in group.trajectories:
        assert trajectory.response_ids.tolist() == WHOLE
        assert (trajectory.num_turns, trajectory.finish_reason) == (3, "done")
        for start, ids in zip(STARTS, TURNS, strict=True):
            version = next(span.version for span in trajectory.spans if start < span.end)
            wanted = [-float(version) - place / 64 for place in range(len(ids))]
            assert trajectory.logprobs[start : start + len(ids)].tolist() == wanted
    assert group.trajectories[0].spans == spans


def spans_of(num_said: int, first: int, second: int) -> tuple[Span, ...]:
    """Return the spans of an episode of which the first version said `num_said` turns."""
    end = len(WHOLE)
    at = STARTS[num_said] if num_said < len(STARTS) else end
    return tuple(Span(v, a, b) for v, a, b in ((first, 0, at), (second, at, end)) if a < b)


def test_an_undisturbed_episode_passes_a_point_at_every_boundary(tmp_path: Path):
    turn = [("rollout.turn_begins", "rollout.turn_said"), CALL_POINTS]
    passed = points(tmp_path)
    assert len(passed) == NUM_POINTS
    assert [name for name, _ in passed] == [*turn[0], *turn[1], *turn[0], *turn[1], *turn[0]]


@pytest.mark.parametrize("at", range(NUM_POINTS))
@pytest.mark.parametrize("is_idempotent", [True, False], ids=["idempotent", "not idempotent"])
def test_a_killed_replica_s_episode_is_the_same_up_to_its_unfinished_turn(
    tmp_path: Path, at: int, is_idempotent: bool
):
    tool, killer = CountingTool(is_idempotent=is_idempotent), Killer(at)
    with open_bench(tmp_path) as bench:
        first, second = prepare(bench)
        died, heir = SpeakingEngine(first), SpeakingEngine(second)
        grant = asyncio.run(bench.attempt(calling(tool), died, killer))
        point, (turn, *_) = killer.passed[-1]
        again = bench.play(calling(tool), heir)
        assert (again.ticket, again.attempt) == (grant.ticket, 2)
        said = [one for sample, one in heir.said if sample == 0]
        if point in CALL_POINTS and not is_idempotent:
            assert said == [] and max(tool.effects.values()) == 1
            (reason,) = [one for one in bench.learner.status().counters if one.startswith("failed/")]
            assert reason.startswith(f"failed/EnvironmentFailed: call {grant.ticket}.1.0.{turn}.0 ")
            return
        num_said = turn + 1
        assert said == list(range(num_said, 3)), "no recorded turn is sampled again"
        check_group(bench.group(grant.ticket), spans_of(num_said, first, second))
        assert tool.effects == {("2*3", 0): 1, ("2*3", 1): 1, ("4*5", 0): 1, ("4*5", 1): 1}
        calls = [str(key) for key in tool.keys if key.sample == 0]
        assert len(calls) - len(set(calls)) == (point == "rollout.called"), "only a call without a result"
        assert bench.learner.status().residue == 0
