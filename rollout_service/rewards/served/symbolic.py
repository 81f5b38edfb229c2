r"""Mathematical equality, by the `math-verify` library: \frac{2}{4} is 0.5, x+1 is 1+x.

It parses LaTeX and compares with sympy, which may take for ever on what a model writes (9^{9^{9^9}}), and
it stops itself by a signal, which works in a main thread only: it runs in a process of the pool.
"""

from __future__ import annotations

from collections.abc import Callable

from asyncrl.core.errors import ConfigError


def load_math_verify() -> Callable[..., float]:
    """Return `score(response, ground_truth)`: 1 if the answer in the response equals the gold, else 0.

    The answer is the last boxed one, else what the library finds: LaTeX, then plain numbers.

    Raises:
        ConfigError: The library is not installed.
    """
    try:
        from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify
    except ImportError as error:
        raise ConfigError(
            "the reward 'math_verify' needs the package math-verify", hint="Install it, or use 'math'"
        ) from error
    of_gold = [LatexExtractionConfig()]
    of_answer = [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()]

    def score_math_verify(response: str, ground_truth: object, **extra: object) -> float:
        gold = parse(f"\\boxed{{{ground_truth}}}", extraction_config=of_gold)
        if not gold:
            raise ValueError(f"the ground truth {ground_truth!r} is no mathematics")
        return float(verify(gold, parse(response, extraction_config=of_answer)))

    return score_math_verify
