"""Layers of TransformerEngine, `learner.kernels: te`: Megatron's own specification, on packed rows.

Owns what they cannot do, which is refused. A norm is inside the matrix that follows it, and so its weight
has another name than in torch's layers: `learner.megatron.convert` knows both. Must never be chosen unasked:
these layers were not measured here.

Shapes: N packed positions, D head size, h query heads and g key/value heads of this rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import torch
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.spec_utils import ModuleSpec

from asyncrl.core.config.tree import LearnerSection
from asyncrl.core.errors import ConfigError
from learner.attention import varlen
from learner.attention.varlen import VarlenPieces
from learner.megatron.model.attention import PackedAttention
from learner.megatron.model.packing import PackedRows

NAME: Literal["transformer_engine"] = "transformer_engine"
"""The specification's, in Megatron's configuration."""


def choose(
    config: LearnerSection, dtype: torch.dtype, device: torch.device, head_size: int
) -> Literal["local", "transformer_engine"]:
    """Return the name of the specification that `learner.kernels` stands for.

    Raises:
        ConfigError: It is TransformerEngine's, and cannot run here.
    """
    if config.kernels != "te":
        return "local"
    problem = next(_find_problems(config, dtype, device, head_size), None)
    if problem is not None:
        what, instead = problem
        raise ConfigError(
            f"learner.kernels is te, and {what}", hint=f"{instead}; or set learner.kernels: torch"
        )
    return NAME


def _find_problems(
    config: LearnerSection, dtype: torch.dtype, device: torch.device, head_size: int
) -> Iterator[tuple[str, str]]:
    if device.type != "cuda":
        yield (
            f"the learner's rank computes on {device.type}: TransformerEngine has kernels for GPUs alone",
            ("Set learner.gpus: 1"),
        )
    if not gpt_layer_specs.HAVE_TE:
        yield (
            "the learner's process cannot import transformer_engine",
            ("Install 'transformer-engine[pytorch]' for this CUDA on every node of the learner"),
        )
    if config.cp > 1:
        yield f"learner.cp is {config.cp}: TransformerEngine splits rows differently", "Set learner.cp: 1"
    if not varlen.can_run(device, dtype, [head_size]):
        yield (
            f"its attention on packed rows does not take {dtype} with heads of {head_size} here",
            ("Set model.dtype: bfloat16, for heads of up to 256"),
        )


class TransformerEngineAttention(PackedAttention):
    """As `RowAttention`, by TransformerEngine's kernel for packed (`thd`) tensors."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        **options: object,
    ) -> None:
        from megatron.core.extensions.transformer_engine import TEDotProductAttention

        super().__init__(config=config)
        self.kernel = TEDotProductAttention(config, layer_number, attn_mask_type, attention_type, **options)

    def attend(
        self, query_NhD: torch.Tensor, key_NgD: torch.Tensor, value_NgD: torch.Tensor, rows: PackedRows
    ) -> torch.Tensor:
        found: torch.Tensor = self.kernel(
            query_NhD, key_NgD, value_NgD, None, AttnMaskType.causal, packed_seq_params=_as_thd(rows)
        )
        return found


def _as_thd(rows: PackedRows) -> PackedSeqParams:
    pieces = rows.attention
    assert isinstance(pieces, VarlenPieces), "rows are packed, not padded"
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=pieces.query_offsets_P1,
        cu_seqlens_kv=pieces.key_offsets_P1,
        max_seqlen_q=pieces.max_queries,
        max_seqlen_kv=pieces.max_keys,
    )


def make_layer(config: TransformerConfig, activation: type[torch.nn.Module]) -> tuple[ModuleSpec, type]:
    """Return the specification of a layer with `activation` between its matrices, and the class of norms."""
    from megatron.core.extensions.transformer_engine import TENorm

    layer: ModuleSpec = gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec(
        qk_layernorm=config.qk_layernorm
    )
    layer.submodules.mlp.submodules.activation_func = activation
    layer.submodules.self_attention.submodules.core_attention = TransformerEngineAttention
    return layer, TENorm
