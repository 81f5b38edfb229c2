"""What asynchrony buys: the same work at `max_lag` 0 and 4, in one run, with its real parts.

One run of the real system (vLLM, Megatron-core, weight sync, Ray) goes back and forth between the two
bounds while everything else stays: same processes, same model, same batch, response lengths from one
log-normal distribution. The bound is changed through the run's control API; the steps right after a
change are left out. `--quick` makes one turn of each, otherwise several.
"""

from __future__ import annotations

import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncrl.config.load import load_config
from asyncrl.control.api.client import RunClient, connect
from asyncrl.control.launch import run
from asyncrl.control.record.recorder import load_rows, training_rows
from asyncrl.errors import ServiceFailed
from configs import shipped

SIGMA, MEDIAN_TOKENS, MAX_TOKENS = 1.0, 12, 96
BOUNDS = (0, 4)
SETTLING_STEPS = 3
START_DEADLINE_S = 200.0
TARGET_SPEED_UP = 1.1

SETTINGS = (
    "rollout.replicas=1",
    f"rollout.max_tokens={MAX_TOKENS}",
    "rollout.group_size=4",
    f"rollout.response_tokens=lognormal:{SIGMA}:{MEDIAN_TOKENS}",
    "learner.steps=1000000",
    "learner.groups_per_step=8",
    "eval.every_steps=0",
    "checkpoint.every_steps=1000000",
    "buffer.journal=none",
)


@dataclass(frozen=True)
class Turn:
    """Rows of the steps that one turn under one bound took, `wall_s` long."""

    max_lag: int
    rows: list[dict[str, Any]]


def measure(*, quick: bool, say: Callable[[str], None]) -> dict[str, Any]:
    """Run the turns and return all figures.

    Raises:
        ServiceFailed: The run did not start or ended early.
    """
    num_turns, turn_s = (1, 8.0) if quick else (4, 30.0)
    with tempfile.TemporaryDirectory(prefix="asyncrl-bench-") as folder:
        # The built-in model is kept between benchmarks: its warm start takes a minute.
        values = ["run.name=pipeline", f"run.dir={folder}", *SETTINGS, *_paths()]
        began = time.perf_counter()
        handle = run.start(load_config(shipped()["quickstart"], values), say)
        try:
            client = _await_training(handle)
            start_s = time.perf_counter() - began
            say(f"the run trains after {start_s:.0f} s; {num_turns} turns of {turn_s:g} s per bound")
            turns = [_take_turn(handle, client, bound, turn_s) for _ in range(num_turns) for bound in BOUNDS]
        finally:
            handle.stop(30.0)
    return _report(turns, start_s, quick)


def _paths() -> list[str]:
    from asyncrl.control.prepare import make_builtin

    made = make_builtin("builtin:digit_sort", Path("runs").absolute() / "builtin", print)
    return [
        f"model.path={made}",
        f"data.train={made / 'train.parquet'}",
        f"data.eval={made / 'eval.parquet'}",
    ]


def _await_training(handle: run.RunHandle) -> RunClient:
    end = time.monotonic() + START_DEADLINE_S
    while time.monotonic() < end and not handle.is_over:
        client = connect(handle.folder)
        if client is not None and client.status()["step"] >= SETTLING_STEPS:
            return client
        time.sleep(0.2)
    raise ServiceFailed(f"the benchmark's run did not train: {handle.result()}")


def _take_turn(handle: run.RunHandle, client: RunClient, max_lag: int, turn_s: float) -> Turn:
    client.tighten(max_lag)
    first = int(client.status()["step"]) + SETTLING_STEPS + max(BOUNDS)
    time.sleep(turn_s)
    last = int(client.status()["step"])
    if last - first < 2:
        raise ServiceFailed(f"only {last - first} steps in a turn of {turn_s:g} s")
    rows = training_rows(load_rows(handle.folder.metrics))
    return Turn(max_lag, [row for row in rows if first < row["training/global_step"] <= last])


