"""Models that survive running out of memory, and that can refuse an update.

Owns the retry: microbatches of half the tokens, then more offload, and it says so. The gradients are
zeroed at the start of every try, so a retry is exact. Invariant: a pass is tried again only if no other
rank waits inside it and its optimizer step has not begun; whether that is so the backend knows.
"""

from __future__ import annotations

import contextlib
import logging
import math
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, cast

import torch
from torch import OutOfMemoryError

from learner.backend import LearnerBackend, Models, Reference, ValueBackend
from learner.batching.batch import PackedBatch
from learner.guard.explanations import explain
from learner.guard.guard import Limits, UnstableTraining
from learner.guard.hooks import OffloadingBackend, TunableBackend
from learner.guard.signals import Finding

log = logging.getLogger(__name__)

Part = Literal["actor", "critic"]
"""Prefix of the metrics of the model's updates."""

HOST_MESSAGES = ("not enough memory", "out of memory", "can't allocate memory")
"""Texts of a plain RuntimeError where the host's memory is exhausted."""


class Gate:
    """Decides before each optimizer step; every rank has the same limits and so decides alike."""

    def __init__(self, part: Part = "actor") -> None:
        self.limits: Limits = []
        self.num_refused = 0
        self._part = part

    def __call__(self, grad_norm: float, metrics: Mapping[str, float]) -> bool:
        values = {**metrics, f"{self._part}/grad_norm": grad_norm}
        is_beyond = any(abs(values.get(name, 0.0)) > limit for name, limit in self.limits)
        if is_beyond and math.isfinite(grad_norm):  # a backend refuses the others by itself
            self.num_refused += 1
            return False
        return True


