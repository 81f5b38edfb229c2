"""Stand-in for torch's variable-length kernel, by its contract: a loop over pieces, in plain arithmetic."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch


def varlen_attn(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
) -> torch.Tensor:
    """See `torch.nn.attention.varlen.varlen_attn`; query [N, h, D], key and value [K, g, D].

    Where a piece has fewer queries than keys, its last query stands at its last key.
    """
    assert cu_seq_q.dtype is cu_seq_k.dtype is torch.int32 and len(cu_seq_q) == len(cu_seq_k)
    ends_q, ends_k = cu_seq_q.tolist(), cu_seq_k.tolist()
    assert (ends_q[0], ends_q[-1], ends_k[0], ends_k[-1]) == (0, len(query), 0, len(key))
    pieces = list(zip(itertools.pairwise(ends_q), itertools.pairwise(ends_k), strict=True))
    assert max_q == max(end - start for (start, end), _ in pieces)
    assert max_k == max(end - start for _, (start, end) in pieces)
    num_shared = query.shape[1] // key.shape[1]
    assert enable_gqa or num_shared == 1
    left, right = window_size
    assert right == 0, "asyncrl attends causally"
    outputs = []
    for (q_start, q_end), (k_start, k_end) in pieces:
        q = query[q_start:q_end].transpose(0, 1)
        k, v = (x[k_start:k_end].repeat_interleave(num_shared, 1).transpose(0, 1) for x in (key, value))
        places = torch.arange(q.shape[1], device=q.device)[:, None] + (k.shape[1] - q.shape[1])
        columns = torch.arange(k.shape[1], device=q.device)
        sees = (columns <= places) if left < 0 else (columns <= places) & (columns >= places - left)
        scores = q @ k.transpose(1, 2) * (scale if scale is not None else q.shape[-1] ** -0.5)
        weights = scores.masked_fill(~sees, float("-inf")).softmax(-1)
        outputs.append((weights @ v).transpose(0, 1))
    return torch.cat(outputs)


def flash(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    lengths: Sequence[object],
    scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `learner.attention.cascade_varlen.flash`."""
    outputs, lses = [], []
    for queries, keys in _pieces(len(query), len(key), lengths):
        scores, v = _scores(query[queries], key[keys], value[keys], lengths[4], scale)[:2]
        lses.append(scores.logsumexp(-1))
        outputs.append((scores.softmax(-1) @ v).transpose(0, 1))
    return torch.cat(outputs).to(query.dtype), torch.cat(lses, 1)


def flash_backward(
    gradient: torch.Tensor,
    heads: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    output: torch.Tensor,
    lse_hQ: torch.Tensor,
    lengths: Sequence[object],
    scale: float | None,
) -> tuple[torch.Tensor, ...]:
    """See `learner.attention.cascade_varlen.flash_backward`: softmax and its gradient by the given lse."""
    grads = [torch.full_like(x, torch.nan) for x in heads]
    for queries, keys in _pieces(len(heads[0]), len(heads[1]), lengths):
        scores, v, q, k, factor = _scores(
            heads[0][queries], heads[1][keys], heads[2][keys], lengths[4], scale
        )
        go, out = (x[queries].transpose(0, 1).to(scores.dtype) for x in (gradient, output))
        weights = (scores - lse_hQ[:, queries, None]).exp()
        slopes = weights * (go @ v.transpose(1, 2) - (go * out).sum(-1, keepdim=True)) * factor
        found = (slopes @ k, slopes.transpose(1, 2) @ q, weights.transpose(1, 2) @ go)
        for grad, where, part in zip(grads, (queries, keys, keys), found, strict=True):
            per_head = part.unflatten(0, (grad.shape[1], -1)).sum(1)
            grad[where] = per_head.transpose(0, 1).to(grad.dtype)
    return tuple(grads)


def _pieces(num_queries: int, num_keys: int, lengths: Sequence[Any]) -> list[tuple[slice, slice]]:
    """Return the places of each piece, and check the kernel's contract."""
    offsets_q, offsets_k, max_q, max_k, is_causal = lengths
    assert offsets_q.dtype is offsets_k.dtype is torch.int32 and len(offsets_q) == len(offsets_k)
    ends = [(0, num_queries), (0, num_keys)]
    assert [(int(x[0]), int(x[-1])) for x in (offsets_q, offsets_k)] == ends
    pieces = [[slice(*pair) for pair in itertools.pairwise(x.tolist())] for x in (offsets_q, offsets_k)]
    sizes = [[one.stop - one.start for one in places] for places in pieces]
    assert [max_q, max_k] == [max(one) for one in sizes]
    assert not is_causal or sizes[0] == sizes[1], "kernels of GPUs align the mask at the last key"
    return list(zip(*pieces, strict=True))


def _scores(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, is_causal: object, scale: float | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, float]:
    """Return scores, values, queries and keys [h, ...], in float32 at least, and the scale."""
    dtype = torch.promote_types(query.dtype, torch.float32)
    num_shared = query.shape[1] // key.shape[1]
    q = query.transpose(0, 1).to(dtype)
    k, v = (x.repeat_interleave(num_shared, 1).transpose(0, 1).to(dtype) for x in (key, value))
    factor = scale if scale is not None else q.shape[-1] ** -0.5
    scores = q @ k.transpose(1, 2) * factor
    if is_causal:
        sees = torch.ones(scores.shape[1:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~sees, -torch.inf)
    return scores, v, q, k, factor
