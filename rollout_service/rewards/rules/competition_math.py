r"""The MATH data set's reward: the last boxed answer against the gold, as normalised strings (pure).

Normalisation writes \frac12 as \frac{1}{2}, 3/4 as \frac{3}{4}, 0.5 as \frac{1}{2}, and drops
\left, \right, degrees, percent, dollars, units in \text{ }, white space and a short `x=` in front.
verl's quirks are kept: an unclosed box scores 0, and so does \fbox, which is found but not read.
"""

from __future__ import annotations

import re

BOX, BOX_WITHOUT_BRACES = "\\boxed{", "\\boxed "
_DROPPED = ("\n", "\\!", "\\left", "\\right", "^{\\circ}", "^\\circ", "\\$")
_SHORT_LEFT_SIDE = 2


def find_box(text: str) -> str | None:
    """Return what the last box holds; None if there is none, or its braces do not close."""
    if BOX_WITHOUT_BRACES in text:
        return text.rsplit(BOX_WITHOUT_BRACES, 1)[1].split("$")[0]
    start = text.rfind("\\boxed")
    if not text.startswith(BOX, start):
        return None
    return read_braces(text, start + len(BOX))


def read_braces(text: str, start: int) -> str | None:
    """Return the text from `start` to the brace that closes the one before it, or None."""
    depth = 1
    for end in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        if depth == 0:
            return text[start:end]
    return None


def normalize(answer: str) -> str:
    """Return the answer in one way of writing it.

    Raises:
        ValueError: Two units, or a \\sqrt or \\frac with nothing behind it: not comparable.
    """
    for dropped in _DROPPED[:2]:
        answer = answer.replace(dropped, "")
    answer = answer.replace("\\\\", "\\").replace("tfrac", "frac").replace("dfrac", "frac")
    for dropped in _DROPPED[2:]:
        answer = answer.replace(dropped, "")
    answer = _drop_unit(answer).replace("\\%", "").replace(" .", " 0.").replace("{.", "{0.")
    if answer.startswith("."):
        answer = "0" + answer
    left, equals, right = answer.partition("=")
    if equals and "=" not in right and len(left) <= _SHORT_LEFT_SIDE:
        answer = right
    answer = _brace_fractions(_brace_roots(answer).replace(" ", ""))
    if answer == "0.5":
        return "\\frac{1}{2}"
    return _write_fraction(answer)


def extract_boxed(response: str) -> str | None:
    """Return what the last box holds, in one way of writing it."""
    boxed = find_box(response)
    if boxed is None:
        return None
    try:
        return normalize(boxed)
    except ValueError:  # it is compared as it stands then
        return boxed


def is_equivalent(left: str, right: str) -> bool:
    """Tell whether both are the same after `normalize`; as they stand if one cannot be normalised."""
    try:
        return normalize(left) == normalize(right)
    except ValueError:
        return left == right


def score_math(response: str, ground_truth: object, **extra: object) -> float:
    """Return 1 if the last boxed answer is equivalent to the gold, else 0."""
    answer = find_box(response)
    return float(answer is not None and is_equivalent(answer, str(ground_truth)))


def _drop_unit(answer: str) -> str:
    parts = answer.split("\\text{ ")
    if len(parts) > 2:
        raise ValueError("two units")
    return parts[0]


def _brace_roots(answer: str) -> str:
    if answer.endswith("\\sqrt"):
        raise ValueError("a root of nothing")
    return re.sub(r"\\sqrt([^{])", r"\\sqrt{\1}", answer, flags=re.DOTALL)


def _brace_fractions(answer: str) -> str:
    first, *rest = answer.split("\\frac")
    written = first
    for part in rest:
        if part[:1] == "{":
            written += "\\frac" + part
        elif len(part) < 2:
            if not part:
                raise ValueError("a fraction of nothing")
            return answer
        else:
            below = part[1:] if part[1] == "{" else f"{{{part[1]}}}{part[2:]}"
            written += f"\\frac{{{part[0]}}}{below}"
    return written


def _write_fraction(answer: str) -> str:
    match = re.fullmatch(r"(0|-?[1-9][0-9]*)/(0|-?[1-9][0-9]*)", answer)
    return f"\\frac{{{match[1]}}}{{{match[2]}}}" if match else answer