class GuardedModel:
    """A policy, a critic or a reference with retries; what is not guarded goes to `inner`.

    Args:
        part: Says whose limits hold; a reference is never updated.
    """

    def __init__(self, inner: LearnerBackend | ValueBackend | Reference, part: Part = "actor") -> None:
        self._inner: Any = inner
        self._part = part
        self.gate = Gate(part)
        self.num_out_of_memory = 0
        self._refused: set[int] = set()
        self._applied: set[int] = set()
        if isinstance(inner, TunableBackend):
            inner.set_step_gate(self.gate)
            inner.set_memory_guard(self._make_room)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def begin_step(self, limits: Limits) -> None:
        """Begin a learner step with these limits of its updates."""
        self.gate.limits, self.gate.num_refused = limits, 0
        self._refused.clear()
        self._applied.clear()

    @property
    def refused_tickets(self) -> set[int]:
        """This rank's groups of the step that were in updates, none of which was applied."""
        return self._refused - self._applied

    def update(self, minibatch: PackedBatch, loss_fn: object) -> dict[str, float]:
        """See `LearnerBackend.update` and `ValueBackend.update`.

        Raises:
            UnstableTraining: There is no memory left, and making the microbatches smaller does not help.
        """
        return self._step([minibatch], lambda: self._inner.update(minibatch, loss_fn))

    def accumulate(self, parts: Sequence[PackedBatch], loss_fn: object, *, is_last: bool) -> dict[str, float]:
        """See `LearnerBackend.accumulate`. Raises UnstableTraining as `update` does."""
        with self._explaining():
            found: dict[str, float] = self._inner.accumulate(parts, loss_fn, is_last=is_last)
        return found

    def apply(
        self, parts: Sequence[PackedBatch], metrics: Mapping[str, float], divisor: float
    ) -> dict[str, float]:
        """See `LearnerBackend.apply`. Raises UnstableTraining as `update` does."""
        return self._step(parts, lambda: self._inner.apply(parts, metrics, divisor))

    def _step(self, parts: Sequence[PackedBatch], run: Callable[[], dict[str, float]]) -> dict[str, float]:
        with self._explaining():
            metrics = run()
        is_refused = bool(metrics.get(f"{self._part}/skipped_updates"))
        tickets = (ticket for part in parts for ticket in part.tickets_G)
        (self._refused if is_refused else self._applied).update(tickets)
        return metrics

    @contextlib.contextmanager
    def _explaining(self) -> Iterator[None]:
        """Say what to do where memory ends outside a pass: what a pass raises comes to `_make_room`."""
        try:
            yield
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            raise UnstableTraining(
                f"no memory left in the optimizer step: {error}", hint=self._hint()
            ) from error

    def _make_room(self, row_lengths: Sequence[int], error: BaseException, may_run_again: bool) -> None:
        """Use less memory from now on, or give up with the reason; raise `error` if it is another one."""
        if not is_out_of_memory(error):
            raise error
        self.num_out_of_memory += 1
        tokens = self._inner.max_tokens_per_microbatch
        if not may_run_again:
            raise UnstableTraining(
                f"a microbatch of {tokens} tokens did not fit while other ranks wait in the pass: {error}",
                hint=self._hint(),
            ) from error
        log.warning("%s", explain(Finding("out_of_memory", "learner.max_tokens_per_microbatch", tokens)))
        done = self._halve(row_lengths, tokens) or self._offload()
        if not done:
            raise UnstableTraining(
                f"microbatches of {tokens} tokens, as long as the longest row, do not fit: {error}",
                hint="Lower rollout.max_tokens, raise learner.tp or cp, or turn on recompute",
            ) from error
        traceback.clear_frames(error.__traceback__)  # they hold what the pass had computed
        if torch.cuda.is_initialized():  # its allocator keeps blocks of the size that did not fit
            torch.cuda.empty_cache()
        log.warning("out of memory (%s): %s; the pass is tried again", self._part, done)

    def _hint(self) -> str:
        tokens = self._inner.max_tokens_per_microbatch
        return f"Set learner.max_tokens_per_microbatch to {max(1, tokens // 2)}"

    def _halve(self, row_lengths: Sequence[int], tokens: int) -> str:
        in_use = min(tokens, sum(row_lengths))
        fewer = max(in_use // 2, max(row_lengths, default=1))
        if fewer >= in_use:
            return ""
        self._inner.set_max_tokens_per_microbatch(fewer)
        return f"the token budget of a microbatch went from {tokens} to {fewer}"

    def _offload(self) -> str:
        moved = self._inner.raise_offload() if isinstance(self._inner, OffloadingBackend) else ""
        return f"{moved} went to the host" if moved else ""


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether memory ran out, of the device or of the host."""
    if isinstance(error, MemoryError | OutOfMemoryError):
        return True
    return any(message in str(error).lower() for message in HOST_MESSAGES)


class GuardedModels:
    """The guarded `models` of one rank, to be trained in place of the plain ones.

    The limits and the retry are the same for policy and critic. It never decides what a refused update means:
    it says which groups trained nothing, those that neither the policy nor the critic learned from.
    """

    def __init__(self, plain: Models) -> None:
        self._policy = GuardedModel(plain.policy)
        self._critic = None if plain.critic is None else GuardedModel(plain.critic, "critic")
        self._reference = None if plain.reference is None else GuardedModel(plain.reference)
        # A guarded model passes on what it does not guard.
        self.models = Models(
            cast(LearnerBackend, self._policy),
            cast(ValueBackend | None, self._critic),
            cast(Reference | None, self._reference),
        )

    def begin_step(self, limits: Limits) -> None:
        """Begin a learner step with these limits of its updates."""
        for model in self._trained():
            model.begin_step(limits)

    @property
    def num_refused(self) -> int:
        """Updates of the step that were beyond the limits; the same on every rank."""
        return sum(model.gate.num_refused for model in self._trained())

    @property
    def refused_tickets(self) -> list[int]:
        """This rank's groups of the step that no model learned from, ascending."""
        return sorted(set.intersection(*(model.refused_tickets for model in self._trained())))

    @property
    def num_out_of_memory(self) -> int:
        """Times that memory ran out on this rank, since the start."""
        found = [*self._trained(), *([self._reference] if self._reference else [])]
        return sum(model.num_out_of_memory for model in found)

    def _trained(self) -> list[GuardedModel]:
        return [self._policy, *([self._critic] if self._critic else [])]
