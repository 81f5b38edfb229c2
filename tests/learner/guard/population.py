"""Runs of the demo's task in one process, healthy or with one planted fault, for the guard's populations.

The learner is real: configuration, packing, objective, Megatron-core (or fsdp2), reports and the guard. The
engine is scripted: Hugging Face's Qwen3 samples with the learner's exported weights, some versions late, and
stamps each token. Nothing of vLLM, Ray or the buffer takes part: no signal that is judged here needs them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from asyncrl.core.config.load import load_config
from asyncrl.core.config.tree import Config
from asyncrl.core.experience import Group, Trajectory
from asyncrl.core.staleness import Span
from learner.algorithms.objective import Objective, make_objective
from learner.backend import Models, Placement
from learner.composition import open_models
from learner.guard.watch import Watch
from learner.orders import Train
from learner.ranks import Ranks
from learner.report import Stopwatch
from learner.trainer import Trainer
from rollout_service.tasks.digit_sort.examples import draw_digits
from rollout_service.tasks.digit_sort.vocabulary import EOS, PAD, encode_prompt

QUICKSTART = Path(__file__).parents[3] / "configs" / "quickstart.yaml"
HEAD = "lm_head.weight"
STATES = ("guard/lr_scale", "guard/is_kl_off")
"""Of the guard's metrics those that count nothing."""
LAGS = ((1, 2), (2, 3), (2, 4), (1, 3))
"""Of the groups of a step, as a demo's are: half of them each; 0 where `max_lag` is 0."""


@dataclass(frozen=True)
class Fault:
    """What is planted.

    Attributes:
        lr_factor: What the learner's rate is multiplied by.
        is_flipped: Whether the loss has the other sign.
        mask_shift: Positions by which the loss mask is wrong.
        stale: Whether the engine keeps its first copy of a tensor, by name; of `HEAD` also where it is tied.
    """

    lr_factor: float = 1.0
    is_flipped: bool = False
    mask_shift: int = 0
    stale: Callable[[str], bool] = lambda name: False


HEALTHY = Fault()
PLANTED = {
    "lr": Fault(lr_factor=10.0),
    "sign": Fault(is_flipped=True),
    "mask_late": Fault(mask_shift=1),
    "mask_early": Fault(mask_shift=-1),
}


class ScriptedEngine:
    """Samples at temperature 1 from Hugging Face's model with the weights it was given."""

    def __init__(self, model: Path, stale: Callable[[str], bool]) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        if stale(HEAD):  # a tied one becomes a copy, which no tensor that is loaded names
            head = self._model.get_output_embeddings()
            head.weight = torch.nn.Parameter(head.weight.detach().clone())
        self._stale = stale

    def load(self, tensors: dict[str, torch.Tensor]) -> None:
        fresh = {name: tensor for name, tensor in tensors.items() if not self._stale(name)}
        self._model.load_state_dict(fresh, strict=False)

    @torch.inference_mode()
    def sample(
        self, prompts: list[list[int]], max_tokens: int, generator: torch.Generator
    ) -> list[tuple[list[int], list[float]]]:
        """Return tokens and log-probs of one answer to each prompt; shorter prompts are padded in front."""
        width = max(len(prompt) for prompt in prompts)
        gaps = [width - len(prompt) for prompt in prompts]
        tokens_BT = torch.tensor([[PAD] * gap + prompt for gap, prompt in zip(gaps, prompts, strict=True)])
        is_real_BT = torch.tensor([[0] * gap + [1] * (width - gap) for gap in gaps])
        chosen, logprobs = [], []
        for _ in range(max_tokens):
            positions_BT = (is_real_BT.cumsum(1) - 1).clamp(min=0)
            inputs = {"attention_mask": is_real_BT, "position_ids": positions_BT}
            logits_BTV = self._model(tokens_BT, use_cache=False, **inputs).logits
            table_BV = logits_BTV[:, -1].float().log_softmax(-1)
            next_B = torch.multinomial(table_BV.exp(), 1, generator=generator)
            chosen.append(next_B)
            logprobs.append(table_BV.gather(1, next_B))
            tokens_BT = torch.cat([tokens_BT, next_B], 1)
            is_real_BT = torch.cat([is_real_BT, torch.ones_like(next_B)], 1)
        answers = zip(torch.cat(chosen, 1).tolist(), torch.cat(logprobs, 1).tolist(), strict=True)
        return [_cut(*answer) for answer in answers]


