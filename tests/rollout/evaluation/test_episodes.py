"""Evaluations of episodes with environments: what is right, what is an opinion, how many run at once."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from asyncrl.buffer.messages import EvaluationOrder
from asyncrl.core.metrics.tallies import conclude
from rollout_service.engine.protocol import EngineDied, Sampling
from rollout_service.environments import Environment, Step
from rollout_service.environments.registry import Episodes
from rollout_service.environments.runner import MultiTurn
from rollout_service.evaluation.answers import make_stater
from rollout_service.evaluation.evaluator import EvaluationSettings, Evaluator
from rollout_service.rewards.score import Score
from tests.rollout.environments.parts import (
    CALCULATOR,
    TOKENIZER,
    ExactMatch,
    ScriptedPhrases,
    load,
    make_prompt,
    run_episode,
)

WHOLE = EvaluationOrder(id=0, step=0)
STATER = make_stater(TOKENIZER, ["exact_match"])


class Judging(Environment):
    """Gives the value 0, and other figures first."""

    def __init__(self, prompt: Any, seed: int):
        pass

    async def step(self, answer: str) -> Step:
        return Step(is_done=True)

    async def score(self) -> Score:
        return Score(0.0, {"num_calls": 1.0, "correct": 0.0})


def test_an_episode_that_its_environment_scored_is_right_by_that_score():
    engine = ScriptedPhrases(TOKENIZER, [("1", [1])])
    runner = MultiTurn(engine, TOKENIZER, Episodes(Judging), ExactMatch(), has_chats=False)  # type: ignore[arg-type]
    evaluator = Evaluator(runner, [make_prompt()], EvaluationSettings(1.0, 16, 1), STATER)
    assert conclude(asyncio.run(evaluator.run(WHOLE)))["accuracy"] == 0.0


def test_the_opinion_of_an_episode_is_its_last_answer_however_it_came_there():
    opinions = set()
    for call in ("?47*83", "?83*47"):
        trajectory, _, _ = run_episode(load(CALCULATOR), [(call, [1]), ("3901", [1])])
        opinions.add(STATER(trajectory))
    assert opinions == {"3901"}


class Counting:
    """Episodes that count how many of them run at once; the third one to start finds the engine dead."""

    def __init__(self, is_dying: bool) -> None:
        self.num_started = self.num_running = self.most = 0
        self._is_dying = is_dying
        self._trajectory, _, _ = run_episode(load(CALCULATOR), [("3901", [1])])

    async def run(self, prompt: Any, sampling: Sampling, episode_id: str, partial: Any = None) -> Any:
        self.num_started += 1
        if self._is_dying and self.num_started == 3:
            raise EngineDied("the engine is gone")
        self.num_running += 1
        self.most = max(self.most, self.num_running)
        try:
            await asyncio.sleep(0.001)
        finally:
            self.num_running -= 1
        return self._trajectory


def make_evaluator(runner: Counting) -> Evaluator:
    settings = EvaluationSettings(1.0, 16, 1, num_samples=3, max_at_once=2)
    return Evaluator(runner, [make_prompt()] * 4, settings, STATER)


def test_no_more_answers_are_under_way_than_the_engine_takes_at_once():
    runner = Counting(is_dying=False)
    found = conclude(asyncio.run(make_evaluator(runner).run(WHOLE)))
    assert (runner.most, runner.num_started) == (2, 12)
    assert (found["accuracy"], found["val-aux/num_prompts"]) == (1.0, 4)


def test_an_evaluation_whose_engine_died_begins_no_further_answer():
    runner = Counting(is_dying=True)

    async def evaluate() -> None:
        with pytest.raises(EngineDied):
            await make_evaluator(runner).run(WHOLE)
        assert runner.num_running == 0

    asyncio.run(evaluate())
    assert runner.num_started < 12
