"""Accuracy of the planner: live runs on this machine against the simulator's predictions.

Rates are taken in one window of a run (`max_lag` 4, one replica). From them the planner predicts settings
that were not measured in that run: other bounds, two replicas, and, in a second run, groups of another size
and answers of another skew. The learner is Megatron-core and weight sync real throughout; engines are
scripted (they sleep), and, without `--quick`, vLLM with one replica. Every window is of the live system,
nothing in it is simulated.

Besides, without `--quick`, the planner's own speed: an hour of 1,024 replicas, in processor time.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from asyncrl.core.config.load import load_config
from asyncrl.core.config.tree import Config
from asyncrl.planner.calibration import (
    Measured,
    base_rates,
    measure,
    prompt_tokens_of_rows,
    rates_of_rows,
)
from asyncrl.planner.calibration import Row as LearnerRow
from asyncrl.planner.outcome import Outcome
from asyncrl.planner.rates import Rates
from asyncrl.planner.setting import Setting
from asyncrl.planner.simulation import Simulation
from asyncrl.planner.sweep import predict
from benchmarks.calibration.live import builtin_paths, live_run
from benchmarks.harness.options import Verdict, end_on_sigterm, judge, make_parser, report
from benchmarks.harness.rows import Row
from configs import shipped

MAX_STEP_ERROR, MAX_LAG_ERROR = 0.15, 0.5
TOLD = ("step_s", "lag_mean", "learner_idle", "masked_share")
WINDOW_S, QUICK_WINDOW_S = 25.0, 8.0
STEPS = 150
SETTINGS = (
    "staleness.max_lag=4",
    "rollout.max_sequences=16",
    "rollout.max_tokens=256",
    "learner.steps=1000000",
    "eval.every_steps=0",
    "checkpoint.every_steps=1000000",
    "buffer.journal=none",
)
MAX_FLEET_S = 60.0
FLEET_SETTINGS = (
    "rollout.replicas=1024",
    "rollout.group_size=16",
    "rollout.max_sequences=64",
    "rollout.max_tokens=16384",
    "rollout.response_tokens=lognormal:1.0:3000",
    "learner.groups_per_step=1024",
    "weight_sync.parallelism=1024",
    "eval.every_steps=0",
    f"buffer.memory_bytes={1 << 40}",
)
FLEET_RATES = Rates(
    decode=((1.0, 60.0), (64.0, 2000.0)),
    step_s=5.0,
    step_s_per_token=4e-7,
    publish_s=1.0,
    transfer_s=3.0,
    swap_s=1.0,
)
Cell = tuple[int, int]
"""Replicas, and the bound that is admitted under."""
CALIBRATED: Cell = (1, 4)


@dataclass(frozen=True)
class Case:
    """One run, the cells that it is watched in, and whether its rates are its own.

    Attributes:
        borrows: The case whose rates predict it; empty where its own first cell does.
    """

    name: str
    settings: tuple[str, ...]
    cells: tuple[Cell, ...]
    borrows: str = ""


SCRIPTED = Case(
    "scripted",
    (
        "rollout.engine=scripted",
        "rollout.group_size=4",
        "learner.groups_per_step=8",
        "rollout.response_tokens=lognormal:1.0:40",
    ),
    (CALIBRATED, (1, 1), (1, 0), (2, 4), (2, 1), (2, 0)),
)
OTHER_GROUPS = Case(
    "scripted, groups of 8, sigma 0.5",
    (
        "rollout.engine=scripted",
        "rollout.group_size=8",
        "learner.groups_per_step=4",
        "rollout.response_tokens=lognormal:0.5:60",
    ),
    ((1, 4), (1, 1)),
    borrows="scripted",
)
VLLM = Case(
    "vllm",
    (
        "rollout.group_size=4",
        "learner.groups_per_step=8",
        "rollout.response_tokens=lognormal:1.0:40",
    ),
    (CALIBRATED, (1, 1), (1, 0)),
)
QUICK = (replace(SCRIPTED, cells=(CALIBRATED, (1, 1), (1, 0))),)
FULL = (SCRIPTED, OTHER_GROUPS, VLLM)


def main(arguments: Sequence[str]) -> int:
    """Measure as the command line says and return the exit code."""
    parser = make_parser("asyncrl bench prediction", __doc__, "one scripted run, three cells: a minute")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--only", choices=("live", "fleet"), help="the live runs, or the planner's own speed")
    given = parser.parse_args(arguments)
    end_on_sigterm()  # the live run must not outlive this
    cases, window_s = (QUICK, QUICK_WINDOW_S) if given.quick else (FULL, WINDOW_S)
    results: dict[str, Any] = {"quick": given.quick, "window_s": window_s, "cells": {}}
    if given.only != "fleet":
        results["cells"] = compare_all(cases, window_s)
    if given.only == "fleet" or not (given.quick or given.only):
        results["fleet"] = time_fleet()
    return report(given, results, table, check, make_rows(results))


def time_fleet() -> dict[str, float]:
    """Simulate an hour of a large fleet; return its processor seconds and what was simulated in them."""
    setting = Setting.of(load_config(shipped()["quickstart"], list(FLEET_SETTINGS)))
    began = time.process_time()
    simulation = Simulation(setting, FLEET_RATES, seed=0, steps=1_000_000)
    simulation.run(until_s=3600.0)
    taken_s = time.process_time() - began
    found = simulation.outcome()
    return {
        "processor_s": taken_s,
        "replicas_per_cohort": float(setting.cohort),
        "num_events": float(found.num_events),
        "num_steps": float(len(simulation.watch.records)),
        "sampled_tokens": found.sampled_per_s * 3600.0,
    }


def compare_all(cases: Sequence[Case], window_s: float) -> dict[str, Any]:
    """Run all cases; return by cell what was measured and predicted, and their distance."""
    rates_of: dict[str, Rates] = {}
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="asyncrl-bench-") as folder:
        for number, case in enumerate(cases):
            config = _config(case, Path(folder), number)
            windows = _watch(case, config, window_s)
            if not case.borrows:
                setting = _setting(config, CALIBRATED, windows[CALIBRATED])
                rates_of[case.name] = rates_of_rows(windows[CALIBRATED], setting, base_rates(config))
            rates = rates_of[case.borrows or case.name]
            for cell, rows in windows.items():
                outcome = predict(_setting(config, cell, rows), rates, seed=1, steps=STEPS)
                is_own = cell == CALIBRATED and not case.borrows
                found[f"{case.name}: {cell[0]} replicas, max_lag {cell[1]}"] = _compare(
                    outcome, measure(rows, config.learner.groups_per_step), is_own
                )
    return found


def _config(case: Case, folder: Path, number: int) -> Config:
    where = (f"run.dir={folder}", f"run.name=prediction{number}", "rollout.replicas=1")
    values = [*SETTINGS, *case.settings, *where, *builtin_paths(_say)]
    return load_config(shipped()["quickstart"], values)


def _watch(case: Case, config: Config, window_s: float) -> dict[Cell, list[LearnerRow]]:
    windows = {}
    with live_run(config, _say) as live:
        for replicas, max_lag in case.cells:
            live.change(replicas, max_lag)
            windows[replicas, max_lag] = live.watch(window_s)
            _say(f"{case.name}: {len(windows[replicas, max_lag])} steps at {replicas} replicas, {max_lag=}")
    return windows


def _setting(config: Config, cell: Cell, rows: Sequence[LearnerRow]) -> Setting:
    found = Setting.of(config, prompt_tokens=prompt_tokens_of_rows(rows))
    return replace(found, replicas=cell[0], tightened_to=cell[1])


def _compare(outcome: Outcome, measured: Measured, is_own: bool) -> dict[str, Any]:
    told = {name: getattr(outcome, name) for name in asdict(measured) if hasattr(outcome, name)}
    return {
        "is_calibrated_here": is_own,
        "predicted": told,
        "measured": asdict(measured),
        "step_error": outcome.step_s / measured.step_s - 1,
        "lag_error": outcome.lag_mean - measured.lag_mean,
    }


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def table(results: dict[str, Any]) -> str:
    """Return predicted and measured figures as text, a line per cell."""
    width = max(map(len, results["cells"]), default=0)
    lines = [f"{'':<{width}}  step s: told, seen     lag: told, seen   learner idle    masked"]
    for name, cell in results["cells"].items():
        told, seen = cell["predicted"], cell["measured"]
        mark = "  (rates are from here)" if cell["is_calibrated_here"] else ""
        lines.append(
            f"{name:<{width}}  {told['step_s']:6.3f} {seen['step_s']:6.3f} {cell['step_error']:+5.0%}   "
            f"{told['lag_mean']:5.2f} {seen['lag_mean']:5.2f}   {told['learner_idle']:5.0%} "
            f"{seen['learner_idle']:5.0%}   {told['masked_share']:5.1%} {seen['masked_share']:5.1%}{mark}"
        )
    if "fleet" in results:
        fleet = results["fleet"]
        cost = f"{fleet['processor_s']:.1f} s of one core, {fleet['num_events']:.0f} events"
        cohorts = f"in cohorts of {fleet['replicas_per_cohort']:.0f} that share a member of weight sync"
        lines.append(f"an hour of 1,024 replicas, {cohorts}: {cost}")
    return "\n".join(lines)


def make_rows(results: dict[str, Any]) -> list[Row]:
    """Return a row per cell, and one of the speed of the planner."""
    rows = []
    for name, cell in results["cells"].items():
        case = {"cell": name, "borrowed_rates": int(not cell["is_calibrated_here"])}
        values = {"step_error": cell["step_error"], "lag_error": cell["lag_error"]}
        for figure in TOLD:
            values[f"{figure}_predicted"] = cell["predicted"][figure]
            values[f"{figure}_measured"] = cell["measured"][figure]
        rows.append(Row("prediction", case, values))
    if "fleet" in results:
        rows.append(Row("prediction", {"cell": "an hour of 1,024 replicas"}, dict(results["fleet"])))
    return rows


def check(results: dict[str, Any]) -> Verdict:
    """Return whether every cell that was not calibrated in is within the targets, and the worst ratio."""
    ratios = {}
    for name, cell in results["cells"].items():
        if not cell["is_calibrated_here"]:
            ratios[f"step time, {name}"] = MAX_STEP_ERROR / max(1e-3, abs(cell["step_error"]))
            ratios[f"mean lag, {name}"] = MAX_LAG_ERROR / max(1e-3, abs(cell["lag_error"]))
    if "fleet" in results:
        ratios["an hour of 1,024 replicas"] = MAX_FLEET_S / results["fleet"]["processor_s"]
    return judge(ratios)
