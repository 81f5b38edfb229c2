"""Versions that hold low-rank adapters alone (LoRA, arXiv 2106.09685): their names and shapes, and the merge.

Of a matrix `x.weight` [O, I] of the model's files a version holds A, `x.lora_A.weight` [R, I], and B,
`x.lora_B.weight` [O, R]; the matrix of the version is W + scale B A. Imports no torch: `plan` reads shapes.
Invariant: every merge begins with the tensors of the model's files, never with what was merged before, so the
weights of a version do not depend on the versions loaded before it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from asyncrl.core.config.tree import LoraSection
from asyncrl.core.errors import ConfigError, SyncError

if TYPE_CHECKING:
    import torch

Shape = tuple[int, ...]
A, B, WEIGHT = ".lora_A.weight", ".lora_B.weight", ".weight"


def find_targets(shapes: Mapping[str, Shape], lora: LoraSection) -> list[str]:
    """Return the matrices that have adapters, without `.weight`, in the order of `shapes`.

    Raises:
        ConfigError: A target is the name of none, or of a matrix of an expert.
    """
    matrices = [name.removesuffix(WEIGHT) for name, shape in shapes.items() if len(shape) == 2]
    ends = {name.rpartition(".")[2] for name in matrices}
    if missing := [target for target in lora.targets if target not in ends]:
        raise ConfigError(
            f"model.lora.targets: the model has no matrix called {', '.join(missing)}",
            hint=f"It has {', '.join(sorted(ends))}",
        )
    found = [name for name in matrices if name.rpartition(".")[2] in lora.targets]
    if of_experts := {name.rpartition(".")[2] for name in found if ".experts." in name}:
        names = ", ".join(sorted(of_experts))
        raise ConfigError(
            f"model.lora.targets: {names} are matrices of experts, which have no adapters",
            hint="Set it to those of attention: q_proj, k_proj, v_proj, o_proj",
        )
    return found


def factor_shapes(shapes: Mapping[str, Shape], lora: LoraSection) -> dict[str, Shape]:
    """Return the shape of each A and B of a model of `shapes`, by name. Raises ConfigError as above."""
    found: dict[str, Shape] = {}
    for name in find_targets(shapes, lora):
        num_outputs, num_inputs = shapes[name + WEIGHT]
        found |= {name + A: (lora.rank, num_inputs), name + B: (num_outputs, lora.rank)}
    return found


def merge_factors(
    base: Iterable[tuple[str, torch.Tensor]],
    factors: Mapping[str, torch.Tensor],
    scale: float,
    dtype: torch.dtype,
    device: torch.device | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of `base`, those that have factors merged in float32 and rounded once, to `dtype`.

    Args:
        factors: Each A and B, by name.
        device: That merged tensors are made on; without it that of `base`.

    Raises:
        SyncError: A factor belongs to no tensor of `base`.
    """
    left = set(factors)
    for name, tensor in base:
        names = [name.removesuffix(WEIGHT) + end for end in (A, B)]
        if left.isdisjoint(names):
            yield name, tensor
            continue
        left.difference_update(names)
        whole, a, b = (one.to(device or one.device).float() for one in (tensor, *(factors[n] for n in names)))
        yield name, whole.addmm(b, a, alpha=scale).to(dtype)
    if left:
        raise SyncError(f"the model's files have no matrix of the factors {sorted(left)[:4]}")