def _report(turns: list[Turn], start_s: float, quick: bool) -> dict[str, Any]:
    by_bound = {bound: [turn for turn in turns if turn.max_lag == bound] for bound in BOUNDS}
    figures = {
        str(bound): _figures([row for turn in found for row in turn.rows])
        for bound, found in by_bound.items()
    }
    pairs = zip(by_bound[BOUNDS[0]], by_bound[BOUNDS[1]], strict=True)
    ratios = [_mean_step_s(slow) / _mean_step_s(fast) for slow, fast in pairs]
    return {
        "benchmark": "pipeline",
        "quick": quick,
        "machine": {"processor": platform.machine(), "python": platform.python_version()},
        "skew": f"log-normal response lengths: sigma {SIGMA}, median {MEDIAN_TOKENS}, at most {MAX_TOKENS}",
        "start_s": start_s,
        "by_max_lag": figures,
        "speed_up": statistics.median(ratios),
        "speed_up_of_each_pair": ratios,
        "step_s_of_each_turn": [[turn.max_lag, _mean_step_s(turn)] for turn in turns],
    }


def _mean_step_s(turn: Turn) -> float:
    return statistics.mean(row["timing_s/step"] for row in turn.rows)


def _figures(rows: list[dict[str, Any]]) -> dict[str, float]:
    wall_s = sum(row["timing_s/step"] for row in rows)
    mean = {
        "step_s": "timing_s/step",
        "rollout_idle_share": "perf/rollout_idle_share",
        "rollout_tokens_per_s": "perf/rollout_tokens_per_s",
        "lag_mean": "staleness/lag_mean",
        "masked_share": "staleness/masked_share",
        "response_tokens_mean": "response_length/mean",
        "response_tokens_max": "response_length/max",
    }
    return {
        "num_steps": float(len(rows)),
        **{name: statistics.mean(row[key] for row in rows) for name, key in mean.items()},
        "step_s_median": statistics.median(row["timing_s/step"] for row in rows),
        "learner_idle_share": sum(row["timing_s/wait"] for row in rows) / wall_s,
        "learner_tokens_per_s": sum(row["perf/total_num_tokens"] for row in rows) / wall_s,
    }


def table(results: dict[str, Any]) -> str:
    """Return the figures as text, a column per bound, and the speed-up last."""
    bounds = list(results["by_max_lag"])
    names = list(results["by_max_lag"][bounds[0]])
    width = max(map(len, names))
    lines = [f"{'max_lag':<{width}}" + "".join(f"{bound:>12}" for bound in bounds)]
    for name in names:
        values = (results["by_max_lag"][bound][name] for bound in bounds)
        lines.append(f"{name:<{width}}" + "".join(f"{value:>12.4g}" for value in values))
    lines.append(f"{results['skew']}; from start to training {results['start_s']:.0f} s")
    lines.append(f"speed-up of max_lag {bounds[-1]} over {bounds[0]}: {results['speed_up']:.2f}")
    return "\n".join(lines)


def check(results: dict[str, Any]) -> tuple[bool, str]:
    """Return whether every target is met, and the worst ratio to a target as a sentence."""
    worst = results["speed_up"] / TARGET_SPEED_UP
    return worst >= 1, f"worst ratio to a target: {worst:.2f} (speed-up, target {TARGET_SPEED_UP})"


def draw(results: dict[str, Any], path: Path) -> None:
    """Draw step time and idle shares of both bounds."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.2), layout="constrained")
    names = ("step_s", "learner_idle_share", "rollout_idle_share")
    bounds = list(results["by_max_lag"])
    for axes, name in zip(figure.subplots(1, 3), names, strict=True):
        axes.bar([f"max_lag {bound}" for bound in bounds], [results["by_max_lag"][b][name] for b in bounds])
        axes.set_title(name)
    figure.suptitle(f"speed-up {results['speed_up']:.2f}; {results['skew']}")
    figure.savefig(path, dpi=110)


def write(results: dict[str, Any], path: Path) -> None:
    """Write the figures as JSON, and the picture beside it."""
    path.write_text(json.dumps(results, indent=2) + "\n")
    draw(results, path.with_suffix(".png"))
