"""An engine and a model that sleep: all that is left to measure is the system around them.

Owns a replica whose tokens come at a stated rate and a learner whose tokens take a stated time. Buffer,
ledger, weight sync, replica and learner loop are the project's; nothing is computed. Invariant: a response
takes `length / tokens_per_s` from when a slot of the engine was free, whatever else goes on.
"""

from __future__ import annotations

import asyncio
import bisect
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from asyncrl.core.config.tree import Config
from asyncrl.core.service import ServiceContext
from asyncrl.core.staleness import UNLOADED, PolicyVersion, Span
from learner import composition as learner_composition
from learner.algorithms.objective import Objective
from learner.backend import LossFn, Models, Placement
from learner.batching.batch import PackedBatch
from learner.checkpoint.snapshot import Snapshot
from learner.service import LearnerService
from rollout_service import composition as rollout_composition
from rollout_service.engine.protocol import Completion, Interrupted, Sampling
from rollout_service.replica.service import Replica
from weight_sync.memory.parts import Part

if TYPE_CHECKING:
    from weight_sync.memory.staging import Staged

FILE = "sleepers.json"
WEIGHTS = (512, 512)
"""Shape of the only tensor: 1 MiB."""
LOGPROB = -1.0
LOOK_BACK_SHARE = 0.25
"""Of a step's training time, the pass for prox: a forward pass beside one of forward and backward."""


@dataclass(frozen=True)
class Pace:
    """Speeds of the sleeping engine and model.

    Attributes:
        tokens_per_s: Of each of the engine's requests.
        train_s_per_token: Of a step, per response token; prompts cost nothing.
    """

    tokens_per_s: float
    train_s_per_token: float

    def write(self, run_dir: Path) -> None:
        """Leave it where the services of a run find it."""
        (run_dir / FILE).write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, run_dir: Path) -> Pace:
        return cls(**json.loads((run_dir / FILE).read_text()))


def build_replica(context: ServiceContext) -> Replica:
    """Build the service `rollout.<n>` with an engine that sleeps."""
    pace = Pace.read(context.run_dir)

    def make_engine(config: Config, tokenizer: Any) -> SleepingEngine:
        return SleepingEngine(pace.tokens_per_s, config.rollout.max_sequences)

    return rollout_composition.build(context, make_engine)


def build_learner(context: ServiceContext) -> LearnerService:
    """Build the service `learner.0` with a model that sleeps."""
    pace = Pace.read(context.run_dir)

    def make_models(config: Config, objective: Objective, placement: Placement) -> Models:
        return Models(SleepingModel(pace.train_s_per_token))

    return learner_composition.build(context, make_models)


class SleepingEngine:
    """Answers with `max_tokens` zeros at a steady rate, `slots` requests at a time. See `protocol.Engine`."""

    probe_gap: float | None = None

    def __init__(self, tokens_per_s: float, slots: int) -> None:
        self._tokens_per_s = tokens_per_s
        self._slots = asyncio.Semaphore(slots)
        self._requests: set[asyncio.Event] = set()
        self._swapped_s: list[float] = []
        self._versions = [PolicyVersion(UNLOADED, 0)]

    @property
    def serving(self) -> PolicyVersion:
        return self._versions[-1]

    @property
    def is_loaded(self) -> bool:
        return self.serving.number != UNLOADED

    async def start(self) -> None:
        """There is nothing to load."""

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, request_id: str) -> Completion:
        async with self._slots:
            began_s, ended = time.monotonic(), asyncio.Event()
            self._requests.add(ended)
            try:
                async with asyncio.timeout(sampling.max_tokens / self._tokens_per_s):
                    await ended.wait()
            except TimeoutError:
                return self._complete(began_s, sampling.max_tokens)
            finally:
                self._requests.discard(ended)
        num_tokens = int((time.monotonic() - began_s) * self._tokens_per_s)
        raise Interrupted(f"{request_id} was ended", completion=self._complete(began_s, num_tokens))

    async def interrupt(self) -> None:
        running = set(self._requests)
        for ended in running:
            ended.set()
        while running & self._requests:
            await asyncio.sleep(0)

    async def swap(self, staged: Staged) -> None:
        self._swapped_s.append(time.monotonic())
        self._versions.append(staged.version)

    def cache_status(self) -> None:
        return None

    def child_pids(self) -> list[int]:
        return []

    async def shutdown(self) -> None:
        """There is nothing to end."""

    def _complete(self, began_s: float, num_tokens: int) -> Completion:
        return Completion(
            token_ids=np.zeros(num_tokens, dtype=np.int32),
            logprobs=np.full(num_tokens, LOGPROB, dtype=np.float32),
            spans=self._spans(began_s, num_tokens),
            finish_reason="length",
        )

    def _spans(self, began_s: float, num_tokens: int) -> tuple[Span, ...]:
        """Return which version was loaded when each token came."""
        first = bisect.bisect_right(self._swapped_s, began_s)
        borders = [int((swap - began_s) * self._tokens_per_s) for swap in self._swapped_s[first:]]
        starts = [0, *(min(border, num_tokens) for border in borders)]
        ends = [*starts[1:], num_tokens]
        numbers = (version.number for version in self._versions[first:])
        found = zip(numbers, starts, ends, strict=True)
        return tuple(Span(number, start, end) for number, start, end in found if end > start)


