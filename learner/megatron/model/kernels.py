"""Elementwise parts of a layer: on GPUs compiled formulas, elsewhere single autograd functions.

Written out and not compiled, autograd would keep and copy more: halves that are cut apart in the forward
pass are joined by a copy in the backward pass, and each step's result is a fresh tensor, whose pages cost a
CPU more than the arithmetic. Owns no parameters. Invariant: values and gradients are those of the plain
formula, up to rounding. On a CPU, and under deterministic algorithms, where no timing may choose a kernel,
nothing is compiled.

Shapes: N positions, h heads, D head size, C half of it, F columns of gate and of up.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch._dynamo as dynamo
from torch.autograd.function import once_differentiable
from torch.nn import functional

from learner.numerics.autograd import SavedTensors

GRAPHS = 32
"""Of one formula: by width, by one position or more, by whether gradients are wanted, by frozen weights.
Beyond torch's own limit of 8 the plain formula would run, slowly."""
BACKEND = "inductor"
OPTIONS: dict[str, str | int | bool | Callable[..., object]] | None = {"emulate_precision_casts": True}
"""Of the compiler that is torch.compile's own."""


class CompiledOnGpu:
    """A function of tensors, the first of which has the device of all.

    Example:
        double = CompiledOnGpu(lambda x: x + x)
        double(torch.ones(3))
    """

    def __init__(
        self, formula: Callable[..., torch.Tensor], eager: Callable[..., torch.Tensor] | None = None
    ) -> None:
        """Take the formula to compile, and the form to run in its place where it is not compiled."""
        self._formula, self._eager = formula, eager or formula
        self._compiled: Callable[..., torch.Tensor] | None = None

    def __call__(self, x: torch.Tensor, *others: object) -> torch.Tensor:
        if x.device.type == "cpu" or torch.are_deterministic_algorithms_enabled():
            return self._eager(x, *others)
        return self.compiled(x, *others)

    @property
    def compiled(self) -> Callable[..., torch.Tensor]:
        """The compiled formula, for any device; it is compiled when it is first called."""
        if self._compiled is None:
            dynamo.config.recompile_limit = max(dynamo.config.recompile_limit, GRAPHS)
            # One kernel for all lengths: each microbatch has another.
            self._compiled = torch.compile(self._formula, dynamic=True, backend=BACKEND, options=OPTIONS)
        return self._compiled


class GatedUnit(torch.autograd.Function):
    """activation(gate) * up: forward [..., 2 F] (gate, then up), name of the activation -> [..., F]."""

    @staticmethod
    def forward(ctx: SavedTensors, x: torch.Tensor, activation: str) -> torch.Tensor:
        gate, up = x.chunk(2, -1)
        active = _activate(gate, activation)
        ctx.save_for_backward(x, active)
        ctx.activation = activation  # type: ignore[attr-defined]
        return active * up

    @staticmethod
    @once_differentiable
    def backward(ctx: SavedTensors, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        x, active = ctx.saved_tensors
        gate, up = x.chunk(2, -1)
        x_grad = torch.empty_like(x)
        gate_grad, up_grad = x_grad.chunk(2, -1)
        torch.mul(gradient, active, out=up_grad)
        torch.mul(gradient, up, out=gate_grad)
        if ctx.activation == "silu":  # type: ignore[attr-defined]
            torch.ops.aten.silu_backward.grad_input(gate_grad, gate, grad_input=gate_grad)
        else:
            tanh = {"approximate": "tanh"}
            torch.ops.aten.gelu_backward.grad_input(gate_grad, gate, **tanh, grad_input=gate_grad)
        return x_grad, None


class Rotate(torch.autograd.Function):
    """Rotary positions: turns each pair (x[c], x[c + C]) by the angle of its position; [N, h, D] alike.

    The backward pass turns back by the same angle.
    """

    @staticmethod
    def forward(
        ctx: SavedTensors, x_NhD: torch.Tensor, cos_N1C: torch.Tensor, sin_N1C: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(cos_N1C, sin_N1C)
        return _turn(x_NhD, cos_N1C, sin_N1C, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: SavedTensors, gradient_NhD: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        cos_N1C, sin_N1C = ctx.saved_tensors
        return _turn(gradient_NhD, cos_N1C, sin_N1C, -1), None, None


def _turn(x_NhD: torch.Tensor, cos_N1C: torch.Tensor, sin_N1C: torch.Tensor, direction: int) -> torch.Tensor:
    turned_NhD = torch.empty(x_NhD.shape, dtype=x_NhD.dtype, device=x_NhD.device)
    (first, second), (to_first, to_second) = x_NhD.chunk(2, -1), turned_NhD.chunk(2, -1)
    torch.mul(first, cos_N1C, out=to_first).addcmul_(second, sin_N1C, value=-direction)
    torch.mul(second, cos_N1C, out=to_second).addcmul_(first, sin_N1C, value=direction)
    return turned_NhD


def _normalise(
    x_NH: torch.Tensor, weight_H: torch.Tensor, eps: float, is_centred: bool = False
) -> torch.Tensor:
    """Normalise in float32, cast, then multiply, or with `is_centred` cast last: as Hugging Face and vLLM."""
    normal_NH = x_NH.float()
    normal_NH = normal_NH * torch.rsqrt(normal_NH.square().mean(-1, keepdim=True) + eps)
    if is_centred:
        return (normal_NH * (1.0 + weight_H.float())).to(x_NH.dtype)
    return weight_H * normal_NH.to(x_NH.dtype)


def _normalise_eagerly(
    x_NH: torch.Tensor, weight_H: torch.Tensor, eps: float, is_centred: bool = False
) -> torch.Tensor:
    if x_NH.dtype is torch.float32:  # one kernel, bit-equal to the formula
        return functional.rms_norm(x_NH, weight_H.shape, 1.0 + weight_H if is_centred else weight_H, eps)
    return _normalise(x_NH, weight_H, eps, is_centred)


def _activate(gate: torch.Tensor, activation: str) -> torch.Tensor:
    return functional.silu(gate) if activation == "silu" else functional.gelu(gate, approximate="tanh")


def _gate(x: torch.Tensor, activation: str) -> torch.Tensor:
    gate, up = x.chunk(2, -1)
    return _activate(gate, activation) * up


def _rotate(x_NhD: torch.Tensor, cos_N1C: torch.Tensor, sin_N1C: torch.Tensor) -> torch.Tensor:
    first, second = x_NhD.chunk(2, -1)
    return torch.cat([first * cos_N1C - second * sin_N1C, second * cos_N1C + first * sin_N1C], -1)


normalise = CompiledOnGpu(_normalise, _normalise_eagerly)
"""Root-mean-square norm of rows [N, H]: (x, weight [H], eps, is_centred) -> [N, H].

A centred weight has one added to it."""
gated_unit = CompiledOnGpu(_gate, GatedUnit.apply)
"""As `GatedUnit`."""
rotate = CompiledOnGpu(_rotate, Rotate.apply)
"""As `Rotate`."""
