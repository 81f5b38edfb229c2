r"""DAPO's math reward: the last `Answer:` line, else a strict box, against the gold; 1 or -1 (pure).

Normalisation is that of the Minerva paper (arXiv 2206.14858, appendix D): units, words and LaTeX
dressing go, shorthand fractions and roots get braces, thousands lose their commas.
"""

from __future__ import annotations

import re

from rollout_service.rewards.rules.competition_math import BOX, read_braces

CLIP_CHARS, STRICT_CHARS = 300, 100
INVALID = "[INVALID]"
ANSWER = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)
_REPLACED = (
    ("an ", ""),
    ("a ", ""),
    (".$", "$"),
    ("\\$", ""),
    ("\\ ", ""),
    (" ", ""),
    ("mbox", "text"),
    (",\\text{and}", ","),
    ("\\text{and}", ","),
    ("\\text{m}", "\\text{}"),
)
_WORDS = re.findall(
    r"\S+",
    r"square ways integers dollars mph inches hours km units \ldots sue points feet minutes digits cents "
    r"degrees cm gm pounds meters meals edges students childrentickets multiples \text{s} \text{.}",
)
_DRESSING = re.findall(r"\S+", r'\text{} \mathrm{th} ^\circ ^{\circ} \; ,\! {,} " \dots')
_DROPPED = (*_WORDS, "\\text{\ns}", "\\text{}^2", "\\text{}^3", "\\text{\n}", *_DRESSING)
_UNWRAPPED = (r"\\text\{(.*?)\}", r"\\textbf\{(.*?)\}", r"\\overline\{(.*?)\}", r"\\boxed\{(.*)\}")


def normalize_answer(answer: str) -> str:
    """Return a final answer in one way of writing it: what follows its last equals sign."""
    answer = answer.rsplit("=", 1)[-1]
    for before, after in (*_REPLACED, *((dropped, "") for dropped in _DROPPED)):
        answer = answer.replace(before, after)
    answer = re.sub(r"(.*?)\$(.*?)\$(.*)", r"$\2$", answer)
    for pattern in _UNWRAPPED:
        answer = re.sub(pattern, r"\1", answer)
    answer = re.sub(r"frac([^{])(.)", r"frac{\1}{\2}", answer)
    answer = re.sub(r"sqrt([^{])", r"sqrt{\1}", answer).replace("$", "")
    plain = answer.replace(",", "")
    return (plain if plain.isdigit() else answer).strip()


def judge(response: str, ground_truth: str) -> tuple[bool, str]:
    """Return whether the answer is right, and what was read as the answer."""
    response = response[-CLIP_CHARS:]
    stated = ANSWER.findall(response)
    if stated:
        prediction = normalize_answer(stated[-1])
        return prediction == normalize_answer(ground_truth), prediction
    response = response[-STRICT_CHARS:]
    start = response.rfind(BOX)
    boxed = read_braces(response, start + len(BOX)) if start >= 0 else None
    prediction = INVALID if boxed is None else boxed
    return prediction == ground_truth, prediction


def extract_dapo(response: str) -> str | None:
    """Return what DAPO's rule reads as the final answer."""
    _, prediction = judge(response, "")
    return None if prediction == INVALID else prediction


def score_math_dapo(response: str, ground_truth: object, **extra: object) -> dict[str, object]:
    """Return {score: 1 or -1, acc, pred}."""
    is_right, prediction = judge(response, str(ground_truth))
    return {"score": 1.0 if is_right else -1.0, "acc": is_right, "pred": prediction}
