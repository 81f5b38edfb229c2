"""Adapters on Megatron's column- and row-parallel matrices, and their place in the model.

A fused matrix (q, k and v; gate and up) has an A and a B for each of its parts, as in PEFT. Of a matrix that
is cut by columns (qkv, gate and up) every rank has A whole and its rows of B; of one cut by rows (o, down),
its columns of A, and B whole. Invariant: values that cross ranks are R wide, and the
gradient of a factor that ranks have alike is the same on all of them.

Shapes: N positions of this rank, or its share of them under sequence parallelism; R rank of an adapter.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer import TransformerConfig

from asyncrl.core.config.tree import LoraSection
from asyncrl.core.errors import ConfigError
from learner.lora.factors import CHILD, Factors, Switch
from learner.megatron.convert import cut_dimension

PARTS: Mapping[str, tuple[str, ...]] = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "linear_proj": ("o_proj",),
    "linear_fc1": ("gate_proj", "up_proj"),
    "linear_fc2": ("down_proj",),
}
"""The matrices of the model's files that Megatron's are made of."""
Matrix: TypeAlias = ColumnParallelLinear | RowParallelLinear


class Adapter(torch.nn.ModuleDict):
    """The adapters of one matrix of a rank, by the names of its parts."""

    def __init__(self, matrix: Matrix, parts: Mapping[str, int], lora: LoraSection, switch: Switch) -> None:
        """Make the factors of those of `parts` (name: rows of this rank) that are targets."""
        num_inputs = matrix.weight.shape[1]
        super().__init__(
            {
                name: Factors(lora.rank, num_inputs, num_rows, matrix.weight)
                for name, num_rows in parts.items()
                if name in lora.targets
            }
        )
        config = matrix.config
        self._rows, self._rank, self._scale, self.switch = dict(parts), lora.rank, lora.scale, switch
        self._is_column, self._is_scattered = (
            isinstance(matrix, ColumnParallelLinear),
            config.sequence_parallel,
        )
        # Of a rank that has q, k and v, rows are interleaved by key/value group.
        size = parallel_state.get_tensor_model_parallel_world_size()
        self._num_groups = config.num_query_groups // size if len(parts) == 3 else 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Take what enters the matrix, [N, 1, inputs]; return what is added to its output."""
        low = torch.cat([self.get_submodule(f"{name}.lora_A")(x) for name in self], -1)
        low = self._enter(low) if self._is_column else self._leave(low)
        parts = {name: low.new_zeros(*low.shape[:-1], num_rows) for name, num_rows in self._rows.items()}
        for name, values in zip(self, low.split(self._rank, -1), strict=True):
            parts[name] = self.get_submodule(f"{name}.lora_B")(values)
        grouped = [part.unflatten(-1, (self._num_groups, -1)) for part in parts.values()]
        return torch.cat(grouped, -1).flatten(-2) * self._scale

    def _enter(self, low: torch.Tensor) -> torch.Tensor:
        """Give every rank the low-rank values of all positions; the gradient of them is summed over ranks."""
        if self._is_scattered:
            options = {"tensor_parallel_output_grad": True}
            whole: torch.Tensor = tensor_parallel.gather_from_sequence_parallel_region(low, **options)
        else:
            whole = tensor_parallel.copy_to_tensor_model_parallel_region(low)
        return whole

    def _leave(self, low: torch.Tensor) -> torch.Tensor:
        """Sum over ranks, each of which has multiplied its columns; under sequence parallelism, its share."""
        if self._is_scattered:
            whole: torch.Tensor = tensor_parallel.reduce_scatter_to_sequence_parallel_region(low)
        else:
            whole = tensor_parallel.reduce_from_tensor_model_parallel_region(low)
        return whole


def add_adapters(
    chunk: torch.nn.Module, config: TransformerConfig, lora: LoraSection, switch: Switch
) -> None:
    """Freeze `chunk` and hang an adapter, without values, on each matrix of a target.

    Raises:
        ConfigError: A target is no matrix of Megatron's.
    """
    known = {name for parts in PARTS.values() for name in parts}
    if unknown := sorted(set(lora.targets) - known):
        raise ConfigError(
            f"model.lora.targets: learner.backend: megatron has no matrix called {', '.join(unknown)}",
            hint=f"It has {', '.join(sorted(known))}",
        )
    chunk.requires_grad_(False)
    for path, module in list(chunk.named_modules()):
        parts = PARTS.get(path.rpartition(".")[2], ())
        if not set(parts) & set(lora.targets) or not isinstance(module, Matrix):
            continue
        if ".experts." in path:  # their gradients are reduced over other ranks
            raise ConfigError(
                "model.lora.targets: experts have no adapters",
                hint="Set it to the matrices of attention: q_proj, k_proj, v_proj, o_proj",
            )
        adapter = Adapter(module, _count_rows(module, parts, config), lora, switch)
        module.add_module(CHILD, adapter)
        module.forward = _forward_adapted.__get__(module)
        for name, parameter in adapter.named_parameters():
            dimension = cut_dimension(f"{path}.{CHILD}.{name}")
            if dimension is None:  # its gradient is that of this rank's positions
                parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
            else:
                set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=dimension, stride=1)
    if isinstance(embedding := getattr(chunk, "embedding", None), torch.nn.Module):
        embedding.register_forward_hook(_require_gradient)


def _count_rows(matrix: Matrix, parts: tuple[str, ...], config: TransformerConfig) -> dict[str, int]:
    """Return the rows of this rank of each part of a matrix."""
    num_rows = matrix.weight.shape[0]
    if len(parts) < 3:
        return dict.fromkeys(parts, num_rows // len(parts))
    heads = config.num_attention_heads + 2 * config.num_query_groups
    counts = (config.num_attention_heads, config.num_query_groups, config.num_query_groups)
    return {name: num_rows * count // heads for name, count in zip(parts, counts, strict=True)}


def _forward_adapted(
    matrix: Matrix, x: torch.Tensor, *args: object, **options: object
) -> tuple[torch.Tensor, torch.Tensor | None]:
    output, bias = type(matrix).forward(matrix, x, *args, **options)
    adapter = matrix.get_submodule(CHILD)
    return output + adapter(x) if adapter.switch.is_on else output, bias


def _require_gradient(_module: torch.nn.Module, _inputs: object, output: torch.Tensor) -> torch.Tensor:
    """Have the first layer's input need a gradient: else, recomputed, it gives its adapters none."""
    return output.requires_grad_() if torch.is_grad_enabled() else output
