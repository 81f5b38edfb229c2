"""AdamW on the host for weights on a GPU: Megatron's hybrid device optimizer, in memory of our own.

Owns the float32 weights, the moments and where they are. An update streams the gradients into pinned memory,
steps each parameter on the host as soon as its gradient is there, and streams its new weights back. Replaced
is what Megatron's class allocates: pinned memory for each tensor, rounded up to a power of two, and fresh
memory, not pinned, that 16-bit weights go to the GPU from. Here a parameter's weights leave from where its
gradient came to. Invariant: no copy of a device reads or writes float32 weights or moments, so that a
checkpoint is read from them, and into them, at any time between two updates.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from megatron.core.optimizer import OptimizerConfig
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from weight_sync.copies.registered import make_pinned

State = dict[str, torch.Tensor]


class HostAdamW(HybridDeviceOptimizer):  # type: ignore[misc]  # Megatron has no types
    """AdamW whose state lies on the host.

    Args:
        groups: Parameter groups of AdamW, of weights on the device.
        mains: The float32 values of each weight, on the host.
    """

    def __init__(
        self, groups: Sequence[Mapping[str, object]], mains: Mapping[torch.Tensor, torch.Tensor]
    ) -> None:
        self._mains = mains
        super().__init__(
            groups,
            offload_fraction=1.0,
            cpu_optimizer_cls=torch.optim.AdamW,
            gpu_optimizer_cls=torch.optim.AdamW,
            overlap_cpu_optimizer_d2h_h2d=True,
        )
        sizes = [main.numel() for main in mains.values()]
        gradients = make_pinned(sum(sizes), self).split(sizes)
        for main, gradient in zip(mains.values(), gradients, strict=True):
            main.grad = self.cpu_copy_map_grad[main] = gradient
        self._optimizers = {one.param_groups[0]["params"][0]: one for one in self.cpu_optimizers}

    def main(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the float32 values of a weight."""
        return self._mains[weight]

    def state_of(self, weight: torch.Tensor) -> State:
        """Return AdamW's state of a weight, live; empty before its first update."""
        main = self._mains[weight]
        state: State = self._optimizers[main].state[main]
        return state

    def send_weights(self) -> None:
        """Have the device take all weights from the host's."""
        self._h2d_stream.synchronize()  # the last update's may be under way
        for optimizer in self.cpu_optimizers:
            self._send(optimizer)

    def _get_sub_optimizer_param_groups(self, offload_fraction: float) -> tuple[object, ...]:
        """Put all weights on the host, where they are already."""
        groups = [
            group | {"params": [self._mains[weight] for weight in group["params"]]}
            for group in self.param_groups
        ]
        return groups, [], dict(self._mains), {main: weight for weight, main in self._mains.items()}, {}

    def _register_param_copy_back_gpu_hook(self) -> None:
        for optimizer in self.cpu_optimizers:
            optimizer.register_step_post_hook(self._send)

    def _send(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Begin the copy of one parameter's weights to the device; later work there sees them."""
        (main,) = optimizer.param_groups[0]["params"]
        weight = self.cpu_copys_map_gpu_param[main]
        staged = self.cpu_copy_map_grad[main].view(weight.dtype)[: weight.numel()]
        staged.copy_(main)
        self._h2d_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._h2d_stream):
            weight.data.copy_(staged, non_blocking=True)
        self._h2d_stream.record_event().wait(torch.cuda.current_stream())


def make_no_mains(config: OptimizerConfig) -> None:
    """Have Megatron keep no float32 weights on the device, and leave gradients where they were reduced."""
    config.use_precision_aware_optimizer_no_fp8_or_ds_fp8 = True


def move_to_host(optimizer: DistributedOptimizer) -> None:
    """Replace AdamW on the device by one on the host, which goes on where it was."""
    inner = optimizer.optimizer
    mains: dict[torch.Tensor, torch.Tensor] = {}
    states: dict[torch.Tensor, State] = {}

    def take(weight: torch.Tensor, main: torch.Tensor) -> None:
        mains[weight] = main.detach().to("cpu", torch.float32, copy=True)
        states[weight] = {name: value.cpu() for name, value in inner.state.pop(main, {}).items()}
        weight.grad = None

    groups = (optimizer.shard_fp32_groups, optimizer.shard_float16_groups)
    on_device = optimizer.shard_fp32_from_float16_groups
    for group, whole, halves, copies in zip(inner.param_groups, *groups, on_device, strict=True):
        for index, view in enumerate(whole):
            whole[index] = weight = view.detach()  # PyTorch's optimizers take no view of a parameter
            vars(weight).update(vars(view))  # Megatron's marks of tensor parallelism
            take(weight, view)
        for index, weight in enumerate(halves):
            take(weight, weight if copies[index] is None else copies[index])
            copies[index] = None
        group["params"][:] = [*whole, *halves]
    for parameter in (parameter for group in optimizer.model_float16_groups for parameter in group):
        parameter.main_param = None
    make_no_mains(optimizer.config)
    optimizer.optimizer = host = HostAdamW(inner.param_groups, mains)
    for weight, state in states.items():
        host.state_of(weight).update(state)


def held_values(optimizer: DistributedOptimizer) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor, State]]:
    """Yield a parameter, float32 values and AdamW's state of this rank's share of it; for all that it has."""
    inner = optimizer.optimizer
    groups = [
        *zip(optimizer.model_fp32_groups, *[optimizer.shard_fp32_groups] * 2, strict=True),
        *zip(
            optimizer.model_float16_groups,
            optimizer.shard_float16_groups,
            optimizer.shard_fp32_from_float16_groups,
            strict=True,
        ),
    ]
    for parameter, weight, main in (one for group in groups for one in zip(*group, strict=True)):
        if isinstance(inner, HostAdamW):
            yield parameter, inner.main(weight), inner.state_of(weight)
        else:
            yield parameter, main, inner.state[main]