class SleepingModel:
    """A `LearnerBackend` of one tensor that learns nothing, in a stated time per response token."""

    dp_rank, dp_size, num_copies, shares_prompts = 0, 1, 1, False

    def __init__(self, train_s_per_token: float) -> None:
        self._s_per_token = train_s_per_token
        self._weights = torch.zeros(WEIGHTS)
        self._parts = (Part("weight", WEIGHTS, 0, 0, self._weights),)
        self.num_updates = 0

    def logprobs(self, batch: PackedBatch) -> tuple[torch.Tensor, torch.Tensor]:
        began_s = time.monotonic()
        found = batch.behaviour_N.clone(), torch.zeros_like(batch.behaviour_N)
        self._sleep(began_s, batch, LOOK_BACK_SHARE)
        return found

    def logprobs_and_squares(self, batch: PackedBatch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return *self.logprobs(batch), torch.zeros_like(batch.behaviour_N)

    def without_adapters(self) -> AbstractContextManager[None]:
        return nullcontext()

    def update(self, minibatch: PackedBatch, loss_fn: LossFn) -> dict[str, float]:
        return self.apply([minibatch], self.accumulate([minibatch], loss_fn, is_last=True), 1.0)

    def accumulate(self, parts: Sequence[PackedBatch], loss_fn: LossFn, *, is_last: bool) -> dict[str, float]:
        began_s, part = time.monotonic(), parts[-1]
        with torch.no_grad():
            _, metrics = loss_fn(part.behaviour_N, torch.zeros_like(part.behaviour_N), part)
        self._sleep(began_s, part, 1 - LOOK_BACK_SHARE)
        return {name: float(value) for name, value in metrics.items()}

    def apply(
        self, parts: Sequence[PackedBatch], metrics: Mapping[str, float], divisor: float
    ) -> dict[str, float]:
        self.num_updates += 1
        return {**metrics, "actor/grad_norm": 0.0, "actor/lr": 0.0, "actor/skipped_updates": 0.0}

    def _sleep(self, began_s: float, batch: PackedBatch, share: float) -> None:
        """Sleep until the batch has had its time, what was computed meanwhile included."""
        end_s = began_s + share * self._s_per_token * float(batch.counted_N.sum())
        time.sleep(max(0.0, end_s - time.monotonic()))

    def reduce(self, metrics: Mapping[str, float], weight: float) -> dict[str, float]:
        return dict(metrics)

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield "weight", self._weights

    def named_parts(self) -> tuple[Part, ...]:
        return self._parts

    def snapshot_state(self) -> Snapshot:
        return Snapshot(0, {}, (), {}, {})

    def save_state(self, folder: Path) -> None:
        """It has no state."""

    def load_state(self, folder: Path) -> None:
        """It has no state."""

    def set_lr(self, lr: float) -> None:
        """It learns nothing."""

    def save_hf(self, folder: Path) -> None:
        """It is no model of Hugging Face's."""

    def close(self) -> None:
        """It is in no process group."""
