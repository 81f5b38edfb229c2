"""The probe: does the model that was just loaded say what the learner's model says? Runs in vLLM's workers.

The learner ships its log-probs of a fixed sequence with some versions. Here the loaded model computes
its own, in one pass outside of the scheduler: generation is paused, and no request and no block of the
KV cache may be touched. So attention over the few tokens is plain PyTorch; everything that is loaded
from weights is vLLM's own, shards and packed matrices included.

Shapes: T tokens of the probe, H query heads and K key-value heads of this worker, D head size, V
entries of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention import Attention

from asyncrl.errors import SyncError
from weight_sync.memory.manifest import Probe

TOLERANCE_NATS = {torch.float32: 2e-3, torch.float16: 0.05, torch.bfloat16: 0.2}
"""Largest mean difference per token, by the dtype of the engine's model.

Observed on CPU between this pass and Hugging Face's, with two layers: 5e-7 in float32, 0.011 in bfloat16;
deeper models add more. Weights of another model differ by whole nats, those of one learner step often by
less than this.
"""


def check_probe(model: torch.nn.Module, config: VllmConfig, probe: Probe) -> None:
    """Return if the loaded `model` agrees with `probe`.

    Raises:
        SyncError: It does not, or its attention is of a kind that cannot be probed.
    """
    found_T = measure_logprobs(model, config, probe.tokens, probe.temperature)
    if found_T is None:
        return  # the logits are gathered on another worker, which judges
    wanted_T = torch.tensor(probe.logprobs, device=found_T.device)
    difference = float((found_T - wanted_T).abs().mean())
    tolerance = TOLERANCE_NATS[config.model_config.dtype]
    if not difference <= tolerance:  # as written, NaN is a difference too
        raise SyncError(
            f"the probe does not match: the log-probs of {len(probe.logprobs)} tokens are "
            f"{difference:.3g} nats per token from the learner's, at most {tolerance:g} are allowed",
            hint="Learner and engine compute different models: compare their dtypes and configurations",
        )


@torch.inference_mode()
def measure_logprobs(
    model: Any, config: VllmConfig, tokens: Sequence[int], temperature: float
) -> torch.Tensor | None:
    """Return the log-prob of each token after the first, float32 [T - 1]; None where no logits arrive.

    Collective over the workers that share the model. Raises SyncError for a model with other attention.
    """
    device = next(model.parameters()).device
    tokens_T = torch.tensor(tokens, device=device)
    positions_T = torch.arange(len(tokens), device=device)
    with plain_attention(model), set_forward_context(None, config, num_tokens=len(tokens)):
        hidden_TE = model(input_ids=tokens_T, positions=positions_T, intermediate_tensors=None)
        logits_TV = model.compute_logits(hidden_TE[:-1])
    if logits_TV is None:
        return None
    logprobs_TV = (logits_TV.float() / temperature).log_softmax(-1)
    return logprobs_TV.gather(1, tokens_T[1:, None])[:, 0]


@contextmanager
def plain_attention(model: torch.nn.Module) -> Iterator[None]:
    """Within the block attention layers see the tokens of the call alone, and write no KV cache.

    Raises:
        SyncError: A layer is not of the kind that is understood here.
    """
    with ExitStack() as undo:
        for name, layer in model.named_modules():
            if not isinstance(layer, Attention):
                continue
            impl: Any = layer.impl
            _check_layer(name, layer)
            impl.forward = _attend
            undo.callback(delattr, impl, "forward")  # the class's own method shows again
        yield


def _check_layer(name: str, layer: Any) -> None:
    impl = layer.impl
    unknown = [
        what
        for what in ("alibi_slopes", "logits_soft_cap", "sinks", "kv_sharing_target_layer_name")
        if getattr(impl, what, None) not in (None, 0)
    ]
    if layer.attn_type != "decoder":
        unknown.append(f"attn_type {layer.attn_type}")
    if unknown:
        raise SyncError(
            f"the probe cannot run the attention of '{name}', which has {', '.join(unknown)}",
            hint="Set weight_sync.probe_every: 0",
        )


def _attend(
    layer: Any,
    query_THD: torch.Tensor,
    key_TKD: torch.Tensor,
    value_TKD: torch.Tensor,
    _cache: torch.Tensor,
    _metadata: None,
    output: torch.Tensor,
    **_fused: Any,
) -> torch.Tensor:
    """Stand in for the forward of a backend. A probe is shorter than any sliding window."""
    attended_HTD = torch.nn.functional.scaled_dot_product_attention(
        query_THD.transpose(0, 1),
        key_TKD.transpose(0, 1),
        value_TKD.transpose(0, 1),
        is_causal=True,
        scale=layer.impl.scale,
        enable_gqa=True,
    )
    return output.copy_(attended_HTD.transpose(0, 1).reshape(output.shape))
