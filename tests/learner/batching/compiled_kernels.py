"""The compiled element-wise kernels beside their eager forms, in a process where torch.compile is on.

python -m tests.learner.batching.compiled_kernels
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch._dynamo

from learner.megatron.model import kernels

KERNELS = ("normalise", "rotate", "gated_unit")
LENGTHS = (7, 33, 2, 64, 1, 128, 5, 77, 300, 12)
"""Packed positions, of one microbatch after another."""
HEADS, GROUPS, HEAD_SIZE, HIDDEN = 4, 2, 16, 48
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def draw(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def calls_of(num_positions: int, dtype: torch.dtype) -> list[tuple[str, tuple[Any, ...]]]:
    """Return how a layer calls the kernels for a microbatch of so many positions."""
    angles_N1C = draw(num_positions, 1, HEAD_SIZE // 2, dtype=torch.float32)
    turn = angles_N1C.cos().to(dtype), angles_N1C.sin().to(dtype)
    joined_NhD = draw(num_positions, HEADS + 2 * GROUPS, HEAD_SIZE, dtype=dtype)
    query_NhD, key_NgD, _ = joined_NhD.split([HEADS, GROUPS, GROUPS], 1)
    norm_H, norm_D = (1 + 0.1 * draw(size, dtype=dtype) for size in (HIDDEN, HEAD_SIZE))
    return [
        ("normalise", (draw(num_positions, HIDDEN, dtype=dtype), norm_H, 1e-6)),
        ("normalise", (query_NhD.flatten(0, 1), norm_D, 1e-6)),
        ("normalise", (key_NgD.flatten(0, 1), norm_D, 1e-6)),
        ("rotate", (query_NhD, *turn)),
        ("rotate", (key_NgD, *turn)),
        ("gated_unit", (draw(num_positions, 1, 2 * HIDDEN, dtype=dtype), "silu")),
    ]


def run(function: Callable[..., torch.Tensor], args: tuple[Any, ...]) -> list[torch.Tensor]:
    """Return the result and the gradients of the inputs that a layer trains."""
    inputs = [args[0].detach().clone().requires_grad_(), *args[1:]]
    if len(args) == 3 and isinstance(args[2], float):
        inputs[1] = torch.nn.Parameter(args[1].clone())
    found = function(*inputs)
    found.backward(draw(*found.shape, dtype=found.dtype, seed=1))
    trained = (one for one in inputs if isinstance(one, torch.Tensor) and one.requires_grad)
    return [found.detach(), *(one.grad for one in trained)]


def compare(dtype: torch.dtype, lengths: Sequence[int]) -> tuple[dict[str, float], dict[str, int]]:
    """Return by kernel the largest error, relative to the largest value, and the graphs that were made."""
    torch._dynamo.reset()
    errors, graphs = dict.fromkeys(KERNELS, 0.0), dict.fromkeys(KERNELS, 0)
    for name in KERNELS:
        getattr(kernels, name)._compiled = None
    for num_positions in lengths:
        for name, args in calls_of(num_positions, dtype):
            kernel, before = getattr(kernels, name), _count_graphs()
            compiled = run(kernel.compiled, args)
            graphs[name] += _count_graphs() - before
            pairs = zip(compiled, run(kernel, args), strict=True)
            error = max(float((ours - eager).abs().max() / eager.abs().max()) for ours, eager in pairs)
            errors[name] = max(error, errors[name])
    assert not torch._dynamo.utils.counters["graph_break"]
    return errors, graphs


def _count_graphs() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


if __name__ == "__main__":
    print(json.dumps({name: compare(dtype, LENGTHS) for name, dtype in DTYPES.items()}))
