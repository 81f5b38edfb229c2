"""Attention of packed rows, for transformers' attention interface: causal within each row.

A model that hands its keyword arguments down to this function runs on packed tokens [1, N] as it is.
It must never answer for an attention that it does not know (soft caps, sinks, biases): it raises, and
the model is then run on padded rows instead (see `language_model.py`).

Shapes: N packed positions, H query heads, G key/value heads, D head size.
"""

from __future__ import annotations

import torch
from transformers import AttentionInterface

from learner.fsdp2.model.rows import Rows

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
    query_NHD, key_NGD, value_NGD = (x[0].transpose(0, 1) for x in (query_1HND, key_1GND, value_1GND))
    return packed_rows.attention.attend(query_NHD, key_NGD, value_NGD, scaling, sliding_window)[None], None
