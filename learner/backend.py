"""Protocols between the learner's step and its backend.

A backend holds the model and its optimizer on every rank. Batches are handed in on the CPU; what
comes back is on the CPU. All methods are collective: every rank calls them in the same order.

Shapes: N packed positions of the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Protocol

import torch
from torch.distributed import Store

from learner.batching.batch import PackedBatch
from learner.checkpoint.snapshot import Snapshot
from weight_sync.backends.rendezvous import join_store
from weight_sync.memory.parts import Part

LossFn = Callable[[torch.Tensor, torch.Tensor, PackedBatch], tuple[torch.Tensor, Mapping[str, torch.Tensor]]]
"""(logprobs_N, entropy_N, microbatch) -> (loss, metrics).

Losses and metrics of all microbatches on all ranks are summed: divide by `microbatch.totals`, which
are those of the whole minibatch. A metric whose name contains "max" or "min" is reduced that way.
"""

ValueLossFn = Callable[[torch.Tensor, PackedBatch], tuple[torch.Tensor, Mapping[str, torch.Tensor]]]
"""(values_N, microbatch) -> (loss, metrics), with the rules of `LossFn`."""


@dataclass(frozen=True)
class Placement:
    """Place of this rank.

    Attributes:
        rendezvous: "host:port", where rank 0 listens on that interface alone; one rank needs none.
        timeout_s: Of each collective.
        secret: By which the ranks know one another; without it whoever connects is one.
    """

    rank: int = 0
    world_size: int = 1
    rendezvous: str = ""
    timeout_s: float = 600.0
    secret: str = field(default="", repr=False)

    def join_store(self) -> Store:
        """Return the store in which all ranks meet."""
        return join_store(self.rendezvous, self.rank, timedelta(seconds=self.timeout_s), self.secret)


class ModelBackend(Protocol):
    """Interface of every model of a learner rank, whatever it outputs."""

    @property
    def dp_rank(self) -> int:
        """Index of the share of the batch that this rank trains."""

    @property
    def dp_size(self) -> int:
        """Number of shares into which the batch is cut."""

    @property
    def num_copies(self) -> int:
        """Number of ranks that train one share together: each count of that share is multiplied by it."""

    @property
    def shares_prompts(self) -> bool:
        """Whether what rows of a group begin with is computed once; see `learner.batching.shared_prompts`."""

    @property
    def num_updates(self) -> int:
        """Optimizer updates so far, those before a resume included."""

    def reduce(self, metrics: Mapping[str, float], weight: float) -> dict[str, float]:
        """Return metrics over all data-parallel ranks: max, min, or the mean by `weight`."""

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (Hugging Face name, full tensor), one at a time, the same order on every rank.

        A tensor may be a view of a live parameter: it is valid until the next update.
        """

    def named_parts(self) -> tuple[Part, ...]:
        """Return the rectangles of the full tensors that this rank is to publish, each element on one rank.

        They are views of live parameters, valid until the next update; the same object while they are the
        same views.
        """

    def snapshot_state(self) -> Snapshot:
        """Copy model, optimizer and generator state of this rank to the host.

        It is valid until the next call, whatever is trained meanwhile; `Snapshot.write` writes it.
        """

    def save_state(self, folder: Path) -> None:
        """Write this rank's state into `folder` and wait for the other ranks."""

    def load_state(self, folder: Path) -> None:
        """Restore a state of any layout of ranks; with the same layout bit by bit.

        Raises:
            CheckpointError: The folder holds another model's state, or is incomplete.
        """

    def set_lr(self, lr: float) -> None:
        """Set the learning rate that holds after warm-up."""

    def save_hf(self, folder: Path) -> None:
        """Write a Hugging Face folder that transformers loads; rank 0 writes."""

    def close(self) -> None:
        """Leave the process groups."""


class LearnerBackend(ModelBackend, Protocol):
    """Computes log-probs and updates; see `learner.megatron.backend` for the first one."""

    def logprobs(self, batch: PackedBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (log-prob of each label [N], entropy [N]) under the current weights, without gradient.

        Raises:
            DataError: A row does not fit a microbatch.
        """

    def logprobs_and_squares(self, batch: PackedBatch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """As `logprobs`, and third the sum over the vocabulary of squared probabilities [N]."""

    def without_adapters(self) -> AbstractContextManager[None]:
        """Leave the adapters of `model.lora` out within the block: the model is that of its files."""

    def update(self, minibatch: PackedBatch, loss_fn: LossFn) -> dict[str, float]:
        """Do one optimizer update on this rank's share of a minibatch; return metrics of the whole.

        The share may be empty. An update whose gradient is not finite is skipped and counted in
        `actor/skipped_updates`.
        """

    def accumulate(self, parts: Sequence[PackedBatch], loss_fn: LossFn, *, is_last: bool) -> dict[str, float]:
        """Add the gradient of the last of `parts`; return its metrics, summed over ranks as they are.

        For a minibatch that comes in parts: those before it have been added since the last update, and their
        totals stay what they are. Data-parallel ranks exchange gradients with the part that `is_last`.
        """

    def apply(
        self, parts: Sequence[PackedBatch], metrics: Mapping[str, float], divisor: float
    ) -> dict[str, float]:
        """Divide the gradient of `parts` by `divisor` and do the update; return metrics as `update` does.

        Args:
            metrics: Those of the whole minibatch, which limits of the guard are about.
        """


class ValueBackend(ModelBackend, Protocol):
    """The critic: a second model in the process, on the same process groups as the policy."""

    def values(self, batch: PackedBatch) -> torch.Tensor:
        """Return the value of the state before each label [N] under the current weights, no gradient."""

    def update(self, minibatch: PackedBatch, loss_fn: ValueLossFn) -> dict[str, float]:
        """Do one optimizer update, as `LearnerBackend.update` does; metrics are `critic/*`."""


class Reference(Protocol):
    """The policy that a KL term measures against."""

    def logprobs(self, batch: PackedBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """As `LearnerBackend.logprobs`."""

    def close(self) -> None:
        """Leave the process groups."""


@dataclass(frozen=True)
class Models:
    """The models of one learner rank, in the same process groups: the policy opens first and closes last.

    Attributes:
        policy: The model that is trained and published.
        critic: Gives values, where the advantage needs them.
        reference: The policy as it was at the start of the run, frozen, where the objective has a KL term;
            with adapters the policy without them.
    """

    policy: LearnerBackend
    critic: ValueBackend | None = None
    reference: Reference | None = None

    def close(self) -> None:
        """Leave the process groups."""
        for model in (self.reference, self.critic, self.policy):
            if model is not None:
                model.close()
