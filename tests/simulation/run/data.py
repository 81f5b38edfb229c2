"""Prompts and configuration of simulated runs. Files are read outside of any world: readers have threads."""

from __future__ import annotations

import functools
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from asyncrl.core.config.tree import Config, SourceSection
from rollout_service.data.prompts import PromptSet
from rollout_service.data.sources import load_sources
from rollout_service.rewards.score import Answer, RewardError, Score
from rollout_service.tasks.digit_sort.examples import draw_split
from rollout_service.tasks.digit_sort.folder import write_prompts
from rollout_service.tasks.digit_sort.vocabulary import build_tokenizer
from tests.simulation.kernel.world import World
from tests.simulation.run.scenario import Scenario

NUM_PROMPTS, NUM_HELD_OUT = 40, 4
MAX_PROMPT_TOKENS = 16


@dataclass(frozen=True)
class Data:
    """Prompts and tokenizer that replicas of all worlds read."""

    tokenizer: PreTrainedTokenizerBase
    prompts: PromptSet
    held_out: PromptSet


@functools.cache
def read_data() -> Data:
    """Return the data, which is the same in every process."""
    split, tokenizer = draw_split(0, NUM_PROMPTS, NUM_HELD_OUT), build_tokenizer()
    with tempfile.TemporaryDirectory() as folder:
        sets = []
        for name, examples in (("train", split.train), ("eval", split.held_out)):
            path = Path(folder) / f"{name}.parquet"
            write_prompts(path, examples, name)
            sets.append(load_sources([SourceSection(path=str(path))], tokenizer, MAX_PROMPT_TOKENS))
    return Data(tokenizer, *sets)


def make_config(scenario: Scenario, folder: Path) -> Config:
    """Return the configuration of a simulated run."""
    values: dict[str, Any] = {
        "run": {"seed": scenario.seed},
        "model": {"path": str(folder), "dtype": "float32"},
        "data": {"train": "train.parquet", "eval": "eval.parquet", "max_prompt_tokens": MAX_PROMPT_TOKENS},
        "reward": {"fn": "digit_sort"},
        "rollout": {
            "group_size": scenario.group_size,
            "max_tokens": scenario.max_tokens,
            "engine": "scripted",
        },
        "learner": {
            "groups_per_step": scenario.groups_per_step,
            "steps": scenario.steps,
            "stream": scenario.is_streaming,
        },
        "staleness": {"max_lag": scenario.max_lag, "policy": scenario.policy, "max_wait_s": 5.0},
        "buffer": {"journal": "file", "lease_s": scenario.lease_s},
        "algorithm": {"drop_constant_groups": scenario.drops_constant},
        "guard": {"action": "rollback" if scenario.rollbacks else "warn"},
        "checkpoint": {
            "every_steps": scenario.checkpoint_every,
            "keep": 2,
            "keep_best": scenario.keep_best,
            "max_stall_s": 2.0,
        },
        "eval": {"every_steps": scenario.evaluate_every, "replicas": scenario.evaluation_parts},
    }
    return Config.model_validate(values)


class LengthReward:
    """A played reward: as many points as the answer has tokens. A share of the answers cannot be scored."""

    def __init__(self, world: World, failing_share: float) -> None:
        self._dice, self._failing_share = world.dice, failing_share

    async def score(self, answer: Answer) -> Score:
        """Return the length."""
        if self._dice.random() < self._failing_share:
            raise RewardError("the played reward has no word for this answer")
        return Score(float(answer.num_tokens))
