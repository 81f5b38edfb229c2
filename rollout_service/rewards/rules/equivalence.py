"""Equality of answers as mathematics, by the math-verify library.

Only the process of a pool imports this module: the library takes a second to load, and may take for ever on
an answer.
"""

from __future__ import annotations

import os

from asyncrl.core.errors import ConfigError

try:
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify
except ImportError as error:
    raise ConfigError(
        "the reward 'math_verify' needs the package math-verify", hint="Install it, or use 'math'"
    ) from error

LIMIT_S = 5
"""Of the library, for parsing and for comparing; beyond it nothing is equal."""
BUSY_SHARE = 0.5
OF_GOLD = [LatexExtractionConfig()]
OF_ANSWER = [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()]


def score_math_verify(response: str, ground_truth: object, **extra: object) -> float:
    """Return 1 if the answer in the response equals the gold, else 0.

    The answer is the last boxed one, else what the library finds: LaTeX, then plain numbers.

    Raises:
        ValueError: The gold is no mathematics.
        TimeoutError: A limit of the library was reached, and not by the answer: this process hardly ran.
    """
    began = os.times()
    gold = parse(f"\\boxed{{{ground_truth}}}", extraction_config=OF_GOLD)
    if not gold:
        raise ValueError(f"the ground truth {ground_truth!r} is no mathematics")
    found = parse(response, extraction_config=OF_ANSWER, parsing_timeout=LIMIT_S)
    is_equal = verify(gold, found, timeout_seconds=LIMIT_S)
    now = os.times()
    took_s, busy_s = now.elapsed - began.elapsed, now.user + now.system - began.user - began.system
    if not is_equal and took_s >= LIMIT_S and busy_s < BUSY_SHARE * took_s:
        raise TimeoutError(f"{busy_s:.1f} s of work took {took_s:.1f} s: the machine is too busy")
    return float(is_equal)
