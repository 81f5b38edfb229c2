"""One cell of the staleness study: one method at one exact lag from one seed, in this process.

Owns the loop sample -> reward -> pack -> objective -> update with the project's own parts; only the
sampler stands in for vLLM. Step t samples with the weights of step max(0, t - lag), taken from a ring of
copies. Invariant: every token trained at step t has lag min(t, lag); the objective asserts it.

Shapes: N packed positions.
"""

from __future__ import annotations

import collections
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from asyncrl.core.config.tree import AlgorithmSection, LearnerSection
from asyncrl.core.experience import Group, Trajectory
from asyncrl.core.staleness import Span
from learner.algorithms.objective import Objective, make_objective
from learner.backend import LearnerBackend, Placement
from learner.batching.batch import PackedBatch, build_batch, plan_minibatches
from research.staleness.sampler import Sampler, Samples, Shape, Weights
from rollout_service.rewards.rules.matching import score_digit_sort
from rollout_service.tasks.digit_sort.examples import Digits, draw_split
from rollout_service.tasks.digit_sort.folder import Recipe as TaskRecipe
from rollout_service.tasks.digit_sort.vocabulary import DIGITS, EOS, EQUALS, answer_text, encode_prompt
from rollout_service.tasks.splits import Split

PLAIN = {"clip": (0.2, 0.2), "veto": 0.0, "drop_constant_groups": False}
METHODS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "none": PLAIN | {"correction": "disabled"},
        "naive PPO": PLAIN | {"correction": "bypass_ppo_clip"},
        "decoupled": PLAIN | {"correction": "decoupled_token_is"},
        "token TIS": PLAIN | {"correction": "bypass_pg_is"},
        "CISPO": PLAIN | {"correction": "bypass_ppo_clip", "loss": "cispo", "clip": (10.0, 0.2)},
        "GSPO": PLAIN
        | {"correction": "bypass_ppo_clip", "loss": "gspo", "aggregation": "seq-mean-token-mean"},
    }
)
"""The algorithm section of each method. No veto: it would be a second correction of its own."""

LAGS = (0, 1, 4, 16, 64)
SEEDS = (0, 1, 2)
MAX_TOKENS = 7
EVALUATION_SEED = 12345
FIRST_VERSION = 1
MEASURED = {
    "kl": "rollout_corr/kl",
    "ess": "rollout_corr/rollout_is_eff_sample_size",
    "chi2_token": "rollout_corr/chi2_token",
    "entropy": "actor/entropy",
}


@dataclass(frozen=True)
class Cell:
    """Method, lag and seed of one cell."""

    method: str
    lag: int
    seed: int

    @property
    def name(self) -> str:
        """`decoupled/64/0`."""
        return f"{self.method}/{self.lag}/{self.seed}"


@dataclass(frozen=True)
class Recipe:
    """Settings that all cells share. KL, ESS and entropy are measured every `measure_every` steps."""

    num_steps: int
    evaluate_every: int = 25
    measure_every: int = 10
    groups_per_step: int = 16
    group_size: int = 8
    minibatches: int = 2
    lr: float = 1e-4
    warmup_steps: int = 20
    num_evaluation_prompts: int = 512


def run_cell(cell: Cell, recipe: Recipe, folder: Path) -> dict[str, Any]:
    """Train one cell from the warm start in `folder` and return its curves and figures.

    Returns:
        `accuracy`: [step, sampled accuracy] pairs; `measured`: for each of `MEASURED` the same, of the
        weights about to be trained against the sampler's; `cpu_s`, `cpu_s_per_step`.
    """
    began_s = time.process_time()
    backend = open_backend(recipe, cell.seed, folder)
    try:
        run = _CellRun(cell, recipe, backend, Shape.read(folder))
        started_s = time.process_time()
        for step in range(recipe.num_steps):
            run.train(step)
        run.evaluate(recipe.num_steps)
    finally:
        backend.close()
    end_s = time.process_time()
    return {
        "method": cell.method,
        "lag": cell.lag,
        "seed": cell.seed,
        "accuracy": run.accuracy,
        "measured": run.measured,
        "cpu_s": end_s - began_s,
        "cpu_s_per_step": (end_s - started_s) / recipe.num_steps,
    }


def open_backend(recipe: Recipe, seed: int, folder: Path) -> LearnerBackend:
    """Return the project's Megatron backend on one rank, with the warm start loaded."""
    from learner.megatron.backend import MegatronBackend  # takes seconds: not for `--help`

    section = LearnerSection(
        groups_per_step=recipe.groups_per_step,
        minibatches=recipe.minibatches,
        lr=recipe.lr,
        warmup_steps=recipe.warmup_steps,
        betas=(0.9, 0.99),
        max_tokens_per_microbatch=4096,
        steps=recipe.num_steps,
    )
    return MegatronBackend(folder, section, Placement(), dtype="float32", seed=seed)


