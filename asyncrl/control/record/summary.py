"""Summary of a run: summary.json, the table on the terminal and the picture of its curves."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from asyncrl.control.record.history import STEP, Column, History, read_history
from asyncrl.control.record.live import read_live
from asyncrl.control.record.outcome import Outcome
from asyncrl.control.record.rundir import RunDir, write_json
from asyncrl.control.rows.row_files import iterate_rows
from asyncrl.core.config.tree import Config
from asyncrl.core.metrics.run_names import FIRST_AFTER_START
from asyncrl.core.status.statuses import Statuses

LAST_EVALUATIONS = 3
GUARD, STATES_OF_GUARD = "guard/", ("guard/lr_scale", "guard/is_kl_off")
CURVES = (
    ("reward", "critic/rewards/mean"),
    ("lag of trained tokens", "staleness/lag_mean"),
    ("entropy", "actor/entropy"),
    ("tokens/s", "perf/learner_tokens_per_s"),
)
NAMES = (
    *("time", "timing_s/step", "timing_s/wait", FIRST_AFTER_START),
    *("staleness/trained_tokens", "staleness/masked_tokens", "staleness/lag_max_trained"),
    *("perf/total_num_tokens", "perf/rollout_tokens", "perf/rollout_tokens_s"),
    *("perf/rollout_tokens_per_s", "perf/rollout_idle_share"),
    *(name for _, name in CURVES),
)
"""Of the metrics: what a summary and its picture read."""


def write_summary(run_dir: RunDir, config: Config, statuses: Statuses, outcome: Outcome) -> None:
    """Write `summary.json` and `curves.png` from the rows on disk and the last statuses."""
    history = read_history(iterate_rows(run_dir.metrics), NAMES)
    live = read_live(run_dir.live)
    began = live.began if live is not None else None
    write_json(run_dir.summary, summarise(history, config, statuses, began) | {"state": outcome.state})
    if len(history):
        draw_curves(history, run_dir.curves, config.staleness.max_lag, config.run.name)


def summarise(
    history: History, config: Config, statuses: Statuses, began: float | None = None
) -> dict[str, object]:
    """Return the figures of a run; None where it gives none.

    `began` is the wall-clock time of this start's `up`. `first_step_s` runs from there, once everything is
    prepared, to the record of this start's first step (at most a pulse late); `train_s`, the learner's rate
    and the shares cover the other steps, without the first of each start; `rollout_tokens_per_s` covers all
    time from the first token on.
    """
    buffer = statuses.buffer
    accuracies = [found for _, found in history.held_out]
    last = accuracies[-LAST_EVALUATIONS:]
    is_first = history[FIRST_AFTER_START] > 0
    later = history.where(~is_first)
    first_times = history["time"][is_first & (history["time"] >= (began or 0.0))]
    start_s = float(first_times.max()) - began if first_times.size and began is not None else None
    trained_tokens = _sum(history["staleness/trained_tokens"])
    masked_tokens = _sum(history["staleness/masked_tokens"])
    train_s = _sum(later["timing_s/step"])
    return {
        "run": config.run.name,
        "accuracy_start": accuracies[0] if accuracies else None,
        "accuracy_end": sum(last) / len(last) if last else None,
        "steps": int(history[STEP].max(initial=0)),
        "first_step_s": start_s,
        "train_s": train_s,
        "steps_per_s": _steady_rate(history["timing_s/step"]),
        "lag_mean": _weighted(history, "staleness/lag_mean", "staleness/trained_tokens"),
        "lag_max_trained": _largest(history["staleness/lag_max_trained"]),
        "max_lag": config.staleness.max_lag,
        "masked_share": masked_tokens / max(1, masked_tokens + trained_tokens),
        "ledger_residue": buffer.residue if buffer is not None else None,
        "ledger": {
            "issued": buffer.issued if buffer is not None else None,
            "trained": buffer.trained if buffer is not None else None,
            "dropped": buffer.dropped if buffer is not None else None,
        },
        "learner_tokens_per_s": _ratio(_sum(later["perf/total_num_tokens"]), train_s),
        "learner_idle_share": _ratio(_sum(later["timing_s/wait"]), train_s),
        "rollout_tokens_per_s": _ratio(
            _sum(history["perf/rollout_tokens"]), _sum(history["perf/rollout_tokens_s"])
        ),
        "rollout_idle_share": _weighted(later, "perf/rollout_idle_share", "timing_s/step"),
        "guard": _guard_counters(history.last),
    }


def _guard_counters(last: Mapping[str, float]) -> dict[str, float]:
    """Return the last row's counters of the guard, without `guard/`; all are 0 in a healthy run."""
    names = [name for name in last if name.startswith(GUARD) and name not in STATES_OF_GUARD]
    return {name.removeprefix(GUARD): last[name] for name in names}


def _sum(values: Column) -> float:
    """Return the sum of the present values: a row from the learner's own log lacks the fleet's."""
    return float(np.nansum(values))


def _largest(values: Column) -> int | None:
    there = values[~np.isnan(values)]
    return int(there.max()) if there.size else None


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _weighted(history: History, name: str, weight: str) -> float | None:
    values, weights = history[name], history[weight]
    is_there = ~(np.isnan(values) | np.isnan(weights))
    return _ratio(float(values[is_there] @ weights[is_there]), float(weights[is_there].sum()))


def _steady_rate(times: Column) -> float | None:
    """Steps per second, the median over the second half of the run."""
    late = np.sort(times[len(times) // 2 :])
    return 1.0 / float(late[len(late) // 2]) if late.size else None


SMOOTHING = 0.9


def smooth(values: list[float]) -> list[float]:
    """Return a running mean that weighs each value less by `SMOOTHING` than the one after it.

    >>> smooth([1.0, 1.0, 1.0])
    [1.0, 1.0, 1.0]
    """
    means, total, weight = [], 0.0, 0.0
    for value in values:
        total, weight = SMOOTHING * total + value, SMOOTHING * weight + 1.0
        means.append(total / weight)
    return means


def draw_curves(history: History, path: Path, max_lag: int, name_of_run: str) -> None:
    """Draw reward, lag, entropy and throughput over steps: as measured, faint, and smoothed over it."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 6), layout="constrained")
    figure.suptitle(f"{name_of_run}: {len(history)} steps")
    steps = history[STEP]
    for axes, (title, name) in zip(figure.subplots(2, 2).flat, CURVES, strict=True):
        is_there = ~np.isnan(history[name])
        numbers, values = steps[is_there], history[name][is_there]
        (raw,) = axes.plot(numbers, values, linewidth=0.6, alpha=0.3)
        axes.plot(numbers, smooth(values.tolist()), linewidth=1.2, color=raw.get_color(), label=name)
        axes.set(title=title, xlabel="step")
        axes.grid(alpha=0.3)
        if name == "critic/rewards/mean" and history.held_out:
            axes.plot(*zip(*history.held_out, strict=True), marker="o", markersize=3, label="held out")
        if name == "staleness/lag_mean":
            axes.plot(steps, history["staleness/lag_max_trained"], linewidth=0.8, label="largest trained")
            axes.axhline(max_lag, color="red", linestyle="--", linewidth=0.8, label="max_lag")
        if name == "perf/learner_tokens_per_s":
            other = "perf/rollout_tokens_per_s"
            axes.plot(steps, np.nan_to_num(history[other]), linewidth=0.8, label=other)
        axes.legend(loc="best", fontsize=7)
    figure.savefig(path, dpi=110)
