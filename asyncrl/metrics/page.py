"""The page `docs/metrics.md`, made from the table."""

from __future__ import annotations

from itertools import groupby

from asyncrl.metrics.metric import Metric
from asyncrl.metrics.registry import METRICS

HEAD = """# Metrics

Generated: `python -m asyncrl.metrics > docs/metrics.md`. Names and definitions are verl's where verl has the
metric; [from-verl.md](from-verl.md) lists what differs.

Each learner step adds one row to `runs/<name>/metrics.jsonl` and to the TensorBoard events beside it; each
evaluation adds another. A metric without a value in a step (the mean reward of no answer, say) is left out
of the row, where verl writes NaN. `<word>` stands for a variable part.

*Reduced*: how a step's value comes out of its microbatches, updates and data-parallel ranks. A mean says
what it is taken over: *counted tokens* are the sampled ones before any was masked for its age or rejected,
those *in bound* are within `max_lag`, *trained tokens* entered the loss, a *row* is a trajectory, and an
*answered row* has a response token. *leader*: one process knows the value.

*Source*: `step` is every learner rank, `leader` rank 0, `supervisor` the watching process, `evaluation` a
pinned replica, `guard` the stability guard.
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