class _CellRun:
    """The state of a cell: its backend, the ring of past weights, its random sources, its records."""

    def __init__(self, cell: Cell, recipe: Recipe, backend: LearnerBackend, shape: Shape) -> None:
        self._cell, self._recipe, self._backend, self._shape = cell, recipe, backend, shape
        self._objective = make_method(cell.method, cell.lag)
        self._meter = make_method("decoupled", cell.lag)
        self._source = random.Random(cell.seed)
        self._sampler = Sampler(shape, eos=EOS, max_tokens=MAX_TOKENS, seed=cell.seed)
        self._split = read_split()
        self._ring = collections.deque([self._copy_weights()], maxlen=cell.lag + 1)
        self.accuracy: list[tuple[int, float]] = []
        self.measured: dict[str, list[tuple[int, float]]] = {name: [] for name in MEASURED}

    def train(self, step: int) -> None:
        """Sample with the oldest weights of the ring, update, add the new weights to the ring."""
        if step % self._recipe.evaluate_every == 0:
            self.evaluate(step)
        sampled_step = step + 1 - len(self._ring)
        assert sampled_step == max(0, step - self._cell.lag), "the ring must hold exactly `lag` past versions"
        lists = [self._source.choice(self._split.train) for _ in range(self._recipe.groups_per_step)]
        groups = make_groups(self._sample(lists), lists, self._recipe.group_size, step, sampled_step)
        batch = build_batch(groups, step, {FIRST_VERSION + sampled_step: sampled_step})
        for minibatch in self._prepare(batch, step):
            self._backend.update(minibatch, self._objective.loss)
        self._ring.append(self._copy_weights())

    def evaluate(self, step: int) -> None:
        """Sample one answer to each held-out list with the newest weights and record the share sorted."""
        lists = self._split.held_out[: self._recipe.num_evaluation_prompts]
        sampler = Sampler(self._shape, eos=EOS, max_tokens=MAX_TOKENS, seed=EVALUATION_SEED)
        samples = sampler.sample(self._ring[-1], [encode_prompt(digits) for digits in lists], 1)
        rewards = [score(samples, row, digits) for row, digits in enumerate(lists)]
        self.accuracy.append((step, sum(rewards) / len(rewards)))

    def _prepare(self, batch: PackedBatch, step: int) -> list[PackedBatch]:
        plan = plan_minibatches(batch.tickets_G, self._recipe.minibatches)
        is_measured = step % self._recipe.measure_every == 0
        is_needed = is_measured or self._objective.needs_prox
        prox = self._backend.logprobs(batch) if is_needed else (None, None)
        if is_measured:
            metrics = self._meter.prepare(batch, *prox)[1]
            for name, metric in MEASURED.items():
                self.measured[name].append((step, metrics[metric]))
        if not self._objective.needs_prox:
            prox = (None, None)
        prepared, _ = self._objective.prepare(batch, *prox)
        return [prepared.select_groups(tickets) for tickets in plan]

    def _sample(self, lists: Sequence[Digits]) -> Samples:
        prompts = [encode_prompt(digits) for digits in lists]
        return self._sampler.sample(self._ring[0], prompts, self._recipe.group_size)

    def _copy_weights(self) -> Weights:
        return Weights.copy(self._backend.named_tensors(), self._shape)


def make_method(method: str, lag: int) -> Objective:
    """Return the objective of `method`, which asserts that no token is older than `lag`."""
    section = AlgorithmSection(**METHODS[method])
    return make_objective(section, max_lag=lag, max_response_tokens=MAX_TOKENS)


def read_split() -> Split[Digits]:
    """Return the lists of the demo task: those its files hold."""
    recipe = TaskRecipe()
    return draw_split(recipe.seed, recipe.num_train, recipe.num_held_out)


def make_groups(
    samples: Samples, lists: Sequence[Digits], group_size: int, step: int, sampled_step: int
) -> list[Group]:
    """Return the samples as the groups that a replica at `sampled_step` would push, scored."""
    tokens_BT, logprobs_BT = samples.tokens_BT.numpy(), samples.logprobs_BT.numpy()
    groups = []
    for index, digits in enumerate(lists):
        trajectories = []
        for row in range(index * group_size, (index + 1) * group_size):
            length = samples.num_tokens[row]
            trajectories.append(
                Trajectory(
                    response_ids=tokens_BT[row, :length].astype(np.int32),
                    loss_mask=np.ones(length, np.uint8),
                    logprobs=logprobs_BT[row, :length],
                    spans=(Span(FIRST_VERSION + sampled_step, 0, length),),
                    reward=score(samples, row, digits),
                    finish_reason="stop" if samples.is_finished[row] else "length",
                )
            )
        prompt_ids = np.asarray(encode_prompt(digits), np.int32)
        groups.append(Group(step * len(lists) + index, 1, prompt_ids, tuple(trajectories)))
    return groups


def score(samples: Samples, row: int, digits: Digits) -> float:
    """Return the task's reward of one response, decoded as its tokenizer does: special tokens left out."""
    tokens = samples.tokens_BT[row, : samples.num_tokens[row]].tolist()
    text = "".join(DIGITS[token] if token < len(DIGITS) else "=" * (token == EQUALS) for token in tokens)
    finish_reason = "stop" if samples.is_finished[row] else "length"
    return score_digit_sort(
        text, answer_text(digits), finish_reason=finish_reason, num_tokens=samples.num_tokens[row]
    )
