"""Sharding of a module over the ranks with `fully_shard`, and gathering of single tensors.

Every parameter is cut along its first dimension, in equal parts but for the last ones. Gradients are
summed over ranks, in float32, and never divided: the loss is already a share of the whole. Invariant:
`ShardedParameter.shard` is the live storage that the optimizer updates.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from learner.fsdp2.groups import RankGroup
from learner.fsdp2.model.stacked import NamedRows, StoredNames


@dataclass(frozen=True)
class Sharding:
    """Sharding and execution of a module.

    Attributes:
        dtype: Of the computation; parameters, gradients and the optimizer stay in float32.
        is_offloaded: Shards, gradients and optimizer live in host memory.
        is_recomputed: Activations of a layer are made again in the backward pass.
        is_compiled: Each layer goes through `torch.compile`.
    """

    dtype: torch.dtype = torch.float32
    is_offloaded: bool = False
    is_recomputed: bool = False
    is_compiled: bool = False


@dataclass(frozen=True, eq=False)
class ShardedParameter:
    """One parameter: its Hugging Face name, the whole as a DTensor, and where this rank's rows start."""

    name: str
    tensor: DTensor
    start: int
    stored_names: StoredNames

    @property
    def shard(self) -> torch.Tensor:
        """This rank's rows, live; there may be none."""
        local: torch.Tensor = self.tensor.to_local()
        return local.detach()

    def split(self, rows: torch.Tensor, start: int) -> Iterator[NamedRows]:
        """Yield the tensors of a checkpoint in `rows`, the parameter's from `start` on."""
        return self.stored_names.split(self.name, rows, start, tuple(self.tensor.shape))


def shard_module(
    module: torch.nn.Module, layers: Sequence[torch.nn.Module], group: RankGroup, sharding: Sharding
) -> FSDPModule:
    """Cut `module` over `group`, its `layers` one by one and the rest as one, and return it."""
    offload = CPUOffloadPolicy(pin_memory=group.device.type == "cuda")
    cut = functools.partial(
        fully_shard,
        mesh=group.mesh,
        mp_policy=MixedPrecisionPolicy(param_dtype=sharding.dtype, reduce_dtype=torch.float32),
        offload_policy=offload if sharding.is_offloaded else OffloadPolicy(),
    )
    for layer in layers:
        _wrap_forward(layer, sharding)
        cut(layer)
    root = cut(module)
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)  # gloo has neither AVG nor PREMUL_SUM
    assert isinstance(root, FSDPModule)
    return root


def describe_parameters(
    named: Sequence[tuple[str, torch.Tensor]], group: RankGroup, names: StoredNames
) -> list[ShardedParameter]:
    """Return the parameters of a module that was cut; call it before the first forward pass.

    Later a parameter that is gathered at the moment is no DTensor in its module.
    """
    found = []
    for name, parameter in named:
        assert isinstance(parameter, DTensor), f"{name} was not cut"
        part = -(-parameter.shape[0] // group.size)
        found.append(ShardedParameter(name, parameter, min(group.rank * part, parameter.shape[0]), names))
    return found


def gather_whole(parameter: ShardedParameter, group: RankGroup, dtype: torch.dtype) -> torch.Tensor:
    """Return the whole tensor in `dtype` on the device of this rank; collective.

    Not `DTensor.full_tensor`, which cannot gather offloaded shards over NCCL.
    """
    shard = parameter.shard.to(group.device, dtype)
    if group.size == 1:
        return shard
    num_rows = parameter.tensor.shape[0]
    part = -(-num_rows // group.size)
    padded = shard.new_zeros((part, *shard.shape[1:]))
    padded[: len(shard)] = shard
    whole = shard.new_empty((part * group.size, *shard.shape[1:]))
    dist.all_gather_single(whole, padded)
    return whole[:num_rows]


def measure_gradient(parameters: Sequence[ShardedParameter], group: RankGroup) -> float:
    """Return the norm of the whole gradient; collective."""
    norms = torch._foreach_norm(_gradients(parameters)) if _gradients(parameters) else [torch.zeros(())]
    square = torch.stack([norm.to(torch.float64) for norm in norms]).square().sum()
    return float(group.all_reduce(square).sqrt())


def clip_gradient(parameters: Sequence[ShardedParameter], norm: float, limit: float) -> None:
    """Scale the gradient down to `limit`, as `torch.nn.utils.clip_grad_norm_` does."""
    factor = limit / (norm + 1e-6)
    if factor < 1.0:
        scale_gradient(parameters, factor)


def scale_gradient(parameters: Sequence[ShardedParameter], factor: float) -> None:
    """Multiply this rank's part of the gradient."""
    torch._foreach_mul_(_gradients(parameters), factor)


def _gradients(parameters: Sequence[ShardedParameter]) -> list[torch.Tensor]:
    gradients = (parameter.tensor.grad for parameter in parameters)
    return [gradient.to_local() for gradient in gradients if isinstance(gradient, DTensor)]


def _wrap_forward(layer: torch.nn.Module, sharding: Sharding) -> None:
    """Recompute and compile inside the layer, so that gathering its parameters stays outside."""
    forward = layer.forward
    if sharding.is_recomputed:
        forward = functools.partial(checkpoint, forward, use_reentrant=False, preserve_rng_state=False)
    if sharding.is_compiled:
        forward = torch.compile(forward, dynamic=True)
    layer.forward = forward
