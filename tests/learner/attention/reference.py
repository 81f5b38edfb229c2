"""Stand-in for torch's variable-length kernel, by its contract: a loop over pieces, in plain arithmetic."""

from __future__ import annotations

import itertools

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
