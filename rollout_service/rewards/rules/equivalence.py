"""Equality of answers as mathematics, by the math-verify library.

Only the process of a pool imports this module: the library takes a second to load, and may take for ever on
an answer.
"""

from __future__ import annotations

from asyncrl.core.errors import ConfigError

try:
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify
except ImportError as error:
    raise ConfigError(
        "the reward 'math_verify' needs the package math-verify", hint="Install it, or use 'math'"
    ) from error

OF_GOLD = [LatexExtractionConfig()]
OF_ANSWER = [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()]


def score_math_verify(response: str, ground_truth: object, **extra: object) -> float:
    """Return 1 if the answer in the response equals the gold, else 0.

    The answer is the last boxed one, else what the library finds: LaTeX, then plain numbers.

    Raises:
        ValueError: The gold is no mathematics.
    """
    gold = parse(f"\\boxed{{{ground_truth}}}", extraction_config=OF_GOLD)
    if not gold:
        raise ValueError(f"the ground truth {ground_truth!r} is no mathematics")
    return float(verify(gold, parse(response, extraction_config=OF_ANSWER)))
