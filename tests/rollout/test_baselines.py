"""Additions to a group's rewards: the reward of a greedy answer, and the shaping of long answers."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from asyncrl.buffer.messages import EvaluationOrder
from asyncrl.control.rows.metering import Meter
from asyncrl.core.config.tree import Config, RewardSection
from asyncrl.core.experience import Group
from asyncrl.core.metrics.tallies import conclude
from asyncrl.core.status.replica import ShapingStatus
from asyncrl.core.status.statuses import Statuses
from rollout_service import composition
from rollout_service.engine.scripted.engine import ScriptedEngine
from rollout_service.evaluation.wiring import build_evaluator
from rollout_service.rewards.calling import FunctionReward
from rollout_service.rewards.registry import load_reward
from rollout_service.rewards.shaping import Overlong, overlong_penalty
from rollout_service.tasks.digit_sort.vocabulary import EOS, build_tokenizer
from tests.rollout.data.files import load_prompts
from tests.rollout.replica.replica_parts import (
    GROUP_SIZE,
    WAIT_S,
    Stage,
    make_config,
    open_stage,
    write_data,
)
from tests.waiting import wait_for


def count_zeros(response: str, ground_truth: Any, num_tokens: int) -> float:
    """The scripted engine's greedy answer alone is zeros up to the limit."""
    return float(response == "000000" and num_tokens == 6)


def length(response: str, ground_truth: Any, num_tokens: int) -> float:
    return float(num_tokens)


def train_one_step(stage: Stage) -> list[Group]:
    stage.serve_first_version()
    reservation = stage.learner.reserve(0, WAIT_S)
    assert reservation is not None
    return stage.learner.fetch([ticket.ticket for ticket in reservation.tickets])


def test_remax_adds_the_reward_of_one_greedy_answer_that_is_no_sample(tmp_path: Path):
    reward = FunctionReward("zeros", count_zeros)
    with open_stage(tmp_path, reward, advantage="remax") as stage:
        groups = train_one_step(stage)
        assert [group.baseline_reward for group in groups] == [1.0] * 4
        assert all(len(group.trajectories) == GROUP_SIZE for group in groups)
        assert sum(sum(group.rewards) for group in groups) == 0
        status = stage.replica.status()
        assert status.engine is not None and status.engine.trajectories >= 4 * (GROUP_SIZE + 1)


def test_without_remax_no_greedy_answer_is_made(tmp_path: Path):
    reward = FunctionReward("zeros", count_zeros)
    with open_stage(tmp_path, reward) as stage:
        assert [group.baseline_reward for group in train_one_step(stage)] == [None] * 4


def test_a_greedy_answer_that_cannot_be_scored_fails_its_group(tmp_path: Path):
    def refuse(response: str, ground_truth: Any, num_tokens: int) -> float:
        return float("nan") if count_zeros(response, ground_truth, num_tokens) else 0.0

    reward = FunctionReward("refuse", refuse)
    with open_stage(tmp_path, reward, advantage="remax") as stage:
        stage.serve_first_version()
        wait_for(lambda: stage.census().given_up > 0, "a prompt that is given up")
        assert stage.census().stored_groups == 0
        assert stage.census().residue == 0


def test_a_run_with_remax_asks_for_greedy_answers_and_leaves_room_for_them(tmp_path: Path):
    plain, remax = make_config(tmp_path, max_sequences=64), make_config(tmp_path, "remax", max_sequences=64)
    assert not composition._group_settings(plain).has_greedy
    assert composition._group_settings(remax).num_samples == GROUP_SIZE + 1
    assert composition._replica_settings(plain).max_groups == 16 + 4
    assert composition._replica_settings(remax).max_groups == 12 + 3


def test_long_answers_lose_in_proportion_and_what_they_lose_is_counted(tmp_path: Path):
    overlong = Overlong(max_tokens=6, buffer_tokens=4, penalty=2.0)
    with open_stage(tmp_path, FunctionReward("length", length), overlong=overlong) as stage:
        trajectories = [one for group in train_one_step(stage) for one in group.trajectories]
        lengths = {one.num_tokens for one in trajectories}
        assert min(lengths) <= 2 < max(lengths) == 6
        for one in trajectories:
            assert one.reward == one.num_tokens + overlong_penalty(one.num_tokens, 6, 4, 2.0)
        assert max(one.num_tokens - one.reward for one in trajectories) == 2.0
        status = stage.replica.status()
        shaping = status.shaping
        assert shaping is not None and shaping.scored >= len(trajectories)
        assert 0 < shaping.overlong < shaping.scored
        found = Meter()
        found.update(0.0, Statuses({"rollout.0": replace(status, shaping=ShapingStatus())}))
        row = found.update(1.0, Statuses({"rollout.0": status}))
        assert row["rollout/overlong_share"] == shaping.overlong / shaping.scored
        assert row["rollout/overlong_penalty"] == pytest.approx(shaping.taken_off / shaping.scored)


def test_a_run_shapes_what_it_trains_as_the_configuration_says():
    sections: dict[str, Any] = {"model": {"path": "m"}, "data": {"train": "t"}, "rollout": {"max_tokens": 10}}
    assert composition._build_overlong(Config(**sections, reward={"fn": "f"})) is None
    shaped = {"fn": "f", "overlong": {"buffer_tokens": 5, "penalty": 3.0}}
    overlong = composition._build_overlong(Config(**sections, reward=shaped))
    assert overlong is not None
    assert [overlong.shape(0.0, tokens) for tokens in (5, 6, 10)] == pytest.approx([0.0, -0.6, -3.0])
    assert overlong.status() == ShapingStatus(3, 2, pytest.approx(3.6))


def test_an_evaluation_is_not_shaped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(
        "def length(response, ground_truth, num_tokens):\n    return num_tokens\n"
    )
    write_data(tmp_path)
    shaped = {"fn": "mine.py:length", "overlong": {"buffer_tokens": 5}}
    config = make_config(tmp_path).model_copy(update={"reward": RewardSection(**shaped)})
    tokenizer, engine = build_tokenizer(), ScriptedEngine(EOS)
    held_out = load_prompts(tmp_path / "eval.parquet", tokenizer, 16)
    reward = load_reward(config.reward)
    evaluator = build_evaluator(config, engine, tokenizer, held_out, reward, None)
    assert evaluator is not None

    async def evaluate() -> dict[str, float]:
        await engine.start()
        await reward.start()
        try:
            return conclude(await evaluator.run(EvaluationOrder(id=1, step=0)))
        finally:
            await reward.close()

    found = asyncio.run(evaluate())
    assert found["val-core/held_out/reward/mean@1"] == found["val-aux/held_out/response_length/mean"] > 2
    assert reward.status().parts == {"length": (0, 0.0)}


def test_no_metric_of_shaping_is_there_without_it():
    assert not [name for name in Meter().update(0.0, Statuses()) if name.startswith("rollout/")]
