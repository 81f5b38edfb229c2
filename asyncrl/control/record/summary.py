"""What a run came to: summary.json, the table on the terminal and the picture of its curves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from asyncrl.config.tree import Config
from asyncrl.control.record.metering import accuracy
from asyncrl.control.record.recorder import evaluation_rows, training_rows
from asyncrl.control.record.row_files import Row, load_rows
from asyncrl.control.record.rundir import RunDir, read_json, write_json
from asyncrl.metrics.run_names import FIRST_OF_LIFE

LAST_EVALUATIONS = 3
GUARD, STATES_OF_GUARD = "guard/", ("guard/lr_scale", "guard/is_kl_off")


def write_summary(
    run_dir: RunDir, config: Config, statuses: dict[str, dict[str, Any]], outcome: dict[str, Any]
) -> None:
    """Write `summary.json` and `curves.png` from the rows on disk and the last statuses."""
    rows = load_rows(run_dir.metrics)
    began = (read_json(run_dir.live) or {}).get("began")
    write_json(run_dir.summary, summarise(rows, config, statuses, began) | {"state": outcome["state"]})
    if training_rows(rows):
        draw_curves(rows, run_dir.curves, config.staleness.max_lag, config.run.name)


def summarise(
    rows: list[Row], config: Config, statuses: dict[str, dict[str, Any]], began: float | None = None
) -> dict[str, Any]:
    """Return the figures of a run; None where it gives none.

    `began` is the wall-clock time of this life's `up`. `first_step_s` runs from there, once everything is
    prepared, to the record of this life's first step (at most a pulse late); `train_s`, the learner's rate
    and the shares cover the other steps, without the first of each life; `rollout_tokens_per_s` covers all
    time from the first token on.
    """
    steps = training_rows(rows)
    accuracies = [found for row in evaluation_rows(rows) if (found := accuracy(row)) is not None]
    last = accuracies[-LAST_EVALUATIONS:]
    first_times = [row["time"] for row in steps if row.get(FIRST_OF_LIFE) and row["time"] >= (began or 0.0)]
    start_s = max(first_times) - began if first_times and began is not None else None
    steps_after_start = [row for row in steps if not row.get(FIRST_OF_LIFE)]
    trained_tokens = sum(row["staleness/trained_tokens"] for row in steps)
    masked_tokens = sum(row["staleness/masked_tokens"] for row in steps)
    train_s = sum(row["timing_s/step"] for row in steps_after_start)
    num_learner_tokens = sum(row["perf/total_num_tokens"] for row in steps_after_start)
    waited_s = sum(row["timing_s/wait"] for row in steps_after_start)
    return {
        "run": config.run.name,
        "accuracy_start": accuracies[0] if accuracies else None,
        "accuracy_end": sum(last) / len(last) if last else None,
        "steps": max((row["training/global_step"] for row in steps), default=0),
        "first_step_s": start_s,
        "train_s": train_s,
        "steps_per_s": _steady_rate(steps),
        "lag_mean": _weighted(steps, "staleness/lag_mean", "staleness/trained_tokens"),
        "lag_max_trained": max((row["staleness/lag_max_trained"] for row in steps), default=None),
        "max_lag": config.staleness.max_lag,
        "masked_share": masked_tokens / max(1, masked_tokens + trained_tokens),
        "ledger_residue": statuses.get("buffer.0", {}).get("residue"),
        "ledger": {key: statuses.get("buffer.0", {}).get(key) for key in ("issued", "trained", "dropped")},
        "learner_tokens_per_s": _ratio(num_learner_tokens, train_s),
        "learner_idle_share": _ratio(waited_s, train_s),
        "rollout_tokens_per_s": _ratio(
            sum(row.get("perf/rollout_tokens", 0.0) for row in steps),
            sum(row.get("perf/rollout_tokens_s", 0.0) for row in steps),
        ),
        "rollout_idle_share": _weighted(steps_after_start, "perf/rollout_idle_share", "timing_s/step"),
        "guard": _guard_counters(steps),
    }


def _guard_counters(rows: list[Row]) -> dict[str, float]:
    """Return the last row's counters of the guard, without `guard/`; all are 0 in a healthy run."""
    last = rows[-1] if rows else {}
    names = [name for name in last if name.startswith(GUARD) and name not in STATES_OF_GUARD]
    return {name.removeprefix(GUARD): last[name] for name in names}


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _weighted(rows: list[Row], name: str, weight: str) -> float | None:
    rows = [row for row in rows if name in row]  # one from the learner's own log lacks what the fleet did
    total = sum(row[weight] for row in rows)
    return sum(row[name] * row[weight] for row in rows) / total if total else None


def _steady_rate(rows: list[Row]) -> float | None:
    """Steps per second, the median over the second half of the run."""
    times = sorted(row["timing_s/step"] for row in rows[len(rows) // 2 :])
    return 1.0 / times[len(times) // 2] if times else None


SMOOTHING = 0.9
CURVES = (
    ("reward", "critic/rewards/mean"),
    ("lag of trained tokens", "staleness/lag_mean"),
    ("entropy", "actor/entropy"),
    ("tokens/s", "perf/learner_tokens_per_s"),
)


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


def draw_curves(rows: list[Row], path: Path, max_lag: int, name_of_run: str) -> None:
    """Draw reward, lag, entropy and throughput over steps: as measured, faint, and smoothed over it."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 6), layout="constrained")
    steps = training_rows(rows)
    figure.suptitle(f"{name_of_run}: {len(steps)} steps")
    for axes, (title, name) in zip(figure.subplots(2, 2).flat, CURVES, strict=True):
        points = [(row["training/global_step"], row[name]) for row in steps if name in row]
        numbers, values = [step for step, _ in points], [value for _, value in points]
        (raw,) = axes.plot(numbers, values, linewidth=0.6, alpha=0.3)
        axes.plot(numbers, smooth(values), linewidth=1.2, color=raw.get_color(), label=name)
        axes.set(title=title, xlabel="step")
        axes.grid(alpha=0.3)
        if name == "critic/rewards/mean":
            held_out = [(row["training/global_step"], accuracy(row)) for row in evaluation_rows(rows)]
            if held_out:
                axes.plot(*zip(*held_out, strict=True), marker="o", markersize=3, label="held out")
        if name == "staleness/lag_mean":
            worst = [(row["training/global_step"], row["staleness/lag_max_trained"]) for row in steps]
            axes.plot(*zip(*worst, strict=True), linewidth=0.8, label="largest trained")
            axes.axhline(max_lag, color="red", linestyle="--", linewidth=0.8, label="max_lag")
        if name == "perf/learner_tokens_per_s":
            other = "perf/rollout_tokens_per_s"
            rollout = [(row["training/global_step"], row.get(other, 0.0)) for row in steps]
            axes.plot(*zip(*rollout, strict=True), linewidth=0.8, label=other)
        axes.legend(fontsize=7)
    figure.savefig(path, dpi=110)
