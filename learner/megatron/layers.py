"""The parts of the model that Megatron-core has no CPU form of: RMSNorm, rotary positions, core attention.

Owns the layer specification. It must never loop over rows in Python: thousands of short sequences
are normal. Invariant: on every row the result is that of the row alone, whatever else is packed.

Shapes: N packed positions, H hidden, D head size, h query heads and g key/value heads of this rank.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from torch.nn import functional

from learner.megatron.packing import PackedRows, Pad, Unpad


class RMSNorm(torch.nn.Module):
    """Root-mean-square norm, whose weight gradient is reduced under sequence parallelism.

    Normalises in float32, casts, then multiplies: the order of Hugging Face and vLLM.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.eps = eps
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype is torch.float32:  # one kernel, bit-equal to the lines below
            return functional.rms_norm(x, self.weight.shape, self.weight, self.eps)
        normal = x.float()
        normal = normal * torch.rsqrt(normal.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * normal.to(x.dtype)


class RowRotary(torch.nn.Module):
    """Rotary angles by position within the row; takes the place of Megatron's `rotary_pos_emb`."""

    def __init__(self, inverse_frequencies: torch.Tensor) -> None:
        super().__init__()
        self.inverse_frequencies = inverse_frequencies

    def get_rotary_seq_len(
        self, _context: Any, _block: Any, _input: Any, _config: Any, rows: PackedRows
    ) -> PackedRows:
        """Megatron asks here for a length and hands the answer to `forward`: the rows are passed on."""
        return rows

    def forward(self, rows: PackedRows, **_: Any) -> torch.Tensor:
        """Return the angles [N, 1, 1, D] in float32."""
        assert rows.positions_N is not None, "the rows were not made by describe_rows"
        angles = torch.outer(rows.positions_N.float(), self.inverse_frequencies)
        return torch.cat((angles, angles), dim=-1)[:, None, None, :]


class RowAttention(MegatronModule):
    """Causal attention within each row: one call per bucket of rows of similar length."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        softmax_scale: float | None = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        assert config.context_parallel_size == 1, "the backend refuses context parallelism"
        assert config.attention_dropout == 0.0, "log-probs must not be random"
        self.scale = softmax_scale if softmax_scale is not None else 1.0 / math.sqrt(config.kv_channels)

    def sharded_state_dict(self, *_: Any, **__: Any) -> dict[str, Any]:
        return {}

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        attn_mask_type: Any = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: PackedRows | None = None,
    ) -> torch.Tensor:
        """Take query [N, 1, h, D], key and value [N, 1, g, D]; return [N, 1, h * D]."""
        assert packed_seq_params is not None, "this attention needs the rows of the microbatch"
        assert attention_mask is None, "rows are causal and nothing else"
        assert attention_bias is None, "rows are causal and nothing else"
        rows, head_size = packed_seq_params, query.shape[-1]
        padded = [Pad.apply(x.flatten(1), rows) for x in (query, key, value)]
        outputs, start = [], 0
        for num_rows, length in rows.buckets:
            end = start + num_rows * length
            q, k, v = (x[start:end].view(num_rows, length, -1, head_size).transpose(1, 2) for x in padded)
            bucket = functional.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=self.scale, enable_gqa=True
            )
            outputs.append(bucket.transpose(1, 2).reshape(num_rows * length, -1))
            start = end
        output_MD = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return Unpad.apply(output_MD, rows).unsqueeze(1)


def make_layer_spec(config: TransformerConfig) -> TransformerBlockSubmodules:
    """Return the specification of all layers: Megatron's own, with the parts of this module."""
    layer: ModuleSpec = get_gpt_layer_local_spec(normalization="RMSNorm", qk_layernorm=config.qk_layernorm)
    parts: Any = layer.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = RMSNorm
    parts.sharded_state_dict_keys_map = {}
    attention = parts.self_attention.submodules
    attention.core_attention = RowAttention
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    return TransformerBlockSubmodules(layer_specs=[layer] * config.num_layers, layer_norm=RMSNorm)
