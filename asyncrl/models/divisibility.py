"""Divisibility of a model's sizes by the parallel sizes of the learner (pure).

One rule for the check before the start and for the backend itself. Must never read a file.
"""

from __future__ import annotations

from collections.abc import Iterator

VOCABULARY_MULTIPLE = 16
"""Padding of the vocabulary: one multiple for every tensor-parallel size that divides it, so that the
padded model is the same model at each of them."""


def pad_vocabulary(vocab_size: int) -> int:
    """Return the rows of the embedding as it is trained: the next multiple."""
    return -(-vocab_size // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE


def find_uneven_cuts(
    *,
    tp: int,
    pp: int,
    vpp: int,
    num_layers: int,
    num_key_value_heads: int,
    intermediate_size: int,
    vocab_size: int,
) -> Iterator[tuple[str, str]]:
    """Yield (problem, hint) for each size that `learner.tp`, `pp` and `vpp` do not cut evenly."""
    if vpp > 1 and pp == 1:
        yield f"learner.vpp: {vpp} cuts pipeline stages, but learner.pp is 1", "Raise learner.pp"
    for what, size, key, num_parts in (
        ("layers", num_layers, "pp x vpp", pp * vpp),
        ("key/value heads", num_key_value_heads, "tp", tp),
        ("entries of the padded vocabulary", pad_vocabulary(vocab_size), "tp", tp),
        ("intermediate channels", intermediate_size, "tp", tp),
    ):
        if size % num_parts:
            problem = f"learner.{key}: {num_parts} does not divide the model's {size} {what}"
            yield problem, f"Choose a {key} that divides it"
