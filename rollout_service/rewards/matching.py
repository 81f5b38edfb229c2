"""Rewards that compare the response with the ground truth (pure)."""

from __future__ import annotations

from typing import Any


def score_exact_match(response: str, ground_truth: Any, **extra: Any) -> float:
    """Return 1 if the response, stripped of white space, is the ground truth, else 0."""
    return float(response.strip() == str(ground_truth).strip())


def score_digit_sort(
    response: str, ground_truth: str, *, finish_reason: str, num_tokens: int, **extra: Any
) -> float:
    """Return 1 if the response is the sorted digits, then the end of sequence, and nothing else.

    The token count excludes special tokens in between, which the decoded text does not show.
    """
    is_clean = finish_reason == "stop" and num_tokens == len(ground_truth) + 1
    return float(is_clean and response == ground_truth)
