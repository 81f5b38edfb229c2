"""Rewards that compare the response with the ground truth, or with a form (pure)."""

from __future__ import annotations

import re

from rollout_service.rewards.rules.competition_math import find_box

_UNTAGGED = r"(?:(?!</?think>|</?answer>).)*"
THINK_ANSWER = re.compile(rf"\s*<think>{_UNTAGGED}</think>\s*<answer>{_UNTAGGED}</answer>\s*", re.DOTALL)
FORMS = ("think_answer", "boxed")
"""Forms by name; any other pattern is a regular expression."""


def score_exact_match(response: str, ground_truth: object, **extra: object) -> float:
    """Return 1 if the response, stripped of white space, is the ground truth, else 0."""
    return float(response.strip() == str(ground_truth).strip())


def score_digit_sort(
    response: str, ground_truth: str, *, finish_reason: str, num_tokens: int, **extra: object
) -> float:
    """Return 1 if the response is the sorted digits, then the end of sequence, and nothing else.

    The token count excludes special tokens in between, which the decoded text does not show.
    """
    is_clean = finish_reason == "stop" and num_tokens == len(ground_truth) + 1
    return float(is_clean and response == ground_truth)


def score_format(
    response: str, ground_truth: object, pattern: str = "think_answer", **extra: object
) -> float:
    """Return 1 if the response has the form, else 0.

    Args:
        pattern: `think_answer` (`<think>…</think><answer>…</answer>` and nothing else), `boxed` (a box that
            closes), or a regular expression that must match the whole response (`.` matches newlines).

    Raises:
        re.error: The pattern is no regular expression.
    """
    if pattern == "boxed":
        return float(find_box(response) is not None)
    expression = THINK_ANSWER if pattern == "think_answer" else re.compile(pattern, re.DOTALL)
    return float(expression.fullmatch(response) is not None)
