"""A backend that survives running out of memory, and that can refuse an update.

Owns the retry: microbatches of half the tokens, then more offload, and it says so. The gradients are
zeroed at the start of every update, so a retry is exact. Invariant: an update is tried again only if
its optimizer step had not begun. With several ranks nothing is retried: the others would wait in a
collective that this rank does not enter.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch

from learner.backend import LearnerBackend, LossFn
from learner.batching.batch import PackedBatch
from learner.guard.explanations import explain
from learner.guard.guard import Limits, UnstableTraining
from learner.guard.seams import OffloadingBackend, TunableBackend
from learner.guard.signals import Finding

log = logging.getLogger(__name__)

HOST_MESSAGES = ("not enough memory", "out of memory", "can't allocate memory")
"""What a plain RuntimeError says where the host's memory ends."""
T = TypeVar("T")


class Gate:
    """Decides before each optimizer step; every rank has the same limits and so decides alike."""

    def __init__(self) -> None:
        self.limits: Limits = []
        self.num_refused = 0
        self.has_stepped = False

    def __call__(self, grad_norm: float, metrics: Mapping[str, float]) -> bool:
        values = {**metrics, "actor/grad_norm": grad_norm}
        is_beyond = any(abs(values.get(name, 0.0)) > limit for name, limit in self.limits)
        if is_beyond and math.isfinite(grad_norm):  # a backend refuses the others by itself
            self.num_refused += 1
            return False
        self.has_stepped = True
        return True


class GuardedBackend:
    """A `LearnerBackend` with retries; what is not guarded goes to `inner`.

    Args:
        can_retry: This is the only rank.
    """

    def __init__(self, inner: LearnerBackend, can_retry: bool) -> None:
        self._inner = inner
        self._can_retry = can_retry
        self.gate = Gate()
        self.num_out_of_memory = 0
        self._refused: set[int] = set()
        self._applied: set[int] = set()
        if isinstance(inner, TunableBackend):
            inner.set_step_gate(self.gate)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def begin_step(self, limits: Limits) -> None:
        """Begin a learner step with these limits of its updates."""
        self.gate.limits, self.gate.num_refused = limits, 0
        self._refused.clear()
        self._applied.clear()

    @property
    def refused_tickets(self) -> list[int]:
        """This rank's groups of the step that were in updates, none of which was applied; ascending."""
        return sorted(self._refused - self._applied)

    def logprobs(self, batch: PackedBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """See `LearnerBackend.logprobs`."""
        return self._retry(batch, lambda: self._inner.logprobs(batch))

    def update(self, minibatch: PackedBatch, loss_fn: LossFn) -> dict[str, float]:
        """See `LearnerBackend.update`."""
        metrics = self._retry(minibatch, lambda: self._inner.update(minibatch, loss_fn))
        is_refused = bool(metrics.get("actor/skipped_updates"))
        (self._refused if is_refused else self._applied).update(minibatch.tickets_G)
        return metrics

    def _retry(self, batch: PackedBatch, attempt: Callable[[], T]) -> T:
        while True:
            self.gate.has_stepped = False
            try:
                return attempt()
            except (MemoryError, RuntimeError) as error:  # torch.OutOfMemoryError is a RuntimeError
                if not is_out_of_memory(error):
                    raise
                self.num_out_of_memory += 1
                self._make_room(batch, error)

    def _make_room(self, batch: PackedBatch, error: BaseException) -> None:
        """Use less memory from now on, or give up with the reason."""
        if not isinstance(self._inner, TunableBackend):
            raise error
        tokens = self._inner.max_tokens_per_microbatch
        finding = Finding("out_of_memory", "learner.max_tokens_per_microbatch", float(tokens))
        hint = f"Set learner.max_tokens_per_microbatch to {max(1, tokens // 2)}"
        if not self._can_retry:
            raise UnstableTraining(
                f"a microbatch of {tokens} tokens did not fit: {error}", hint=hint
            ) from error
        if self.gate.has_stepped:
            raise UnstableTraining(f"no memory left in the optimizer step: {error}", hint=hint) from error
        log.warning("%s", explain(finding))
        done = self._halve(batch, tokens) or self._offload()
        if not done:
            raise UnstableTraining(
                f"microbatches of {tokens} tokens, as long as the longest row, do not fit: {error}",
                hint="Lower rollout.max_tokens, raise learner.tp or cp, or turn on recompute",
            ) from error
        log.warning("out of memory: %s; the update is tried again", done)

    def _halve(self, batch: PackedBatch, tokens: int) -> str:
        assert isinstance(self._inner, TunableBackend), "checked by the caller"
        longest = max((end - start for start, end in itertools.pairwise(batch.cu_seqlens)), default=1)
        in_use = min(tokens, batch.num_tokens)
        fewer = max(in_use // 2, longest)
        if fewer >= in_use:
            return ""
        self._inner.set_max_tokens_per_microbatch(fewer)
        return f"the token budget of a microbatch went from {tokens} to {fewer}"

    def _offload(self) -> str:
        moved = self._inner.raise_offload() if isinstance(self._inner, OffloadingBackend) else ""
        return f"{moved} went to the host" if moved else ""


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether memory ran out, of the device or of the host."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return any(message in str(error).lower() for message in HOST_MESSAGES)