def _cut(tokens: list[int], logprobs: list[float]) -> tuple[list[int], list[float]]:
    end = tokens.index(EOS) + 1 if EOS in tokens else len(tokens)
    return tokens[:end], logprobs[:end]


@dataclass
class Answer:
    """What the engine has sampled to a prompt, and which versions."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)

    def add(self, version: int, tokens: list[int], logprobs: list[float]) -> None:
        self.spans.append(Span(version, len(self.tokens), len(self.tokens) + len(tokens)))
        self.tokens += tokens
        self.logprobs += logprobs

    def finish(self, reward: float) -> Trajectory:
        return Trajectory(
            response_ids=np.asarray(self.tokens, np.int32),
            loss_mask=np.ones(len(self.tokens), np.uint8),
            logprobs=np.asarray(self.logprobs, np.float32),
            spans=tuple(self.spans),
            reward=reward,
            finish_reason="stop" if self.tokens[-1] == EOS else "length",
        )


@dataclass
class MemoryIntake:
    """An fetcher whose groups are in memory."""

    groups: dict[int, Group] = field(default_factory=dict)

    def fetch(self, token: int, tickets: Any) -> list[Group]:
        return [self.groups[ticket] for ticket in tickets]


@dataclass(frozen=True)
class FaultyObjective(Objective):
    """An objective whose loss has what `fault` says."""

    fault: Fault = HEALTHY

    def loss(self, logprobs_N, entropy_N, microbatch):
        if self.fault.mask_shift:
            mask_N = microbatch.loss_mask_N.roll(self.fault.mask_shift)
            microbatch = dataclasses.replace(microbatch, loss_mask_N=mask_N)
        loss, metrics = super().loss(logprobs_N, entropy_N, microbatch)
        return (-loss if self.fault.is_flipped else loss), metrics


def is_sorted(tokens: list[int], wanted: list[int]) -> float:
    """The task's reward."""
    return float(tokens == wanted)


def begins_even(tokens: list[int], wanted: list[int]) -> float:
    """A reward that also a model which knows nothing gets now and then."""
    return float(tokens[0] % 2 == 0)


