"""Parts of the model that Megatron-core has no CPU form of: RMSNorm, rotary positions, gated units.

Owns the layer specification. Nothing here loops over rows in Python: thousands of short sequences
are normal. Invariant: on every row the result is that of the row alone, whatever else is packed.

Shapes: N packed positions, H hidden, D head size, h query heads and g key/value heads of this rank.
"""

from __future__ import annotations

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from learner.megatron.model import te_layers
from learner.megatron.model.attention import RowAttention
from learner.megatron.model.experts import ReplayingRouter, RoutedLayer
from learner.megatron.model.kernels import gated_unit, normalise
from learner.megatron.model.movement import SumOverRanks
from learner.megatron.model.packing import PackedRows


class RMSNorm(torch.nn.Module):
    """Root-mean-square norm, whose weight gradient is reduced under sequence parallelism."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: object) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.eps, self._is_centred = eps, config.layernorm_zero_centered_gamma
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return normalise(x.flatten(0, -2), self.weight, self.eps, self._is_centred).view(x.shape)


class _WideNorm(torch.nn.Module):
    """Root-mean-square norm over all heads of a position, of which tensor-parallel ranks have some each.

    Every rank holds the whole weight: Megatron sums the gradients of q_layernorm and k_layernorm over ranks.
    """

    num_heads_key: str

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: object) -> None:
        super().__init__()
        num_heads = getattr(config, self.num_heads_key)
        self.weight = torch.nn.Parameter(torch.ones(num_heads * hidden_size, dtype=config.params_dtype))
        self.eps, self.group = eps, parallel_state.get_tensor_model_parallel_group()

    def forward(self, x_N1hD: torch.Tensor) -> torch.Tensor:
        whole = x_N1hD.float()
        squares_N1 = whole.square().sum((-2, -1), keepdim=True)
        if self.group.size() > 1:
            squares_N1 = SumOverRanks.apply(squares_N1, self.group)
        scaled = whole * torch.rsqrt(squares_N1 / len(self.weight) + self.eps)
        weight_hD = self.weight.chunk(self.group.size())[self.group.rank()].view(x_N1hD.shape[-2:])
        found: torch.Tensor = scaled.to(x_N1hD.dtype) * weight_hD
        return found


class WideQueryNorm(_WideNorm):
    """That of queries."""

    num_heads_key = "num_attention_heads"


class WideKeyNorm(_WideNorm):
    """That of keys."""

    num_heads_key = "num_query_groups"


class GatedMlp(torch.nn.Module):
    """activation(gate) * up of [..., gate and up]; Megatron's own cuts and joins the two halves by copies."""

    def __init__(self, config: TransformerConfig, **_: object) -> None:
        super().__init__()
        assert config.glu_linear_offset == 0.0
        assert config.activation_func_clamp_value is None
        self._activation = config.family.activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return gated_unit(x, self._activation)


class RowRotary(torch.nn.Module):
    """Rotary angles by position within the row; takes the place of Megatron's `rotary_pos_emb`.

    The angles of a pass are the same in all layers: they go into the rows, `RowAttention` reads them
    there, and Megatron, which would make their sines again in every layer, is told of none.
    """

    def __init__(self, inverse_frequencies: torch.Tensor, dtype: torch.dtype) -> None:
        super().__init__()
        self.inverse_frequencies, self._dtype = inverse_frequencies, dtype

    def get_rotary_seq_len(
        self, _context: object, _block: object, _input: object, _config: object, rows: PackedRows
    ) -> PackedRows:
        """Megatron asks here for a length and hands the answer to `forward`: the rows are passed on."""
        return rows

    def forward(self, rows: PackedRows, **_: object) -> None:
        """Put sine and cosine of the angles into `rows`; the angles are float32."""
        assert rows.positions_N is not None, "the rows were not made by describe_rows"
        angles_N1C = torch.outer(rows.positions_N.float(), self.inverse_frequencies)[:, None]
        rows.cos_N1C, rows.sin_N1C = angles_N1C.cos().to(self._dtype), angles_N1C.sin().to(self._dtype)


def make_layer_spec(config: TransformerConfig, vp_stage: int | None) -> TransformerBlockSubmodules:
    """Return the specification of this stage's layers: Megatron's own, with the parts of this module."""
    num_layers = get_num_layers_to_build(
        config, vp_stage=vp_stage, pp_rank=parallel_state.get_pipeline_model_parallel_rank()
    )
    if config.transformer_impl == te_layers.NAME:
        layer, norm = te_layers.make_layer(config, GatedMlp)
        return TransformerBlockSubmodules(layer_specs=[layer] * num_layers, layer_norm=norm)
    layers = [_make_torch_layer(config, None)] * num_layers
    if config.num_moe_experts is not None:
        first = get_transformer_layer_offset(
            config, vp_stage=vp_stage, pp_rank=parallel_state.get_pipeline_model_parallel_rank()
        )
        kinds = config.moe_layer_freq[first : first + num_layers]
        layers = [_make_torch_layer(config, config.num_moe_experts if kind else None) for kind in kinds]
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=RMSNorm)


def _make_torch_layer(config: TransformerConfig, num_experts: int | None) -> ModuleSpec:
    layer: ModuleSpec = get_gpt_layer_local_spec(
        num_experts, normalization="RMSNorm", qk_layernorm=config.qk_layernorm
    )
    parts = layer.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = RMSNorm
    parts.sharded_state_dict_keys_map = {}
    mlp = parts.mlp if num_experts is None else parts.mlp.submodules.experts
    mlp.submodules.activation_func = GatedMlp
    if num_experts is not None:
        parts.mlp.submodules.router = ReplayingRouter
        layer.module = RoutedLayer
    attention = parts.self_attention.submodules
    attention.core_attention = RowAttention
    if config.qk_layernorm:
        is_wide = config.family.is_qk_norm_wide
        attention.q_layernorm, attention.k_layernorm = (
            (WideQueryNorm, WideKeyNorm) if is_wide else (RMSNorm, RMSNorm)
        )
    return layer
