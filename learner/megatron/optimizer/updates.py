"""Gradient buffers and the distributed optimizer of one rank's parts of the model.

Owns when reduced gradients become new weights. An update whose gradient is not finite must never reach
the weights. Invariant: after `sync_parameters` every rank has the weights of the last update, also
under `overlap_param_gather`, where they are otherwise fetched by the next forward pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol

import megatron.core.optimizer
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.transformer import TransformerConfig

from asyncrl.core.config.tree import LearnerSection
from learner.megatron import cpu_adaptor
from learner.megatron.optimizer.host import HostAdamW, make_no_mains, move_to_host

OVERLAP_BUCKET_ELEMENTS: int | None = None
"""Gradients sent at once under overlap; None leaves it to Megatron (40 M, or 1 M per rank)."""


class Updates:
    """Wraps chunks for training: `chunks` are what the schedule runs."""

    def __init__(
        self,
        chunks: Sequence[torch.nn.Module],
        transformer: TransformerConfig,
        config: LearnerSection,
        dtype: torch.dtype,
    ) -> None:
        # One rank has nobody to overlap with, and cannot repeat a pass that broke off while it "sends".
        num_sharing = parallel_state.get_data_parallel_world_size(with_context_parallel=True)
        overlaps = config.overlap and num_sharing > 1
        ddp_config = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            use_distributed_optimizer=True,
            overlap_grad_reduce=overlaps,
            overlap_param_gather=overlaps,
            bucket_size=OVERLAP_BUCKET_ELEMENTS,
        )
        self.chunks = [
            DistributedDataParallel(transformer, ddp_config, chunk, disable_bucketing=index > 0)
            for index, chunk in enumerate(chunks)
        ]
        if not overlaps:
            for chunk in self.chunks:
                for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
                    _spare_lone_rank(group)
        self.optimizers = _make_optimizers(self.chunks, config, dtype, overlaps)
        self._overlaps, self._is_behind = overlaps, False
        self._device = next(chunks[0].parameters()).device
        if config.offload:
            self.raise_offload()
        if overlaps:
            no_sync = [chunk.no_sync for chunk in self.chunks]
            transformer.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]

    def zero_gradients(self) -> None:
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        # The forward pass now fetches, part by part, the weights that the last update left to fetch.
        self._is_behind = False

    def raise_offload(self) -> str:
        """Keep AdamW on the host from now on; return what was moved, "" if it is there already."""
        if self._device.type == "cpu" or isinstance(self.optimizers[0].optimizer, HostAdamW):
            return ""
        for optimizer in self.optimizers:
            move_to_host(optimizer)
        return "the optimizer and its state"

    def step(
        self, lr: float, grad_clip: float, may_step: Callable[[float], bool], scale: float
    ) -> tuple[float, bool]:
        """Update the weights from the reduced gradients; return (gradient norm, whether they were updated).

        Args:
            may_step: Asked with the norm before clipping, if that is finite.
            scale: Factor of the loss.
        """
        for group in (group for optimizer in self.optimizers for group in optimizer.optimizer.param_groups):
            group["lr"] = lr
        if scale != 1.0:
            for chunk in self.chunks:
                chunk.scale_gradients(1.0 / scale)
        for optimizer in self.optimizers:
            optimizer.prepare_grads()
        grad_norm = self._measure_gradients()
        has_stepped = math.isfinite(grad_norm) and may_step(grad_norm)
        if has_stepped:
            self._clip_gradients(grad_clip / (grad_norm + 1e-6))
            for optimizer in self.optimizers:
                optimizer.step_with_ready_grads()
            self._is_behind = self._overlaps
        return grad_norm, has_stepped

    def sync_parameters(self) -> None:
        """Fetch what other ranks updated, if a forward pass has not done so yet. Collective."""
        if self._is_behind:
            for chunk in self.chunks:
                chunk.start_param_sync(force_sync=True)
            self._is_behind = False

    def restore_parameters(self) -> None:
        """Take the weights from the optimizer, as after an update. Collective."""
        for optimizer in self.optimizers:
            if isinstance(optimizer.optimizer, HostAdamW):
                optimizer.optimizer.send_weights()
            else:
                optimizer._copy_main_params_to_model_params()
        for chunk in self.chunks:
            chunk.start_param_sync(force_sync=True)
        self._is_behind = False

    def _measure_gradients(self) -> float:
        """Return the gradients' norm over all ranks; the host waits for the device once.

        Megatron's own function waits for each tensor's norm where neither Apex nor TransformerEngine is.
        """
        gradients = [x for optimizer in self.optimizers for x in optimizer.get_main_grads_for_grad_norm()]
        norms = torch._foreach_norm(gradients) if gradients else [torch.zeros((), device=self._device)]
        square = torch.linalg.vector_norm(torch.stack(list(norms))).square()
        dist.all_reduce(square, group=self.optimizers[0].get_grad_stats_parallel_group())
        return math.sqrt(float(square))

    def _clip_gradients(self, scale: float) -> None:
        name = "decoupled_grad" if isinstance(self.optimizers[0].optimizer, HostAdamW) else "grad"
        parameters = (parameter for optimizer in self.optimizers for parameter in optimizer.get_parameters())
        found = (getattr(parameter, name) for parameter in parameters)
        gradients = [gradient for gradient in found if gradient is not None]
        if scale < 1.0 and gradients:
            torch._foreach_mul_(gradients, scale)


class _Bucket(Protocol):
    gradient_scaling_factor: float


class _BucketGroup(Protocol):
    """Used part of Megatron's gradients that are reduced together."""

    intra_distributed_optimizer_instance_size: int
    buckets: Sequence[_Bucket]
    start_grad_sync: Callable[..., None]
    start_param_sync: Callable[..., None]


