"""Attention of Megatron's layers on the packed rows of a microbatch.

Shapes: N positions, h heads of queries, g of keys and values, D head size.
"""

from __future__ import annotations

import math
from abc import abstractmethod

import torch
from megatron.core import parallel_state
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule

from learner.megatron.model.kernels import rotate
from learner.megatron.model.movement import GatherKeys
from learner.megatron.model.packing import PackedRows


class PackedAttention(MegatronModule):
    """Causal attention within each row, after queries and keys are turned by their positions."""

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        attn_mask_type: object = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: PackedRows | None = None,
    ) -> torch.Tensor:
        """Take query [N, 1, h, D], key and value [N, 1, g, D]; return [N, 1, h * D]."""
        assert packed_seq_params is not None, "this attention needs the rows of the microbatch"
        assert attention_mask is attention_bias is None, "rows are causal and nothing else"
        rows = packed_seq_params
        query, key = (rotate(x.squeeze(1), rows.cos_N1C, rows.sin_N1C) for x in (query, key))
        return self.attend(query, key, value.squeeze(1), rows).reshape(query.shape[0], 1, -1)

    @abstractmethod
    def attend(
        self, query_NhD: torch.Tensor, key_NgD: torch.Tensor, value_NgD: torch.Tensor, rows: PackedRows
    ) -> torch.Tensor:
        """Return the outputs, h * D for each position."""


class RowAttention(PackedAttention):
    """Attention by a kernel of `learner.attention`.

    Under context parallelism each rank has the queries of its share of a row and gathers the row's keys
    and values from the others.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: object,
        attention_type: str,
        softmax_scale: float | None = None,
        **_: object,
    ) -> None:
        super().__init__(config=config)
        assert config.attention_dropout == 0.0, "log-probs must not be random"
        self.scale = softmax_scale if softmax_scale is not None else 1.0 / math.sqrt(config.kv_channels)
        self.cp_group = parallel_state.get_context_parallel_group()

    def sharded_state_dict(self, *_: object, **__: object) -> dict[str, object]:
        return {}

    def attend(
        self, query_NhD: torch.Tensor, key_NgD: torch.Tensor, value_NgD: torch.Tensor, rows: PackedRows
    ) -> torch.Tensor:
        assert rows.attention is not None, "the rows were not made by describe_rows"
        key, value = key_NgD, value_NgD
        if self.cp_group.size() > 1:
            joined = GatherKeys.apply(torch.cat([key.flatten(1), value.flatten(1)], 1), self.cp_group)
            key, value = (x.unflatten(1, (-1, key.shape[2])) for x in joined.chunk(2, 1))
        return rows.attention.attend(query_NhD, key, value, self.scale)