@dataclass
class Population:
    """One run. `go` yields the row of each step.

    Attributes:
        score: Reward of an answer, given what is wanted.
        num_before_swap: Tokens after which an answer of an older version goes on under the newest one,
            with a new cache; 0 for none that does.
    """

    config: Config
    model: Path
    seed: int
    fault: Fault = HEALTHY
    score: Callable[[list[int], list[int]], float] = is_sorted
    num_before_swap: int = 0

    def __post_init__(self) -> None:
        self._source = random.Random(1000 + self.seed)
        self._generator = torch.Generator().manual_seed(self.seed)
        self._fetcher = MemoryIntake()
        self._engine = ScriptedEngine(self.model, self.fault.stale)
        self._past: deque[dict[str, torch.Tensor]] = deque(maxlen=self.config.staleness.max_lag + 1)
        self._next_ticket = 1

    def go(self, num_steps: int) -> Iterator[dict[str, float]]:
        objective, models = self._open()
        ranks = Ranks(0, 1, torch.device("cpu"))
        trainer = Trainer(self.config, ranks, models, objective, self._fetcher, Stopwatch())
        watch = Watch(self.config.guard, self.config.model.dtype)
        with contextlib.closing(models):
            for step in range(num_steps):
                self._past.append({name: one.clone() for name, one in models.policy.named_tensors()})
                trained = trainer.train(self._generate(step))
                row = {"training/global_step": float(step + 1), **trained.metrics}
                yield row | watch.judge(step, row, trained.num_refused)

    def _open(self) -> tuple[Objective, Models]:
        config = self.config
        plain = make_objective(
            config.algorithm, max_lag=config.staleness.max_lag, max_response_tokens=config.rollout.max_tokens
        )
        fields = {one.name: getattr(plain, one.name) for one in dataclasses.fields(plain)}
        objective = FaultyObjective(**fields, fault=self.fault)
        rate = config.learner.lr * self.fault.lr_factor
        learner = config.learner.model_copy(update={"lr": rate})
        return objective, open_models(config.model_copy(update={"learner": learner}), objective, Placement())

    def _generate(self, step: int) -> Train:
        """Let the engine answer a batch of prompts; versions are numbered one above their step."""
        size, self._fetcher.groups = self.config.learner.groups_per_step, {}
        pair = self._source.choice(LAGS)
        lags = [min(pair[index % 2], len(self._past) - 1) for index in range(size)]
        for lag in sorted(set(lags)):
            self._answer([draw_digits(self._source) for one in lags if one == lag], step, lag)
        groups = list(self._fetcher.groups.values())
        versions = [(number, number - 1) for number in range(1, step + 2)]
        return Train(step, 1, [one.ticket for one in groups], [one.num_tokens for one in groups], versions)

    def _answer(self, lists: list[tuple[int, ...]], step: int, lag: int) -> None:
        size, most = self.config.rollout.group_size, self.config.rollout.max_tokens
        prompts = [encode_prompt(digits) for digits in lists for _ in range(size)]
        answers = [Answer() for _ in prompts]
        before = self.num_before_swap if lag else 0
        stages = ((lag, before), (0, most - before)) if before else ((lag, most),)
        for late, num_tokens in stages:
            self._engine.load(self._past[-1 - late])
            going = [pair for pair in zip(prompts, answers, strict=True) if EOS not in pair[1].tokens]
            assert going, "all answers ended before the swap"
            open_prompts = [prompt + answer.tokens for prompt, answer in going]
            found = self._engine.sample(open_prompts, num_tokens, self._generator)
            for (_, answer), one in zip(going, found, strict=True):
                answer.add(step - late + 1, *one)
        for index, digits in enumerate(lists):
            mine, wanted = answers[index * size : (index + 1) * size], [*sorted(digits), EOS]
            trajectories = tuple(one.finish(self.score(one.tokens, wanted)) for one in mine)
            prompt = np.asarray(prompts[index * size], np.int32)
            self._fetcher.groups[self._next_ticket] = Group(self._next_ticket, 1, prompt, trajectories)
            self._next_ticket += 1


def make_config(model: Path, seed: int, *changes: str) -> Config:
    """Return the demo's configuration, on the model in `model`."""
    fixed = (f"model.path={model}", f"run.seed={seed}", "guard.action=warn")
    return load_config(QUICKSTART, [*fixed, *changes])


def findings_of(rows: Iterable[dict[str, float]]) -> Iterator[tuple[int, str]]:
    """Yield the step, from 1, and the kind of each new finding, as the rows come."""
    before: dict[str, float] = {}
    for step, row in enumerate(rows, 1):
        counts = {
            name: value for name, value in row.items() if name.startswith("guard/") and name not in STATES
        }
        yield from (
            (step, name.removeprefix("guard/")) for name in counts if counts[name] > before.get(name, 0)
        )
        before = counts


def record(out: Path, model: Path, seed: int, fault: str, num_steps: int, *changes: str) -> None:
    """Write the rows of one run to `out`, a line of JSON each, to tune limits by."""
    planted = HEALTHY if fault == "healthy" else PLANTED[fault]
    with out.open("w", buffering=1) as file:
        for row in Population(make_config(model, seed, *changes), model, seed, planted).go(num_steps):
            file.write(json.dumps(row) + "\n")


def main(arguments: list[str]) -> None:
    """Record runs: FOLDER MODEL FAULT STEPS FIRST_SEED LAST_SEED [key=value ...]."""
    folder, model, fault, steps, first, last, *changes = arguments
    Path(folder).mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    for seed in range(int(first), int(last) + 1):
        record(Path(folder) / f"{fault}_{seed}.jsonl", Path(model), seed, fault, int(steps), *changes)


if __name__ == "__main__":
    import sys

    main(sys.argv[1:])
