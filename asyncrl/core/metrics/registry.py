"""The table of all metrics and the questions to it.

Invariant: a name in a metrics row is in this table, or the recorder says once that it is not. It must
never import what makes metrics.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from functools import lru_cache
from typing import Literal

from asyncrl.core.metrics.correction_names import CORRECTION
from asyncrl.core.metrics.learning_names import LEARNING
from asyncrl.core.metrics.metric import Metric
from asyncrl.core.metrics.run_names import RUN

METRICS: tuple[Metric, ...] = (*LEARNING, *CORRECTION, *RUN)

PLACEHOLDERS = {
    "stage": r"[a-z][a-z0-9_]*",
    "option": r"(?:token|seq_sum|seq_mean|seq_max)_k[123]",
    "reason": r"[a-z][a-z0-9_]*",
    "cause": r"[a-z][a-z0-9_]*",
    "signal": r"[a-z][a-z0-9_]*",
    "source": r"[^/]+(?:/[^/]+)*?",
    "variable": r"[^/]+",
    "metric": r"[^/]+(?:/(?:mean|std))?(?:/(?:low|high))?",
    "number": r"[0-9]+",
    "parameter": r"[a-z][a-z0-9_]*",
    "part": r"[^/]+",
    "sink": r"[a-z][a-z0-9_]*",
}
"""Values that each `<word>` in a name may stand for."""


def find(name: str) -> Metric | None:
    """Return the metric called `name`, None if there is none.

    >>> find("timing_s/update_actor").name
    'timing_s/<stage>'
    """
    return _find(name)


def variables_of(name: str) -> dict[str, str]:
    """Return what the variable parts of the metric called `name` stand for; empty if it has none.

    >>> variables_of("timing_s/update_actor")
    {'stage': 'update_actor'}
    """
    if name in _EXACT:
        return {}
    matches = (pattern.fullmatch(name) for pattern, _ in _PATTERNS)
    return next((match.groupdict() for match in matches if match is not None), {})


def unknown_names(names: Iterable[str]) -> dict[str, str]:
    """Return the names that are not in the table, each with the most similar known one or "".

    Keys without a slash (`time`) are no metrics.

    >>> unknown_names(["time", "actor/lr", "actor/grad_nrom"])
    {'actor/grad_nrom': 'actor/grad_norm'}
    """
    unknown = [name for name in names if "/" in name and find(name) is None]
    similar = {
        name: difflib.get_close_matches(name, [metric.name for metric in METRICS], 1) for name in unknown
    }
    return {name: found[0] if found else "" for name, found in similar.items()}


def extreme_of(name: str) -> Literal["max", "min"] | None:
    """Return "max" or "min" if that is how `name` is reduced; unknown names by their last part.

    >>> extreme_of("rollout_corr/rollout_rs_seq_max_k2_mean") is None
    True
    """
    metric = find(name)
    if metric is not None:
        return metric.reduction if metric.reduction in ("max", "min") else None
    words = name.rpartition("/")[2].split("_")
    return "max" if "max" in words else "min" if "min" in words else None


@lru_cache(maxsize=4096)
def _find(name: str) -> Metric | None:
    exact = _EXACT.get(name)
    if exact is not None:
        return exact
    return next((metric for pattern, metric in _PATTERNS if pattern.fullmatch(name)), None)


def _compile(name: str) -> re.Pattern[str]:
    parts = re.split(r"<(\w+)>", name)
    literals, words = parts[::2], parts[1::2]
    text = re.escape(literals[0])
    for word, literal in zip(words, literals[1:], strict=True):
        text += f"(?P<{word}>{PLACEHOLDERS[word]})" + re.escape(literal)
    return re.compile(text)


_EXACT = {metric.name: metric for metric in METRICS if "<" not in metric.name}
_PATTERNS = [
    (_compile(metric.name), metric)
    # Fewer variable parts say more: `val-aux/a/b/clip_ratio` is the clip ratio of source a/b.
    for metric in sorted(METRICS, key=lambda metric: metric.name.count("<"))
    if "<" in metric.name
]
