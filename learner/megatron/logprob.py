"""Log-prob and entropy of tokens from logits whose vocabulary is split over tensor-parallel ranks.

Owns one autograd function, exact in both directions. It must never gather the vocabulary, and rows
that pad the vocabulary must never enter the softmax (unmasked they cost 0.3 nat on a tiny model).

Shapes: N tokens, V vocabulary entries of this rank (real and padding).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


def vocab_parallel_logprobs(
    logits_NV: torch.Tensor,
    labels_N: torch.Tensor,
    *,
    vocab_size: int,
    temperature: float,
    group: dist.ProcessGroup,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (log-prob of the label [N], entropy [N]) of softmax(logits / temperature), in float32.

    Args:
        logits_NV: This rank's part of the logits.
        labels_N: Token ids over the whole vocabulary.
        vocab_size: Real entries of the whole vocabulary; those behind are padding.
        temperature: What the sampler divided its logits by.
        group: The tensor-parallel group.
    """
    logprobs_N, entropy_N = _VocabParallelLogprobs.apply(
        logits_NV, labels_N, vocab_size, 1.0 / temperature, group
    )
    return logprobs_N, entropy_N


class _VocabParallelLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits_NV: torch.Tensor,
        labels_N: torch.Tensor,
        vocab_size: int,
        scale: float,
        group: dist.ProcessGroup,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        num_entries, first_entry = logits_NV.shape[-1], group.rank() * logits_NV.shape[-1]
        num_real = max(0, min(num_entries, vocab_size - first_entry))
        scaled_NV = _scale_real_entries(logits_NV, num_real, scale)
        max_N = scaled_NV.amax(-1) if num_real else scaled_NV.new_full(scaled_NV.shape[:-1], -torch.inf)
        if group.size() > 1:
            dist.all_reduce(max_N, dist.ReduceOp.MAX, group=group)
        # From here on relative to the maximum over all ranks; padding entries stay away.
        shifted_NV = scaled_NV - max_N[:, None]
        weights_NV = shifted_NV.exp()
        local_N = labels_N - first_entry
        is_local_N = (local_N >= 0) & (local_N < num_real)
        local_N = local_N.clamp(0, max(num_real - 1, 0))
        sums_3N = torch.zeros(3, len(labels_N), device=logits_NV.device)
        if num_real:
            sums_3N[0] = weights_NV.sum(-1)
            sums_3N[1] = (weights_NV * shifted_NV).sum(-1)
            sums_3N[2] = shifted_NV.gather(-1, local_N[:, None])[:, 0].masked_fill_(~is_local_N, 0.0)
        if group.size() > 1:
            dist.all_reduce(sums_3N, group=group)
        log_total_N = sums_3N[0].log()
        entropy_N = log_total_N - sums_3N[1] / sums_3N[0]
        ctx.save_for_backward(logits_NV, max_N + log_total_N, entropy_N, local_N, is_local_N)
        ctx.num_real, ctx.scale = num_real, scale
        ctx.set_materialize_grads(False)
        return sums_3N[2] - log_total_N, entropy_N

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, logprob_grad_N: torch.Tensor | None, entropy_grad_N: torch.Tensor | None
    ) -> tuple[torch.Tensor, None, None, None, None]:
        logits_NV, log_norm_N, entropy_N, local_N, is_local_N = ctx.saved_tensors
        # Made again rather than kept: a second tensor of the size of the logits would stay alive.
        logp_NV = _scale_real_entries(logits_NV, ctx.num_real, ctx.scale) - log_norm_N[:, None]
        probs_NV = logp_NV.exp()
        gradient_NV = torch.zeros_like(probs_NV)
        if entropy_grad_N is not None:  # dH/dx = -p (log p + H)
            gradient_NV -= probs_NV * (logp_NV + entropy_N[:, None]) * entropy_grad_N[:, None]
        if logprob_grad_N is not None:  # dlogp(label)/dx = [label] - p
            gradient_NV -= probs_NV * logprob_grad_N[:, None]
            if ctx.num_real:
                gradient_NV.scatter_add_(-1, local_N[:, None], (logprob_grad_N * is_local_N)[:, None])
        full_NV = torch.zeros_like(logits_NV)
        full_NV[:, : ctx.num_real] = gradient_NV * ctx.scale
        return full_NV, None, None, None, None


def _scale_real_entries(logits_NV: torch.Tensor, num_real: int, scale: float) -> torch.Tensor:
    real_NV = logits_NV[:, :num_real].float()
    return real_NV * scale if scale != 1.0 else real_NV
