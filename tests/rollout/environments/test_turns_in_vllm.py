"""Episodes of several turns in the real vLLM on CPU: every token is what Hugging Face makes of the whole."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from asyncrl.core.experience import Trajectory
from asyncrl.core.staleness import PolicyVersion
from rollout_service.engine.protocol import Sampling
from rollout_service.engine.vllm.engine import VllmEngine, VllmSettings
from rollout_service.environments import Environment, Step
from rollout_service.environments.registry import Episodes
from rollout_service.environments.runner import MultiTurn
from rollout_service.tasks.digit_sort.vocabulary import build_tokenizer
from tests.different import assert_all_differ
from tests.rollout.engine.engine_parts import LoopThread, logprobs_of, make_model, save_model, stage
from tests.rollout.environments.parts import ExactMatch, make_prompt

pytestmark = pytest.mark.long
TOLERANCE = 1e-4
NUM_EPISODES = 12
MAX_TOKENS = 60


class Again(Environment):
    """Says `7=` after each turn, five times; tells a test when a turn is over."""

    turns_over = 0

    def __init__(self, prompt: object, seed: int) -> None:
        self._left = 5

    async def step(self, answer: str) -> Step:
        Again.turns_over += 1
        self._left -= 1
        return Step("7=", is_done=self._left == 0)


@pytest.fixture(scope="module")
def engine(loop: LoopThread, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmEngine]:
    folder = save_model(make_model(0), tmp_path_factory.mktemp("model"))
    made = VllmEngine(VllmSettings(str(folder), "float32", 128, 32, 64 << 20))
    loop.call(made.start())
    yield made
    loop.call(made.shutdown())


async def run_all(engine: VllmEngine, swaps: int) -> list[Trajectory]:
    """Run episodes side by side, and give the engine `swaps` new versions while they go on."""
    runner = MultiTurn(engine, build_tokenizer(), Episodes(Again), ExactMatch(), has_chats=False)  # type: ignore[arg-type]
    prompt = make_prompt("314=", tokenizer=build_tokenizer())
    first = engine.serving.number
    begun = Again.turns_over
    episodes = [
        asyncio.create_task(runner.run(prompt, Sampling(1.0, MAX_TOKENS, seed), f"{first}.{seed}"))
        for seed in range(NUM_EPISODES)
    ]
    for number in range(first + 1, first + 1 + swaps):
        while Again.turns_over < begun + 10 * (number - first):
            await asyncio.sleep(0)
        with stage(make_model(number), PolicyVersion(number, number)) as staged:
            await engine.swap(staged)
    return await asyncio.gather(*episodes)


def check(trajectory: Trajectory) -> None:
    """Under the version of its span, each sampled token has Hugging Face's log-prob given all before it."""
    prompt = make_prompt("314=", tokenizer=build_tokenizer()).token_ids.tolist()
    ids = trajectory.response_ids.tolist()
    for span in trajectory.spans:
        wanted = logprobs_of(make_model(span.version), prompt, ids)[span.start : span.end]
        found = torch.tensor(trajectory.logprobs[span.start : span.end])
        is_said = torch.tensor(trajectory.loss_mask[span.start : span.end] == 1)
        assert (found - wanted)[is_said].abs().max() < TOLERANCE


def test_every_turn_is_sampled_from_the_whole_conversation(loop: LoopThread, engine: VllmEngine):
    trajectories = loop.call(run_all(engine, swaps=0))
    for trajectory in trajectories:
        check(trajectory)
        assert trajectory.num_turns > 1 or trajectory.finish_reason == "length"
    assert max(trajectory.num_turns for trajectory in trajectories) >= 3


def test_the_same_seeds_give_the_same_episodes(loop: LoopThread, engine: VllmEngine):
    first, again = (loop.call(run_all(engine, swaps=0)) for _ in range(2))
    assert len({tuple(one.response_ids.tolist()) for one in first}) > NUM_EPISODES / 2, "no seed matters"
    for one, other in zip(first, again, strict=True):
        assert one.response_ids.tolist() == other.response_ids.tolist()
        assert np.abs(one.logprobs - other.logprobs).max() < TOLERANCE


def test_swaps_under_way_leave_exact_spans_over_turns(loop: LoopThread, engine: VllmEngine):
    assert_all_differ([make_model(number) for number in range(4)], in_every_tensor=True)
    trajectories = loop.call(run_all(engine, swaps=3))
    for trajectory in trajectories:
        check(trajectory)
    assert max(len(trajectory.spans) for trajectory in trajectories) >= 2
