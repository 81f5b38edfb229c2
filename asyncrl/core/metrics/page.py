"""Page `docs/metrics.md`, rendered from the table of metrics."""

from __future__ import annotations

from itertools import groupby

from asyncrl.core.metrics.metric import Metric
from asyncrl.core.metrics.registry import METRICS

HEAD = """# Metrics

Generated: `python -m asyncrl.core.metrics > docs/metrics.md`. Names and definitions are verl's where verl
has the metric; [from-verl.md](from-verl.md) lists the differences.

Each learner step and each evaluation appends one row to `runs/<name>/metrics.jsonl` and to the TensorBoard
events beside it. A metric without a value in a step (for example the mean reward of no answer) is left out of
the row, where verl writes NaN. `<word>` is a variable part of a name.

*Reduced*: the reduction over microbatches, updates and data-parallel ranks. The set of a mean: *counted
tokens* are all sampled tokens, before masking by lag and rejection; tokens *in bound* have a lag of at most
`max_lag`; *trained tokens* entered the loss; a *row* is a trajectory; an *answered row* has a response token.
*leader*: a single process computes the value.

*Source*: `step` is every learner rank, `leader` rank 0, `supervisor` the supervisor, `evaluation` a pinned
replica, `guard` the stability guard.
"""


def render() -> str:
    """Return the page in Markdown."""
    ordered = sorted(METRICS, key=lambda metric: _family(metric))
    sections = [_section(family, list(found)) for family, found in groupby(ordered, _family)]
    return "\n".join([HEAD, *sections])


def _family(metric: Metric) -> str:
    return metric.name.partition("/")[0]


def _section(family: str, found: list[Metric]) -> str:
    rows = [
        f"| `{one.name}` | {one.unit} | {_cell(one.meaning)} | {_reduction(one)} | {one.source} |"
        for one in found
    ]
    head = ["| name | unit | meaning | reduced | source |", "|---|---|---|---|---|"]
    return "\n".join([f"## {family}/", "", *head, *rows, ""])


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _reduction(metric: Metric) -> str:
    return f"mean over {metric.over}" if metric.reduction == "mean" else metric.reduction
