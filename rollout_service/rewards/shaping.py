"""What length does to a reward (pure); arXiv 2503.14476 (DAPO)."""

from __future__ import annotations


def overlong_penalty(num_tokens: int, max_tokens: int, buffer_tokens: int, factor: float) -> float:
    """Return what is added to the score: 0 up to the buffer, then down to -factor at `max_tokens`.

    Raises:
        ValueError: The buffer is not in 1..max_tokens.
    """
    if not 0 < buffer_tokens <= max_tokens:
        raise ValueError(
            f"the buffer ({buffer_tokens}) must be above 0 and at most max_tokens ({max_tokens})"
        )
    excess = num_tokens - (max_tokens - buffer_tokens)
    return min(-excess / buffer_tokens * factor, 0.0)


def is_overlong(finish_reason: str) -> bool:
    """Tell whether an answer was cut off: overlong filtering gives its tokens mask 0."""
    return finish_reason == "length"
