"""Attention of packed rows, for transformers' attention interface: causal within each row.

A model that hands its keyword arguments down to this function runs on packed tokens [1, N] as it is.
It must never answer for an attention that it does not know (soft caps, sinks, biases): it raises, and
the model is then run on padded rows instead (see `language_model.py`).

Shapes: N packed positions, H query heads, G key/value heads, D head size.
"""

from __future__ import annotations

import torch
from torch.nn import functional
from transformers import AttentionInterface

from learner.fsdp2.model.rows import Pad, Rows, Unpad

NAME = "packed_rows"
"""Under this name transformers knows the function; also the keyword by which the model gets the rows."""

_WITHOUT_EFFECT = frozenset(
    (
        "cache_position",
        "dropout",
        "is_causal",
        "output_attentions",
        "output_hidden_states",
        "position_embeddings",
        "position_ids",
        "return_dict",
        "use_cache",
    )
)
"""Arguments of models that a causal attention in evaluation mode can ignore."""


def register() -> None:
    """Make the function known to transformers; again does nothing."""
    AttentionInterface.register(NAME, attend_within_rows)


def attend_within_rows(
    module: torch.nn.Module,
    query_1HND: torch.Tensor,
    key_1GND: torch.Tensor,
    value_1GND: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    packed_rows: Rows | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **others: object,
) -> tuple[torch.Tensor, None]:
    """Return (output [1, N, H, D], None), as transformers wants it.

    Raises:
        NotImplementedError: The rows did not arrive, or the model asks for more than a causal mask.
    """
    unknown = [name for name, value in others.items() if value is not None and name not in _WITHOUT_EFFECT]
    if packed_rows is None or attention_mask is not None or unknown:
        raise NotImplementedError(f"attention of {type(module).__name__} with {unknown or 'its own mask'}")
    rows = packed_rows
    padded = [Pad.apply(x[0].transpose(0, 1), rows) for x in (query_1HND, key_1GND, value_1GND)]
    outputs, start = [], 0
    for num_lines, length in rows.rectangles:
        end = start + num_lines * length
        q, k, v = (x[start:end].unflatten(0, (num_lines, length)).transpose(1, 2) for x in padded)
        is_windowed = sliding_window is not None and sliding_window < length
        output = functional.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=_window_mask(length, sliding_window or 0, q.device) if is_windowed else None,
            is_causal=not is_windowed,
            scale=scaling,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        outputs.append(output.transpose(1, 2).flatten(0, 1))
        start = end
    output_MHD = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return Unpad.apply(output_MHD, rows)[None], None


def _window_mask(length: int, window: int, device: torch.device) -> torch.Tensor:
    """Return [length, length]: which keys each query sees, itself and the `window - 1` before it."""
    return torch.ones(length, length, dtype=torch.bool, device=device).tril().triu(1 - window)
