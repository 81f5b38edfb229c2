"""Length penalty of a reward (pure); arXiv 2503.14476 (DAPO)."""

from __future__ import annotations

from asyncrl.core.status.replica import ShapingStatus


class Overlong:
    """Takes off the reward of answers that come near the limit, and counts what it took.

    Args:
        max_tokens: The limit of an answer.
        buffer_tokens: Tokens before the limit at which the penalty begins, 1 to `max_tokens`.
        penalty: Penalty at the limit.

    >>> overlong = Overlong(max_tokens=10, buffer_tokens=4, penalty=1.0)
    >>> overlong.shape(1.0, num_tokens=6), overlong.shape(1.0, num_tokens=9)
    (1.0, 0.25)
    """

    def __init__(self, max_tokens: int, buffer_tokens: int, penalty: float) -> None:
        self._limits = max_tokens, buffer_tokens, penalty
        self._num_scored = self._num_overlong = 0
        self._taken_off = 0.0

    def shape(self, reward: float, num_tokens: int) -> float:
        """Return the reward of an answer of `num_tokens`."""
        change = overlong_penalty(num_tokens, *self._limits)
        self._num_scored += 1
        self._num_overlong += change < 0
        self._taken_off -= change
        return reward + change

    def status(self) -> ShapingStatus:
        """Return how many answers were scored and how many of them lost something, and the sum of that."""
        return ShapingStatus(self._num_scored, self._num_overlong, self._taken_off)


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
