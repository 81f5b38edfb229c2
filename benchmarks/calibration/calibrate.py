"""Rates for `asyncrl plan --simulate`, measured on this machine or taken from a run's recorded rows.

    asyncrl bench calibrate quickstart --out rates.json
    asyncrl bench calibrate --from-run quickstart --out rates.json

Without `--from-run` a run of the configuration trains for a while, without journal and evaluation, in a
temporary folder: its rows tell the learner's seconds per step and token (and, with `learner.stream`, per
part of a batch), publish, transfer, swap, a checkpoint every 5 steps, and how fast its engines decode while
the learner works beside them. How that changes with the number of running requests
is measured on vLLM alone. The buffer's round trip is measured on a real service in this process.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any

from asyncrl.buffer.client import LearnerClient
from asyncrl.buffer.composition import build
from asyncrl.cli.up import find_config
from asyncrl.control.record.rundir import RunDir
from asyncrl.control.rows.recorder import training_rows
from asyncrl.control.rows.row_files import load_rows
from asyncrl.core.config.load import find_run_folder, load_config
from asyncrl.core.config.tree import Config
from asyncrl.core.runtime.threads import ThreadEvent
from asyncrl.core.service import ServiceContext
from asyncrl.planner.calibration import base_rates, rates_of_run, steady_rows, taken_with
from asyncrl.planner.rates import Rates
from asyncrl.planner.setting import Setting
from benchmarks.calibration.engine_curve import measure_curve
from benchmarks.calibration.live import live_run
from benchmarks.harness.options import end_on_sigterm, make_parser
from benchmarks.harness.rows import Row as BenchRow
from benchmarks.harness.rows import RowFile

QUICK_S, FULL_S = 15.0, 60.0
NUM_CALLS = 300
CALL_S = 10.0
CHECKPOINT_STEPS = 5
"""Between two: the fewest steps that are watched hold one."""
UNTIL_STOPPED = (
    "learner.steps=1000000",
    "eval.every_steps=0",
    f"checkpoint.every_steps={CHECKPOINT_STEPS}",
    "checkpoint.keep=1",
)


def main(arguments: Sequence[str]) -> int:
    """Measure as the command line says, print the rates, and write them."""
    parser = make_parser("asyncrl bench calibrate", __doc__, f"{QUICK_S:g} s of training, no decode curve")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("config", nargs="?", default="quickstart", help="a YAML file or a shipped name")
    parser.add_argument("--set", action="append", default=[], dest="overrides", metavar="KEY=VALUE")
    parser.add_argument("--from-run", metavar="RUN", help="take the rates from its rows, measure nothing")
    parser.add_argument("--dir", default="runs", dest="runs_dir", help="the folder that holds the runs")
    parser.add_argument("--out", type=Path, metavar="FILE", help="for `asyncrl plan --simulate --rates FILE`")
    given = parser.parse_args(arguments)
    if given.check:
        parser.error("calibrate has no targets to check; `asyncrl bench prediction --check` judges rates")
    end_on_sigterm()  # the live run must not outlive this
    if given.from_run:
        found = of_run(RunDir(find_run_folder(given.from_run, given.runs_dir)), given.overrides)
    else:
        path = find_config(given.config)
        found = of_machine(path, given.overrides, given.quick, lambda line: print(line, file=sys.stderr))
    print(table(found))
    if given.out is not None:
        given.out.write_text(json.dumps(found, indent=2) + "\n")
    if given.json is not None:
        RowFile.taken_here("calibrate", [_as_row(found)], found).write(given.json)
    return 0


def of_run(folder: RunDir, overrides: Sequence[str]) -> dict[str, Any]:
    """Return the rates that the rows of a run tell, living or ended."""
    config = load_config(folder.resolved, list(overrides))
    rows = steady_rows(training_rows(load_rows(folder.metrics)))
    return _values(*rates_of_run(config, rows), config)


def of_machine(
    path: str | Path, overrides: Sequence[str], is_quick: bool, say: Callable[[str], None]
) -> dict[str, Any]:
    """Let a run of the configuration train for a while and return its rates."""
    with tempfile.TemporaryDirectory(prefix="asyncrl-bench-") as folder:
        values = [
            *overrides,
            f"run.dir={folder}",
            "run.name=calibrate",
            "buffer.journal=none",
            *UNTIL_STOPPED,
        ]
        config = load_config(path, values)
        with live_run(config, say) as live:
            rows = live.watch(QUICK_S if is_quick else FULL_S)
            config = load_config(live.handle.folder.resolved, [])
        base = base_rates(config)
        if config.rollout.engine == "vllm" and not is_quick:
            say("vLLM alone, by running requests")
            decode, prefill_s = measure_curve(config)
            base = replace(base, decode=decode, prefill_s_per_token=prefill_s)
        op_s, rpc_s = measure_buffer(config, Path(folder))
        base = replace(base, buffer_op_s=op_s, rpc_s=rpc_s)
        return _values(*rates_of_run(config, rows, base), config)


def measure_buffer(config: Config, folder: Path) -> tuple[float, float]:
    """Return seconds of the buffer's thread per request, and of a message, by round trips to a real service.

    A round trip is the service's work, and a message there and back: a third each.
    """
    context = ServiceContext(config, "buffer.0", folder / "buffer", "calibrate")
    context.run_dir.mkdir(parents=True)
    service, stop = build(context), ThreadEvent()
    thread = threading.Thread(target=service.run, args=(stop,), daemon=True)
    thread.start()
    try:
        with contextlib.closing(LearnerClient(service.status().address, deadline_s=CALL_S)) as client:
            round_trip_s = median(_seconds_of(client.status) for _ in range(NUM_CALLS))
    finally:
        stop.set()
        thread.join(CALL_S)
    return round_trip_s / 3, round_trip_s / 3


def _seconds_of(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def _values(rates: Rates, setting: Setting, config: Config) -> dict[str, Any]:
    return {
        "rates": rates.as_values(),
        "lengths": asdict(setting.lengths),
        "prompt_tokens": setting.prompt_tokens,
        "zero_variance_share": setting.zero_variance_share,
        "taken_with": taken_with(config),
        "config": {"replicas": setting.replicas, "engine": ", ".join(config.rollout.engines)},
    }


def _as_row(found: dict[str, Any]) -> BenchRow:
    rates = found["rates"]
    figures = {name: value for name, value in rates.items() if isinstance(value, float)}
    figures |= {f"tokens_per_s_at_{n:g}": rate for n, rate in rates["decode"]}
    return BenchRow.of("calibrate", found["config"], figures)


def table(found: dict[str, Any]) -> str:
    """Return the rates as text."""
    rates = found["rates"]
    lines = [f"{name:<22}{value:.4g}" for name, value in rates.items() if isinstance(value, float)]
    lines += [f"{f'decode at {n:g}':<22}{rate:.4g} tokens/s" for n, rate in rates["decode"]]
    lengths = found["lengths"]
    lines.append(f"{'answers':<22}median {lengths['median_tokens']:.4g} tokens, sigma {lengths['sigma']:.2f}")
    return "\n".join([*lines, f"from {rates['source']}"])
