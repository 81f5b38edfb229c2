"""GSM8K's reward, with verl's quirks (pure).

Strict: within the last 300 characters, the last `#### <number>` counts; exactly one space, no
dollar sign; then commas and dollars are removed. Flexible: the last run of digits, dots and commas
counts as it stands, so `1,234` is not `1234`.
"""

from __future__ import annotations

import re

CLIP_CHARS = 300
STRICT = re.compile(r"#### (\-?[0-9\.\,]+)")
FLEXIBLE = re.compile(r"(\-?[0-9\.\,]+)")
NO_NUMBER = frozenset({"", "."})


def extract_strict(response: str) -> str | None:
    """Return the answer after the last `#### `, or None."""
    found = STRICT.findall(response[-CLIP_CHARS:])
    return found[-1].replace(",", "").replace("$", "") if found else None


def extract_flexible(response: str) -> str | None:
    """Return the last thing that looks like a number, or None."""
    found = FLEXIBLE.findall(response[-CLIP_CHARS:])
    return next((run for run in reversed(found) if run not in NO_NUMBER), None)


def score_answer(answer: str | None, ground_truth: object, format_score: float = 0.0) -> float:
    """Return 1 if the answer equals the gold, as strings; 0 without one; else `format_score`."""
    if answer is None:
        return 0.0
    return 1.0 if answer == str(ground_truth) else format_score


def score_strict(response: str, ground_truth: object, format_score: float = 0.0, **extra: object) -> float:
    """Return 1 if the strictly extracted answer equals the gold, as strings; else as `score_answer`."""
    return score_answer(extract_strict(response), ground_truth, format_score)


def score_flexible(response: str, ground_truth: object, format_score: float = 0.0, **extra: object) -> float:
    """Return 1 if the flexibly extracted answer equals the gold, as strings; else as `score_answer`."""
    return score_answer(extract_flexible(response), ground_truth, format_score)
