"""Log-probs of a probe's rows by the model that was just loaded. Runs in vLLM's workers.

They are computed in passes outside of the scheduler: generation is paused, and no request and no block of the
KV cache may be touched. So attention over a row is plain PyTorch; everything that is loaded
from weights is vLLM's own, shards and packed matrices included.

Shapes: T tokens of a pass, R rows of L tokens each, H query heads and K key-value heads of this worker,
D head size, V entries of the vocabulary; of latent attention C numbers of a token, E rotary ones of its key.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
from vllm.config import VllmConfig
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention import Attention, ChunkedLocalAttention, MLAAttention
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

from asyncrl.core.errors import SyncError
from rollout_service.engine.probe_check import Row
from rollout_service.engine.vllm.objects import AttentionLayer, ScoringModel

COVERED = (Attention, ChunkedLocalAttention)
"""Kinds of attention that do the same as plain attention with a row of a probe, shorter than any window."""


def measure_logprobs(
    model: ScoringModel, config: VllmConfig, rows: Sequence[Row], temperature: float
) -> torch.Tensor | None:
    """Return the log-prob of each token after its row's first, float32 [R, L - 1]; None without logits.

    All rows are of one length. Collective over the workers that share the model. Raises SyncError for a model
    with other attention.
    """
    at_once = max(1, config.scheduler_config.max_num_batched_tokens // len(rows[0]))
    found = []
    for start in range(0, len(rows), at_once):
        part = _measure_at_once(model, config, rows[start : start + at_once], temperature)
        if part is None:
            return None
        found.append(part)
    return torch.cat(found)


@torch.inference_mode()
def _measure_at_once(
    model: ScoringModel, config: VllmConfig, rows: Sequence[Row], temperature: float
) -> torch.Tensor | None:
    device = next(model.parameters()).device
    tokens_RL = torch.tensor(rows, device=device)
    positions_RL = torch.arange(tokens_RL.shape[1], device=device).expand_as(tokens_RL)
    with (
        plain_attention(model, tokens_RL.shape[1]),
        set_forward_context(None, config, num_tokens=tokens_RL.numel()),
    ):
        inputs = {"input_ids": tokens_RL.flatten(), "positions": positions_RL.flatten()}
        hidden_TE = model(**inputs, intermediate_tensors=None)
        logits_TV = model.compute_logits(hidden_TE)
    if logits_TV is None:
        return None
    logprobs_TV = (logits_TV.float() / temperature).log_softmax(-1)
    logprobs_RLV = logprobs_TV.view(*tokens_RL.shape, -1)[:, :-1]
    return logprobs_RLV.gather(2, tokens_RL[:, 1:, None])[..., 0]


@contextmanager
def plain_attention(model: ScoringModel, row_tokens: int) -> Iterator[None]:
    """Within the block attention layers see rows of `row_tokens` alone, and write no KV cache.

    Raises:
        SyncError: A layer is not of the kind that is understood here.
    """
    attend = partial(_attend, row_tokens)
    with ExitStack() as undo:
        for name, layer in model.named_modules():
            if not isinstance(layer, AttentionLayerBase):
                continue
            if type(layer) is MLAAttention and hasattr(layer, "W_UK_T") and not layer.impl.is_sparse:
                layer.forward = partial(_attend_latent, row_tokens, layer)
                undo.callback(delattr, layer, "forward")
                continue
            if type(layer) not in COVERED:  # its forward would run without what it needs, and say nothing
                raise _uncovered(name, f"of the kind {type(layer).__name__}")
            impl = layer.impl
            _check_layer(name, layer)
            impl.forward = attend
            undo.callback(delattr, impl, "forward")  # the class's own method shows again
        yield


def _check_layer(name: str, layer: AttentionLayer) -> None:
    impl = layer.impl
    unknown = [
        what
        for what in ("alibi_slopes", "logits_soft_cap", "sinks", "kv_sharing_target_layer_name")
        if getattr(impl, what, None) not in (None, 0)
    ]
    if layer.attn_type != "decoder":
        unknown.append(f"attn_type {layer.attn_type}")
    if unknown:
        raise _uncovered(name, f"which has {', '.join(unknown)}")


def _uncovered(name: str, why: str) -> SyncError:
    hint = "Set weight_sync.probe_every: 0"
    return SyncError(f"the probe cannot run the attention of '{name}', {why}", hint=hint)


def _attend(
    row_tokens: int,
    layer: AttentionLayer,
    query_THD: torch.Tensor,
    key_TKD: torch.Tensor,
    value_TKD: torch.Tensor,
    _cache: torch.Tensor,
    _metadata: None,
    output: torch.Tensor,
    **_fused: object,
) -> torch.Tensor:
    """Stand in for the forward of a backend. A row of a probe is shorter than any sliding window."""
    attended_THD = _attend_rows(row_tokens, query_THD, key_TKD, value_TKD, layer.impl.scale)
    return output.copy_(attended_THD.reshape(output.shape))


def _attend_latent(
    row_tokens: int,
    layer: MLAAttention,
    query_THD: torch.Tensor,
    latent_TC: torch.Tensor,
    rotary_T1E: torch.Tensor,
    **_fused: object,
) -> torch.Tensor:
    """Stand in for latent attention, with the matrices that decoding uses, which are derived of weights."""
    plain_THD, turned_THE = query_THD.split([layer.qk_nope_head_dim, layer.qk_rope_head_dim], -1)
    query = torch.cat([torch.einsum("thd,hdc->thc", plain_THD, layer.W_UK_T), turned_THE], -1)
    key = torch.cat([latent_TC[:, None], rotary_T1E], -1)
    attended_THC = _attend_rows(row_tokens, query, key, latent_TC[:, None], layer.impl.scale)
    return torch.einsum("thc,hcd->thd", attended_THC, layer.W_UV).flatten(1)


def _attend_rows(
    row_tokens: int, query_THD: torch.Tensor, key_TKD: torch.Tensor, value_TKD: torch.Tensor, scale: float
) -> torch.Tensor:
    query_RHLD, key_RKLD, value_RKLD = (
        packed.unflatten(0, (-1, row_tokens)).transpose(1, 2) for packed in (query_THD, key_TKD, value_TKD)
    )
    attended_RHLD = torch.nn.functional.scaled_dot_product_attention(
        query_RHLD, key_RKLD, value_RKLD, is_causal=True, scale=scale, enable_gqa=True
    )
    return attended_RHLD.transpose(1, 2).flatten(0, 1)
