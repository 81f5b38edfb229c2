"""The critic on Megatron-core: a model with a value head, beside a policy in the same groups.

Owns the critic's view of an `Engine`. Must never be closed after the backend that started the groups.

Shapes: N packed positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from asyncrl.core.config.tree import LearnerSection
from learner.backend import Placement, ValueLossFn
from learner.batching.batch import PackedBatch
from learner.megatron.engine import Engine


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
