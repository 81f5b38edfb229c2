"""The learner backend on Megatron-core: a policy, trained or frozen, and the critic beside it.

Owns the views of an `Engine`: log-probs and entropies of labels, or values. Must never hold logits: the head
gives log-probs straight from hidden states. A critic must not be closed after the backend that started the
groups.

Shapes: N packed positions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import torch

from asyncrl.core.config.tree import LearnerSection, LoraSection
from learner.backend import LossFn, Placement, ValueLossFn
from learner.batching.batch import PackedBatch
from learner.lora.factors import NO_ADAPTERS
from learner.megatron.engine import Engine
from learner.megatron.schedule import ColumnsLoss


class MegatronBackend(Engine):
    """A `LearnerBackend`.

    Example:
        backend = MegatronBackend(Path("model"), LearnerSection(lr=1e-4), Placement(), dtype="float32")
        logprobs_N, entropy_N = backend.logprobs(batch)
        metrics = backend.update(batch, loss_fn)
        backend.close()
    """

    def __init__(
        self,
        model_path: Path,
        config: LearnerSection,
        placement: Placement,
        *,
        dtype: str = "bfloat16",
        seed: int = 0,
        temperature: float = 1.0,
        is_frozen: bool = False,
        lora: LoraSection = NO_ADAPTERS,
    ) -> None:
        """Join the other ranks and load the model.

        Args:
            is_frozen: A reference policy: no gradient buffers, no optimizer, no `update`.
            lora: Adapters that are trained in place of the model, if their rank is not 0.

        Raises:
            ConfigError: The model is not supported, or cannot be cut over the ranks that there are.
        """
        super().__init__(
            model_path,
            config,
            placement,
            kind="policy",
            dtype=dtype,
            seed=seed,
            temperature=temperature,
            is_frozen=is_frozen,
            lora=lora,
        )

    def logprobs(self, batch: PackedBatch) -> tuple[torch.Tensor, torch.Tensor]:
        logprobs_N, entropy_N = self._forward(batch)
        return logprobs_N, entropy_N

    def logprobs_and_squares(self, batch: PackedBatch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logprobs_N, entropy_N, squares_N = self._forward(batch, has_squares=True)
        return logprobs_N, entropy_N, squares_N

    def without_adapters(self) -> AbstractContextManager[None]:
        return self._adapters.off()

    def update(self, minibatch: PackedBatch, loss_fn: LossFn) -> dict[str, float]:
        return self._train(minibatch, _by_columns(loss_fn))

    def accumulate(self, parts: Sequence[PackedBatch], loss_fn: LossFn, *, is_last: bool) -> dict[str, float]:
        return self._accumulate(parts, _by_columns(loss_fn), is_last=is_last)

    def apply(
        self, parts: Sequence[PackedBatch], metrics: Mapping[str, float], divisor: float
    ) -> dict[str, float]:
        done = self._step_optimizer(metrics, divisor)
        self._num_updates += 1
        return {**metrics, **done}


def _by_columns(loss_fn: LossFn) -> ColumnsLoss:
    def loss(
        output_2N: torch.Tensor, microbatch: PackedBatch
    ) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        return loss_fn(output_2N[0], output_2N[1], microbatch)

    return loss


class MegatronValueBackend(Engine):
    """A `ValueBackend`. The head is `score.weight` of the folder, or zero where there is none.

    Example:
        policy = MegatronBackend(Path("model"), LearnerSection(), placement)
        critic = MegatronValueBackend(Path("model"), LearnerSection(lr=1e-5), placement)
        values_N = critic.values(batch)
        critic.close(); policy.close()
    """

    def __init__(
        self,
        model_path: Path,
        config: LearnerSection,
        placement: Placement,
        *,
        dtype: str = "bfloat16",
        seed: int = 0,
    ) -> None:
        """Join the groups of the process, or start them, and load the model.

        Raises:
            ConfigError: As `MegatronBackend`, or the groups that there are were cut another way.
        """
        super().__init__(
            model_path,
            config,
            placement,
            kind="value",
            dtype=dtype,
            seed=seed,
            temperature=1.0,
            is_frozen=False,
        )

    def values(self, batch: PackedBatch) -> torch.Tensor:
        return self._forward(batch)[0]

    def update(self, minibatch: PackedBatch, loss_fn: ValueLossFn) -> dict[str, float]:
        def loss(
            output_1N: torch.Tensor, microbatch: PackedBatch
        ) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
            return loss_fn(output_1N[0], microbatch)

        metrics = self._train(minibatch, loss)
        return {name.replace("actor/", "critic/", 1): value for name, value in metrics.items()}
