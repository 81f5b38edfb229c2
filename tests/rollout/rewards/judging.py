"""Answers to judge, and rewards of files that are started and ended around a test."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

from asyncrl.core.config.tree import RewardSection
from rollout_service.data.prompts import Prompt
from rollout_service.rewards.registry import load_reward
from rollout_service.rewards.score import Answer, RewardError
from rollout_service.rewards.total import TotalReward

T = TypeVar("T")

PROMPT = Prompt(7, "2+2=", "4", "sums", {"level": 1})


def answer(response: str = "4", prompt: Prompt = PROMPT) -> Answer:
    return Answer(prompt, response, "stop", 2)


def write(folder: Path, body: str) -> str:
    """Write a reward file; return what names its function."""
    (folder / "mine.py").write_text(body)
    return f"{folder / 'mine.py'}:score"


def reward_of(fn: Any, **section: Any) -> TotalReward:
    return load_reward(RewardSection.model_validate({"fn": fn, **section}))


def judge(reward: TotalReward, work: Callable[[TotalReward], Awaitable[T]]) -> T:
    """Start `reward`, do `work` with it, and end it; no process of it may be left."""

    async def run() -> T:
        try:
            await reward.start()
            return await work(reward)
        finally:
            await reward.close()

    result = asyncio.run(run())
    assert reward.child_pids() == []
    return result


def score_all(reward: TotalReward, *responses: str) -> list[float | str]:
    """Score responses at once; where one fails, its kind stands instead."""

    async def score_one(reward: TotalReward, response: str) -> float | str:
        try:
            return (await reward.score(answer(response))).value
        except RewardError as error:
            return error.kind

    return judge(
        reward, lambda started: asyncio.gather(*(score_one(started, response) for response in responses))
    )
