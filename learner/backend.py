"""The seam between the learner's step and what computes it.

A backend holds the model and its optimizer on every rank. Batches are handed in on the CPU; what
comes back is on the CPU. All methods are collective: every rank calls them in the same order.

Shapes: N packed positions of the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from learner.batch import PackedBatch

LossFn = Callable[[torch.Tensor, torch.Tensor, PackedBatch], tuple[torch.Tensor, Mapping[str, torch.Tensor]]]
"""(logprobs_N, entropy_N, microbatch) -> (loss, metrics).

Losses and metrics of all microbatches on all ranks are summed: divide by `microbatch.totals`, which
are those of the whole minibatch. A metric whose name contains "max" or "min" is reduced that way.
"""


@dataclass(frozen=True)
class Placement:
    """Where this rank stands. `rendezvous` is "host:port"; one rank alone needs none."""

    rank: int = 0
    world_size: int = 1
    rendezvous: str = ""
    timeout_s: float = 600.0


class LearnerBackend(Protocol):
    """Computes log-probs and updates; see `learner.megatron.backend` for the first one."""

    @property
    def dp_rank(self) -> int:
        """Which share of the batch this rank trains."""

    @property
    def dp_size(self) -> int:
        """Into how many shares the batch is cut."""

    @property
    def num_updates(self) -> int:
        """Optimizer updates so far, those before a resume included."""

    def logprobs(self, batch: PackedBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (log-prob of each label [N], entropy [N]) under the current weights, without gradient.

        Raises:
            DataError: A row does not fit a microbatch.
        """

    def update(self, minibatch: PackedBatch, loss_fn: LossFn) -> dict[str, float]:
        """Do one optimizer update on this rank's share of a minibatch; return metrics of the whole.

        The share may be empty. An update whose gradient is not finite is skipped and counted in
        `actor/skipped_updates`.
        """

    def reduce(self, metrics: Mapping[str, float], weight: float) -> dict[str, float]:
        """Return metrics over all data-parallel ranks: max, min, or the mean by `weight`."""

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (Hugging Face name, full tensor), one at a time, the same order on every rank.

        A tensor may be a view of a live parameter: it is valid until the next update.
        """

    def save_state(self, folder: Path) -> None:
        """Write this rank's model, optimizer and generator state; `load_state` restores them bit by bit."""

    def load_state(self, folder: Path) -> None:
        """Restore what `save_state` wrote at the same layout.

        Raises:
            CheckpointError: The folder was written by another layout or model, or is incomplete.
        """

    def set_lr(self, lr: float) -> None:
        """Set the learning rate that holds after warm-up."""

    def save_hf(self, folder: Path) -> None:
        """Write a Hugging Face folder that transformers loads; rank 0 writes."""

    def close(self) -> None:
        """Leave the process groups."""
