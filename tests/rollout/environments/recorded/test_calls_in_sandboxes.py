"""Calls that change nothing but their sandbox are made anew wherever an attempt ended; others never twice."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rollout_service.environments.registry import Episodes
from rollout_service.environments.tools.calls import Call, PatternCalls
from rollout_service.environments.tools.code import Shell
from rollout_service.environments.tools.tool_use import ToolEpisode
from rollout_service.sandbox.local import make_sandboxes
from rollout_service.tasks.tool_product.vocabulary import encode
from tests.rollout.environments.parts import TOKENIZER
from tests.rollout.environments.recorded.journal_parts import (
    CountingTool,
    SpeakingEngine,
    calling,
    open_bench,
    prepare,
)

PHRASES = ("?2*3?4*5", "?6*7", "42")
"""A turn with two calls, one with a call, and the answer."""
POINTS = {"in the first call": 2, "in the second call of a turn": 5, "in the next turn's call": 9}
EOS = TOKENIZER.eos_token_id
SAID = [[*encode(phrase), EOS] for phrase in PHRASES]
WHOLE = [*SAID[0], *encode("!1=!2="), *SAID[1], *encode("!3="), *SAID[2]]
"""Of an episode whose sandbox has seen its three calls, and no other."""


class CountingShell(Shell):
    """A shell whose sandbox counts the calls that it has seen."""

    name, argument = "calculator", "expression"
    argv = ("sh", "-c", "printf . >> seen; wc -c < seen")


class SeveralCalls(PatternCalls):
    """Calls of a pattern, several in a turn."""

    def find(self, answer: str) -> list[Call]:
        return [Call("calculator", {"expression": found}) for found in re.findall(r"\?(\d\*\d)", answer)]


def shells(**settings: object) -> Episodes:
    """Return episodes, each with a sandbox of these settings."""
    tool, sandboxes = CountingShell(), make_sandboxes({"workers": 1, **settings})
    call_format = SeveralCalls("(.)", "calculator", "expression", "!{result}=")

    def begin(prompt: object, seed: int) -> ToolEpisode:
        return ToolEpisode({tool.name: tool}, call_format, sandbox=sandboxes.create())

    return Episodes(begin, is_restorable=True)


@pytest.mark.parametrize("at", POINTS.values(), ids=POINTS)
def test_an_attempt_that_ended_anywhere_costs_a_sealed_sandbox_s_episode_nothing(tmp_path: Path, at: int):
    with open_bench(tmp_path) as bench:
        version, _ = prepare(bench)
        grant = bench.play(shells(), SpeakingEngine(version, PHRASES), at=at)
        assert bench.play(shells(), SpeakingEngine(version, PHRASES)).ticket == grant.ticket
        group = bench.group(grant.ticket)
        assert (group.attempt, [one.response_ids.tolist() for one in group.trajectories]) == (2, [WHOLE] * 2)


@pytest.mark.parametrize("settings", [{"network": True}, {"isolate": False}], ids=["network", "no isolation"])
def test_a_call_of_a_sandbox_that_is_not_sealed_is_not_made_twice(tmp_path: Path, settings: dict[str, bool]):
    with open_bench(tmp_path) as bench:
        version, _ = prepare(bench)
        bench.play(shells(**settings), SpeakingEngine(version), at=2)
        bench.play(shells(**settings), SpeakingEngine(version))
        assert bench.learner.status().dropped == {"not_retryable": 1}


def test_a_group_whose_call_must_not_be_made_twice_is_given_up_at_its_next_attempt(tmp_path: Path):
    tool = CountingTool(is_idempotent=False)
    with open_bench(tmp_path) as bench:
        version, _ = prepare(bench)
        bench.play(calling(tool), SpeakingEngine(version), at=2)
        bench.play(calling(tool), SpeakingEngine(version))
        status = bench.learner.status()
        assert (status.dropped, status.given_up, status.residue) == ({"not_retryable": 1}, 1, 0)
        assert status.reissues == {"deregistered": 1}, "no further attempt"
        assert max(tool.effects.values(), default=0) <= 1
