"""The probe: does the model that was just loaded say what the learner's model says? Runs in vLLM's workers.

The learner ships its log-probs of some rows of tokens with each version. Here the loaded model computes
its own, in passes outside of the scheduler: generation is paused, and no request and no block of the
KV cache may be touched. So attention over a row is plain PyTorch; everything that is loaded
from weights is vLLM's own, shards and packed matrices included. The first probe that agrees is kept: those
after it are judged by what has changed since (`weight_sync.memory.agreement`).

Shapes: T tokens of a pass, R rows of L tokens each, H query heads and K key-value heads of this worker,
D head size, V entries of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
from vllm.config import VllmConfig
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention import Attention, ChunkedLocalAttention
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

from asyncrl.core.errors import SyncError
from rollout_service.engine.vllm.objects import AttentionLayer, ScoringModel
from weight_sync.memory.agreement import TOLERANCES, find_disagreement, is_check_due
from weight_sync.memory.manifest import Probe

Row = tuple[int, ...]
COVERED = (Attention, ChunkedLocalAttention)
"""Kinds of attention that do the same as plain attention with a row of a probe, shorter than any window."""


class ProbeCheck:
    """Compares the probes of one engine's versions with the learner's, and with the first of them."""

    def __init__(self) -> None:
        self._first: dict[Row, list[float]] = {}
        self._num_passed = 0
        self._passed_step: int | None = None

    def check(self, model: ScoringModel, config: VllmConfig, probe: Probe, step: int) -> None:
        """Return if the `model`, loaded with the weights of `step`, agrees with `probe` or no check is due.

        Collective over the workers that share the model, as all of them load the same versions.

        Raises:
            SyncError: It does not, or its attention is of a kind that cannot be probed.
        """
        if not is_check_due(step, probe.every, self._num_passed, self._passed_step):
            return
        self._passed_step = None
        differences = _measure(model, config, probe)
        if differences is not None:  # else the logits are gathered on another worker, which judges
            self._judge(differences, config, probe)
        self._num_passed, self._passed_step = self._num_passed + 1, step

    def _judge(self, differences: dict[Row, list[float]], config: VllmConfig, probe: Probe) -> None:
        unknown: list[float | None] = [None] * (probe.row_tokens - 1)
        first = [value for row in differences for value in self._first.get(row, unknown)]
        now = [value for row in differences.values() for value in row]
        dtype = str(config.model_config.dtype).removeprefix("torch.")
        if why := find_disagreement(TOLERANCES[dtype], now, first if self._first else None):
            raise SyncError(
                f"the probe does not match, engine and learner hold different weights: {why}",
                hint="They compute different models (compare dtypes and configurations), or the engine keeps "
                "an old copy of a tensor. weight_sync.probe_every: 0 turns the check off",
            )
        self._first = self._first or differences


def _measure(model: ScoringModel, config: VllmConfig, probe: Probe) -> dict[Row, list[float]] | None:
    """Return engine's minus learner's log-probs by row; None where no logits arrive."""
    rows, wanted = zip(*probe.rows(), strict=True)
    at_once = max(1, config.scheduler_config.max_num_batched_tokens // probe.row_tokens)
    found: list[list[float]] = []
    for start in range(0, len(rows), at_once):
        part = measure_logprobs(model, config, rows[start : start + at_once], probe.temperature)
        if part is None:
            return None
        found += part.tolist()
    return {
        row: [ours - theirs for ours, theirs in zip(mine, learners, strict=True)]
        for row, mine, learners in zip(rows, found, wanted, strict=True)
    }


@torch.inference_mode()
def measure_logprobs(
    model: ScoringModel, config: VllmConfig, rows: Sequence[Row], temperature: float
) -> torch.Tensor | None:
    """Return the log-prob of each token after its row's first, float32 [R, L - 1]; None without logits.

    All rows are of one length. Collective over the workers that share the model. Raises SyncError for a model
    with other attention.
    """
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
    query_RHLD, key_RKLD, value_RKLD = (
        packed.unflatten(0, (-1, row_tokens)).transpose(1, 2) for packed in (query_THD, key_TKD, value_TKD)
    )
    attended_RHLD = torch.nn.functional.scaled_dot_product_attention(
        query_RHLD, key_RKLD, value_RKLD, is_causal=True, scale=layer.impl.scale, enable_gqa=True
    )
    return output.copy_(attended_RHLD.transpose(1, 2).reshape(output.shape))
