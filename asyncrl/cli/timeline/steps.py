"""The learner's steps and their stages, from rows of metrics (pure).

A row says how long each stage took and not when: stages are laid one after another, in the order in which
they first began; one that ran several times in a step is one span. They fill the step exactly.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

from asyncrl.cli.timeline.spans import Moment, Span, Window
from asyncrl.core.errors import ConfigError
from asyncrl.core.metrics.metric import Row

LEARNER = "learner.0"
STEPS, STAGES = "steps", "stages"
_TIMING, _STEP, _FIRST_OF_BATCH = "timing_s/", "step", "fetch"
_BEFORE = ("wait_buffer",)
_UNTIL_BATCH = ("wait_publisher", "wait_checkpoint", "wait_paused", "wait")
_LAST = ("other",)
_GUARD, _NO_FINDINGS = "guard/", ("guard/lr_scale", "guard/is_kl_off")


def choose_steps(rows: Sequence[Row], first: int | None, last: int | None, newest: int) -> list[Row]:
    """Return the rows of steps `first` to `last`; without both, of the `newest` ones.

    Raises:
        ConfigError: There are none.
    """
    steps = [row for row in rows if _TIMING + _STEP in row]
    if first is None and last is None:
        chosen = steps[-newest:]
    else:
        chosen = [
            row for row in steps if (first or 0) <= row["training/global_step"] <= (last or float("inf"))
        ]
    if not chosen:
        has = f"it has steps {_number(steps[0])} to {_number(steps[-1])}" if steps else "it has taken no step"
        raise ConfigError(f"there is no such step in the run: {has}")
    return chosen


def spans_of_steps(rows: Sequence[Row]) -> list[Span]:
    """Return a span for each step, and one for each of its stages.

    A row's `time` is when the step ended; where two steps would overlap by it, the earlier one moves back.
    """
    spans: list[Span] = []
    next_start_s = float("inf")
    for row in reversed(rows):
        end_s = min(row["time"], next_start_s)
        start_s = next_start_s = end_s - row[_TIMING + _STEP]
        about = {"tokens": row.get("perf/total_num_tokens"), "lag_max": row.get("staleness/lag_max_trained")}
        stages = _lay(row, start_s, end_s)
        spans = [Span(LEARNER, STEPS, f"step {_number(row)}", start_s, end_s, about), *stages, *spans]
    return spans


def findings_in(rows: Sequence[Row]) -> list[Moment]:
    """Return what the guard found, by the steps at which its counters rose."""
    moments = []
    for before, row in pairwise(rows):
        for name, count in row.items():
            if name.startswith(_GUARD) and name not in _NO_FINDINGS and count > before.get(name, 0):
                found = name.removeprefix(_GUARD)
                moments.append(Moment(LEARNER, f"guard: {found}", row["time"], {"step": _number(row)}))
    return moments


def window_of(spans: Iterable[Span]) -> Window:
    """Return the time from the first to the last of the steps."""
    known = list(spans)
    return Window(min(span.start_s for span in known), max(span.end_s for span in known))


def _lay(row: Row, start_s: float, end_s: float) -> list[Span]:
    times = {name.removeprefix(_TIMING): seconds for name, seconds in row.items() if name.startswith(_TIMING)}
    spans = []
    for stage in order_stages(list(times)):
        if times[stage] > 0:
            until_s = min(end_s, start_s + times[stage])
            spans.append(Span(LEARNER, STAGES, stage, start_s, until_s, {"step": _number(row)}))
            start_s = until_s
    return spans


def order_stages(names: Sequence[str]) -> list[str]:
    """Return the stages of a row in the order in which they ran.

    >>> order_stages(["update_weights", "fetch", "update_actor", "wait", "wait_buffer", "other", "step"])
    ['wait_buffer', 'update_weights', 'wait', 'fetch', 'update_actor', 'other']
    """
    waits = (*_BEFORE, *_UNTIL_BATCH, *_LAST, _STEP)
    worked = [name for name in names if name not in waits]
    batch = worked.index(_FIRST_OF_BATCH) if _FIRST_OF_BATCH in worked else 0
    ordered = [*_BEFORE, *worked[:batch], *_UNTIL_BATCH, *worked[batch:], *_LAST]
    return [name for name in ordered if name in names]


def _number(row: Row) -> int:
    return int(row["training/global_step"])
