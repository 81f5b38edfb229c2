"""The learner backend on PyTorch's `fully_shard`: any Hugging Face causal language model, data-parallel.

Runs over gloo on the CPU and NCCL on GPUs. Parameters, gradients and optimizer are cut over all ranks
and stay in float32; the computation may be in bfloat16. A critic or a reference of the same rank shares
its group. Must never be closed before them.

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
from learner.checkpoint.pretrained import PretrainedTensors
from learner.fsdp2.model import language_model
from learner.fsdp2.model.modules import PolicyModule, ValueModule
from learner.fsdp2.ranked import Loaded, RankedModel
from learner.lora.factors import NO_ADAPTERS

_OPTIMIZER_METRICS = ("grad_norm", "lr", "skipped_updates")


class Fsdp2Backend(RankedModel):
    """A `LearnerBackend`.

    Example:
        backend = Fsdp2Backend(Path("model"), LearnerSection(lr=1e-4), Placement(), dtype="float32")
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
        """Join the other ranks and load the model; a frozen one (a reference) is never updated.

        Args:
            lora: Adapters that are trained in place of the model, if their rank is not 0.

        Raises:
            ConfigError: transformers cannot build the model, or its tensors are stored under other names.
        """
        self._temperature = temperature
        super().__init__(
            model_path, config, placement, dtype=dtype, seed=seed, is_frozen=is_frozen, lora=lora
        )

    def without_adapters(self) -> AbstractContextManager[None]:
        return self._switch.off()

    def logprobs(self, batch: PackedBatch) -> tuple[torch.Tensor, torch.Tensor]:
        outputs = self._engine.infer(batch)
        return (outputs[0], outputs[1]) if outputs else (torch.zeros(0), torch.zeros(0))

    def logprobs_and_squares(self, batch: PackedBatch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        outputs = self._engine.infer(batch, has_squares=True) or [torch.zeros(0)] * 3
        return outputs[0], outputs[1], outputs[2]

    def update(self, minibatch: PackedBatch, loss_fn: LossFn) -> dict[str, float]:
        return _prefix("actor", self._engine.update(minibatch, loss_fn, num_outputs=2))

    def accumulate(self, parts: Sequence[PackedBatch], loss_fn: LossFn, *, is_last: bool) -> dict[str, float]:
        # Layers send their gradients with each microbatch, whichever part it is of.
        return self._engine.accumulate(parts, loss_fn, num_outputs=2)

    def apply(
        self, parts: Sequence[PackedBatch], metrics: Mapping[str, float], divisor: float
    ) -> dict[str, float]:
        return _prefix("actor", self._engine.apply(metrics, divisor))

    def _load(self, source: Path) -> Loaded:
        model, weights = language_model.load_model(source)
        ways = language_model.choose_ways(model, weights)
        root = PolicyModule(model, ways, self._temperature, self._lora)
        self._switch = root.switch
        return Loaded(root, language_model.find_layers(model), weights)


class Fsdp2ValueBackend(RankedModel):
    """A `ValueBackend`. The head is `score.weight` of the folder, or zero where there is none.

    Example:
        policy = Fsdp2Backend(Path("model"), LearnerSection(), placement)
        critic = Fsdp2ValueBackend(Path("model"), LearnerSection(lr=1e-5), placement)
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
        """Join the group of the process, or start it, and load the model.

        Raises:
            ConfigError: As `Fsdp2Backend`.
        """
        super().__init__(model_path, config, placement, dtype=dtype, seed=seed, is_frozen=False)

    def values(self, batch: PackedBatch) -> torch.Tensor:
        outputs = self._engine.infer(batch)
        return outputs[0] if outputs else torch.zeros(0)

    def update(self, minibatch: PackedBatch, loss_fn: ValueLossFn) -> dict[str, float]:
        return _prefix("critic", self._engine.update(minibatch, loss_fn, num_outputs=1))

    def _load(self, source: Path) -> Loaded:
        model, weights = language_model.load_model(source, with_output=False)
        ways = language_model.choose_ways(model, weights)
        shape = (1, model.get_input_embeddings().weight.shape[1])
        weight_1H = PretrainedTensors(source, zeros={"score.weight": shape}).read("score.weight")
        root = ValueModule(model, ways, weight_1H)
        return Loaded(root, language_model.find_layers(model.base_model), weights)


def _prefix(actor: str, metrics: dict[str, float]) -> dict[str, float]:
    """Name the optimizer's metrics after who was updated."""
    return {f"{actor}/{name}" if name in _OPTIMIZER_METRICS else name: metrics[name] for name in metrics}
