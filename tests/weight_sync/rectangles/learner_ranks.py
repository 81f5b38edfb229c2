"""Learner ranks of any layout in one process: the parts that each holds, as views of one checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from learner.megatron import convert, rows
from tests.weight_sync.rectangles.models import Model
from weight_sync.memory.parts import Part

OF_LAYER = (
    "input_layernorm.weight",
    "self_attention.linear_qkv.weight",
    "self_attention.linear_qkv.bias",
    "self_attention.q_layernorm.weight",
    "self_attention.k_layernorm.weight",
    "self_attention.linear_proj.weight",
    "pre_mlp_layernorm.weight",
    "mlp.linear_fc1.weight",
    "mlp.linear_fc2.weight",
)


@dataclass(frozen=True)
class Layout:
    """Sizes in Megatron's order of ranks: tensor, context, data, pipeline. Experts: over three."""

    tp: int = 1
    cp: int = 1
    dp: int = 1
    pp: int = 1
    ep: int = 1

    @property
    def num_ranks(self) -> int:
        return self.tp * self.cp * self.dp * self.pp


def parts_of(
    model: Model, checkpoint: Mapping[str, torch.Tensor], layout: Layout, rank: int, multiple: int = 128
) -> Iterator[Part]:
    """Yield the parts that the rank holds, copies that others hold too included; names are those of Megatron.

    Args:
        multiple: The vocabulary is padded to a multiple of it for each tensor rank.
    """
    in_stage = layout.tp * layout.cp * layout.dp
    place, stage = (rank % layout.tp, layout.tp), rank // in_stage
    for name in _names(model, layout, stage):
        for run, shape in _runs(model, name, place, multiple):
            if run.name in checkpoint:
                full_RC = checkpoint[run.name].reshape(run.shape[0], -1)
                columns = slice(run.column, run.column + shape[1])
                yield Part(
                    run.name, run.shape, run.row, run.column, full_RC[run.row :][: run.num_rows, columns]
                )
    if model.has_experts:
        yield from _experts(model, checkpoint, layout, rank % in_stage % layout.ep, stage)


def _names(model: Model, layout: Layout, stage: int) -> Iterator[str]:
    each = model.num_layers // layout.pp
    if stage == 0:
        yield "embedding.word_embeddings.weight"
    inner = [name for name in OF_LAYER if not (model.has_experts and name.startswith("mlp."))]
    for layer in range(stage * each, (stage + 1) * each):
        yield from (f"decoder.layers.{layer}.{name}" for name in inner)
    if stage == layout.pp - 1:
        yield "decoder.final_layernorm.weight"
        yield "embedding.word_embeddings.weight" if model.is_tied else "output_layer.weight"


def _runs(
    model: Model, name: str, place: tuple[int, int], multiple: int
) -> list[tuple[Any, tuple[int, int]]]:
    """Return the runs of the rank's share of a parameter, and its shape as a matrix."""
    config: Any = SimpleNamespace(
        num_query_groups=model.num_groups, kv_channels=model.head_size, num_attention_heads=model.num_heads
    )
    shape = list(_full_shape(model, name, place[1], multiple))
    if (dimension := convert.cut_dimension(name)) is not None:
        shape[dimension] //= place[1]
    runs = rows.row_runs(name, shape, config, model.vocab_size, place)
    return [(run, (shape[0], shape[1] if len(shape) > 1 else 1)) for run in runs if run.num_rows]


def _full_shape(model: Model, name: str, num_ranks: int, multiple: int) -> tuple[int, ...]:
    inner = name.split(".", 3)[-1]
    padded = -(-model.vocab_size // (multiple * num_ranks)) * multiple * num_ranks
    fused = (model.num_heads + 2 * model.num_groups) * model.head_size
    shapes: dict[str, tuple[int, ...]] = {
        "self_attention.linear_qkv.weight": (fused, model.hidden),
        "self_attention.linear_qkv.bias": (fused,),
        "self_attention.q_layernorm.weight": (model.head_size,),
        "self_attention.k_layernorm.weight": (model.head_size,),
        "self_attention.linear_proj.weight": (model.hidden, model.num_heads * model.head_size),
        "mlp.linear_fc1.weight": (2 * model.intermediate, model.hidden),
        "mlp.linear_fc2.weight": (model.hidden, model.intermediate),
    }
    return (padded, model.hidden) if name in convert.VOCABULARY else shapes.get(inner, (model.hidden,))


def _experts(
    model: Model, checkpoint: Mapping[str, torch.Tensor], layout: Layout, ep_rank: int, stage: int
) -> Iterator[Part]:
    """Yield the router of each layer and this rank's experts: whole tensors, until the learner has them."""
    layers, own = model.num_layers // layout.pp, model.num_experts // layout.ep
    for layer in range(stage * layers, (stage + 1) * layers):
        prefix = f"model.layers.{layer}.mlp."
        names = [f"{prefix}gate.weight"] + [
            f"{prefix}experts.{expert}.{part}_proj.weight"
            for expert in range(ep_rank * own, (ep_rank + 1) * own)
            for part in ("gate", "up", "down")
        ]
        yield from (Part(name, tuple(checkpoint[name].shape), 0, 0, checkpoint[name]) for name in names)