def _spare_lone_rank(group: _BucketGroup) -> None:
    """Leave out the collectives of one rank, which copy all its gradients and weights onto themselves."""
    if group.intra_distributed_optimizer_instance_size == 1:
        assert all(bucket.gradient_scaling_factor == 1.0 for bucket in group.buckets), "gradients are summed"
        group.start_grad_sync = group.start_param_sync = _do_nothing


def _do_nothing(*_: object, **__: object) -> None:
    return None


def _make_optimizers(
    chunks: list[DistributedDataParallel], config: LearnerSection, dtype: torch.dtype, overlaps: bool
) -> tuple[DistributedOptimizer, ...]:
    """Return the optimizer, and behind it that of experts that other ranks share than the rest."""
    optimizer_config = OptimizerConfig(
        optimizer="adam",
        lr=config.lr,
        min_lr=0.0,
        weight_decay=config.weight_decay,
        adam_beta1=config.betas[0],
        adam_beta2=config.betas[1],
        adam_eps=1e-8,
        clip_grad=config.grad_clip,
        bf16=dtype is torch.bfloat16,
        params_dtype=dtype,
        use_distributed_optimizer=True,
        overlap_param_gather=overlaps,
    )
    parameters = [parameter for chunk in chunks for parameter in chunk.parameters()]
    if config.offload and parameters[0].is_cuda:
        make_no_mains(optimizer_config)
    # Megatron takes that of Transformer Engine or Apex where one is installed: their step is elsewhere.
    megatron.core.optimizer.Adam, megatron.core.optimizer.USING_PYTORCH_OPTIMIZER = torch.optim.AdamW, True
    with cpu_adaptor.cuda_type_names(parameters):
        chain = get_megatron_optimizer(optimizer_config, chunks, use_gloo_process_groups=False)
    optimizers = tuple(chain.chained_optimizers)
    groups = [optimizer.get_grad_stats_parallel_group() for optimizer in optimizers]
    assert all(group == groups[0] for group in groups), "one norm for all gradients"
    for inner in (optimizer.optimizer for optimizer in optimizers):
        assert isinstance(inner, torch.optim.AdamW), (
            f"{type(inner)} keeps its step elsewhere: state.py does not know it"
        )
        for group in inner.param_groups:
            group["fused"] = True  # one call for all parameters instead of a dozen each
    return optimizers
