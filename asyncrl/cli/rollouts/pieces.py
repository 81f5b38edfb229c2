"""Tokens as text, cut where something changes (pure).

Owns what is shown for each token: its own text, how likely it was, whether
it was trained, and where a version begins. It prints nothing and knows no terminal and no page.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from asyncrl.cli.rollouts.fates import AgedSpan, Rollout

Decode = Callable[[Sequence[int]], str]

SHADE_BOUNDS = (0.1, 0.5, 1.0, 2.0, 4.0, 8.0)
"""Minus the log-prob, in nats, from which on each shade begins: 0.1 is a probability of 0.90, 8 of 0.0003."""
NUM_SHADES = len(SHADE_BOUNDS) + 1
UNFINISHED_TEXT = "\ufffd"


@dataclass(frozen=True)
class Piece:
    """One token.

    Attributes:
        text: Empty for a token that is only the beginning of a letter; the one that ends it has it all.
        shade: 0 (all but certain) to `NUM_SHADES` - 1.
        mask: Why it is not trained, see `rollouts`; empty if it is.
        begins: The span that begins with this token, None for most.
    """

    text: str
    logprob: float
    shade: int
    mask: str
    begins: AgedSpan | None


def pieces_of(rollout: Rollout, decode: Decode) -> list[Piece]:
    """Return the answer's tokens."""
    trajectory = rollout.trajectory
    texts = token_texts(trajectory.response_ids.tolist(), decode)
    begins = {aged.span.start: aged for aged in rollout.spans}
    rows = zip(texts, trajectory.logprobs.tolist(), rollout.masks(), strict=True)
    return [
        Piece(text, logprob, shade_of(logprob), mask, begins.get(place))
        for place, (text, logprob, mask) in enumerate(rows)
    ]


def token_texts(ids: Sequence[int], decode: Decode) -> list[str]:
    """Return what each token adds to the text.

    Tokens of a letter of several bytes, or of words with a space before them, say nothing alone. So each is
    decoded behind the few before it: what the text grows by is the token's own.
    """
    texts, start, end = [], 0, 0
    known = ""
    for place in range(len(ids)):
        longer = decode(ids[start : place + 1])
        is_whole = not longer.endswith(UNFINISHED_TEXT) or place - end >= 8
        if not is_whole and place + 1 < len(ids):
            texts.append("")
            continue
        texts.append(longer[len(known) :])
        start, end = end, place + 1
        known = decode(ids[start:end])
    return texts


def shade_of(logprob: float) -> int:
    """Return the shade of a token.

    >>> shade_of(-0.01), shade_of(-0.7), shade_of(-20.0)
    (0, 2, 6)
    """
    return bisect.bisect_right(SHADE_BOUNDS, -logprob)


def badge_of(aged: AgedSpan) -> str:
    """Return what stands before the first token of a version."""
    age = "lag unknown" if aged.lag is None else f"lag {aged.lag}"
    return f"v{aged.span.version} {age}"
