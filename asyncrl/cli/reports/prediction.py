"""`asyncrl plan --simulate` and `--compare`: what a run would do, what else to choose, how right that was."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from asyncrl.cli import exits
from asyncrl.cli.reports.table import align
from asyncrl.cli.up import find_config, placed
from asyncrl.control.record.rundir import RunDir
from asyncrl.control.rows.recorder import training_rows
from asyncrl.control.rows.row_files import load_rows
from asyncrl.core.config.load import Loaded, find_run_folder, load, load_config
from asyncrl.core.config.tree import Config
from asyncrl.core.errors import ConfigError, DataError
from asyncrl.planner import calibration
from asyncrl.planner.calibration import Measured
from asyncrl.planner.caveats import find_caveats
from asyncrl.planner.hardware import GPUS, assume_rates
from asyncrl.planner.outcome import Outcome
from asyncrl.planner.plan import check_elsewhere
from asyncrl.planner.plan.checks import check_memory, count_all, read_size
from asyncrl.planner.plan.footprint.capacity import Capacity
from asyncrl.planner.plan.footprint.room import Room, find_room
from asyncrl.planner.rates import Rates
from asyncrl.planner.setting import LengthsModel, Setting
from asyncrl.planner.simulation import MAX_PERIOD
from asyncrl.planner.sweep import Choice, find_present, recommend, settle, sweep

STEPS = 60
MAX_SWEPT_REPLICAS = 64
LARGE_STEPS = 20
DEFAULT_GPU = "H100"
MEASURE = "asyncrl bench calibrate CONFIG --out rates.json"
MAX_SIGMA, LEAST_MEDIAN = 10.0, 0.01
MAX_ZERO_VARIANCE = 0.99
"""Of the groups: if more are dropped for equal rewards, a step takes hundreds of batches."""
NO_SWEEP = f"(no sweep beyond {MAX_SWEPT_REPLICAS} replicas: give other values with --set)"


@dataclass(frozen=True)
class Asked:
    """Arguments of the command line.

    Attributes:
        rates: A file of `asyncrl bench calibrate`, or the name of a GPU of the table.
        is_elsewhere: Whether the configuration is checked as one for another machine.
    """

    configs: Sequence[str]
    overrides: Sequence[str]
    rates: str | None
    runs_dir: str
    as_json: bool
    is_elsewhere: bool = False

    @property
    def gpu_bytes(self) -> int | None:
        """Memory of the GPU that is assumed, None where rates were measured."""
        gpu = GPUS.get(self.rates or DEFAULT_GPU)
        return None if gpu is None else gpu.num_bytes


def print_prediction(asked: Asked) -> None:
    """Simulate a configuration and the choices around it, and print what they would do.

    Raises:
        ConfigError: The configuration or the rates cannot be used.
    """
    loaded = load([find_config(name) for name in asked.configs], asked.overrides)
    config, rooms = loaded.config, check_rooms(loaded, asked.gpu_bytes) if asked.is_elsewhere else []
    rates, setting = read_rates(asked.rates, config, _tell_command(asked))
    is_large = setting.replicas > MAX_SWEPT_REPLICAS
    seed, units, choices = config.run.seed, count_learner_units(config), list[Choice]()
    if not is_large:
        choices = sweep(setting, rates, learner_units=units, seed=seed, steps=STEPS)
    base = find_present(choices, setting) if choices else settle(setting, rates, seed, LARGE_STEPS)
    words = recommend(base, choices, setting)
    caveats = list(find_caveats(config, setting, rates, MAX_PERIOD))
    if asked.as_json:
        more = {"not_modelled": caveats, "memory": [asdict(room) for room in rooms]}
        print(json.dumps(_values(base, choices, words, rates) | more, indent=2))
        return
    exits.show(*_lines(base, choices, words, rates, setting, rooms), *_tell_caveats(caveats))


def check_rooms(loaded: Loaded, gpu_bytes: int | None) -> list[Room]:
    """Return what is taken of GPUs of so much memory; nothing where that or the model's size is not known.

    Raises:
        ConfigError: The configuration is wrong on any machine, or takes more of such a GPU than it has.
    """
    config = loaded.config
    try:
        check_elsewhere(config)
        if problems := list(check_memory(config, Capacity(gpu=gpu_bytes))):
            raise ConfigError("\n".join(problems))
    except ConfigError as error:
        raise placed(error, loaded) from error
    size = read_size(config)
    if size is None or gpu_bytes is None:
        return []
    return list(find_room(config, count_all(config, 1, 1), size, gpu_bytes))


def count_learner_units(config: Config) -> float | None:
    """Return what the learner takes in replicas' worth of GPUs, None where one has no whole one to give."""
    if config.learner.gpus < 1 or config.rollout.gpus < 1:
        return None
    return config.learner.num_ranks * config.learner.gpus / config.rollout.gpus


def print_comparison(asked: Asked, run: str) -> None:
    """Predict the second half of a run with the rates of its first half, or with given ones; print both."""
    folder = RunDir(find_run_folder(run, asked.runs_dir))
    config = load_config(folder.resolved, list(asked.overrides))
    rows = calibration.steady_rows(training_rows(load_rows(folder.metrics)))
    half = len(rows) // 2 if asked.rates is None else 0
    later = rows[half:]
    if asked.rates is None:
        if half < calibration.MIN_ROWS:
            raise ConfigError(
                f"{len(rows)} steady steps are too few: no step may be predicted with its own rates",
                hint=f"Let the run train {2 * calibration.MIN_ROWS} or more, or give --rates",
            )
        rates, setting = calibration.rates_of_run(config, rows[:half])
    else:
        rates, setting = read_rates(asked.rates, config)
        setting = calibration.setting_of_rows(config, rows)
    measured, outcome = (
        calibration.measure(later, config.learner.groups_per_step),
        settle(setting, rates, config.run.seed, STEPS),
    )
    if asked.as_json:
        print(json.dumps({"measured": asdict(measured), "predicted": outcome.as_values()}, indent=2))
        return
    exits.show(f"rates: {rates.source}; measured: steps {later[0]['training/global_step']} and later")
    caveats = find_caveats(config, setting, rates, MAX_PERIOD)
    exits.show(*compare(outcome, measured), *_tell_caveats(list(caveats)))


def compare(outcome: Outcome, measured: Measured) -> list[str]:
    """Return predicted against measured figures as lines of a table."""
    rows = [["", "predicted", "measured", "difference"]]
    for name, unit, is_share in FIGURES:
        told, seen = getattr(outcome, name), getattr(measured, name)
        apart = f"{told - seen:+.2f}" if is_share else f"{told / seen - 1:+.0%}" if seen else "-"
        rows.append([f"{name} {unit}".strip(), f"{told:.4g}", f"{seen:.4g}", apart])
    return align(rows)


FIGURES = (
    ("step_s", "", False),
    ("tokens_per_s", "", False),
    ("learner_idle", "[share]", True),
    ("replica_idle", "[share]", True),
    ("lag_mean", "[steps]", True),
    ("masked_share", "", True),
    ("sync_s", "", False),
)


def read_rates(name: str | None, config: Config, command: str = MEASURE) -> tuple[Rates, Setting]:
    """Return the rates of a file or of a kind of GPU, and the setting that goes with them.

    Args:
        command: That measures some.

    Raises:
        ConfigError: There is neither.
        DataError: The file holds no rates.
    """
    if name is not None and name not in GPUS:
        return _read_file(name, config, command)
    size = read_size(config)
    if size is None:
        raise ConfigError(
            f"the size of '{config.model.path}' cannot be told, so no rates can be assumed",
            hint=f"Measure some: '{command}', and give --rates rates.json",
        )
    setting = Setting.of(config)
    mean_tokens = setting.prompt_tokens + setting.lengths.median_tokens / 2
    return assume_rates(config, size, name or DEFAULT_GPU, mean_tokens), setting


def _tell_command(asked: Asked) -> str:
    """Return the command that measures rates for what is asked about."""
    changes = [f"--set {shlex.quote(one)}" for one in asked.overrides]
    return " ".join(
        ["asyncrl bench calibrate", *map(shlex.quote, asked.configs), *changes, "--out rates.json"]
    )


def _read_file(name: str, config: Config, command: str) -> tuple[Rates, Setting]:
    try:
        text = Path(name).read_text()
    except (OSError, UnicodeDecodeError) as error:
        hint = f"A file of 'asyncrl bench calibrate', or {', '.join(GPUS)}"
        raise ConfigError(f"--rates {name}: {error}", hint=hint) from error
    try:
        values = json.loads(text)
        rates, setting = Rates.of_values(values["rates"]), _setting_of_file(config, values)
        differences = list(_find_differences(values, config))
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
        raise DataError(
            f"--rates {name}: this is not a rates file: {type(error).__name__} {error}",
            hint=f"'{command}' writes one",
        ) from error
    for line in differences:
        exits.say(f"--rates {name}: {line}")
    return rates, setting


def _find_differences(values: dict[str, Any], config: Config) -> Iterator[str]:
    """Yield what the rates were taken with and the configuration has not."""
    taken, planned = values.get("taken_with", {}), calibration.taken_with(config)
    for key, now in planned.items():
        if taken.get(key, now) != now:
            yield f"taken with {key} {taken[key]}, but {now} is planned; these rates may not hold for it"


def _setting_of_file(config: Config, values: dict[str, Any]) -> Setting:
    found = values.get("lengths")
    lengths = None
    if found:
        sigma = _number_of(found, "sigma", 0.0, MAX_SIGMA)
        lengths = LengthsModel(sigma, _number_of(found, "median_tokens", LEAST_MEDIAN, math.inf))
    prompt_tokens = _number_of({"prompt_tokens": 0.0} | values, "prompt_tokens", 0.0, math.inf)
    older = values.get("uniform_share", 0.0)  # its name in files of an older asyncrl
    share = _number_of({"zero_variance_share": older} | values, "zero_variance_share", 0.0, MAX_ZERO_VARIANCE)
    return replace(Setting.of(config, lengths, prompt_tokens=prompt_tokens), zero_variance_share=share)


def _number_of(values: dict[str, Any], name: str, least: float, most: float) -> float:
    value = values[name]
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not is_number or not least <= value <= most:
        bounds = f"from {least:g} to {most:g}" if most < math.inf else f"of {least:g} or more"
        raise DataError(f"{name} must be a number {bounds}, not {value!r}")
    return float(value)


def _values(base: Outcome, choices: Sequence[Choice], words: Sequence[str], rates: Rates) -> dict[str, Any]:
    return {
        "rates": rates.as_values(),
        "prediction": base.as_values(),
        "choices": [
            {"axis": one.axis, "max_lag": one.max_lag, "replicas": one.replicas}
            | {"learner_share": one.learner_share, "prediction": one.outcome.as_values()}
            for one in choices
        ],
        "recommendation": list(words),
    }


def _lines(
    base: Outcome,
    choices: Sequence[Choice],
    words: Sequence[str],
    rates: Rates,
    setting: Setting,
    rooms: Sequence[Room],
) -> list[str]:
    lengths = setting.lengths
    told = "assumed" if lengths.is_assumed else "told"
    lags = "  ".join(f"{lag}: {share:.0%}" for lag, share in sorted(base.lags.items()))
    rows = [
        ["step", f"{base.step_s:.3g} s", f"+-{base.noise:.1%}: {base.num_steps} steps simulated"],
        [
            "throughput",
            f"{base.trained_per_s:.4g} trained tokens/s, of answers",
            f"{base.sampled_per_s:.4g} sampled; {base.tokens_per_s:.4g} computed on, with prompts",
        ],
        ["idle", f"learner {base.learner_idle:.0%}", f"replicas {base.replica_idle:.0%}"],
        ["lag", f"{base.lag_mean:.2f} on average", lags],
        [
            "masked",
            f"{base.masked_share:.1%} of the tokens",
            f"{base.dropped_groups:.2%} of the groups dropped",
        ],
        ["buffer", f"{base.buffer_load:.1%} of one thread", f"{base.buffer_ops_per_s:.4g} requests/s"],
        ["weight sync", f"{base.spread_s:.3g} s from a publish to its last replica", _tell_stages(rates)],
        *_rows_of_interruptions(base, setting),
        *(["memory", *room.tell()] for room in rooms),
    ]
    answers = f"median {lengths.median_tokens:.4g} tokens, sigma {lengths.sigma:.2f} ({told})"
    head = f"rates: {rates.source}; answers: {answers}"
    swept = _table_of(choices) if choices else [NO_SWEEP]
    return [head, *align(rows), "", *swept, "", *words]


def _tell_stages(rates: Rates) -> str:
    return f"export {rates.publish_s:.3g} s, transfer {rates.transfer_s:.3g} s, load {rates.swap_s:.3g} s"


def _rows_of_interruptions(base: Outcome, setting: Setting) -> list[list[str]]:
    """Return rows on parts of a batch, checkpoints and evaluations, where there are some."""
    rows = []
    if setting.streams:
        parts = f"{base.parts_per_step:.3g} parts a step"
        rows.append(["streaming", parts, f"{base.overlapped_s:.3g} s of a step's work before its last group"])
    if base.stall_share:
        often = f"every {setting.checkpoint_every} steps, {base.num_skipped} left out"
        rows.append(["checkpoints", f"{base.stall_share:.1%} of the learner's time", often])
    if base.num_evaluations:
        parts_at_once = min(setting.replicas, setting.ledger.evaluation_parts)
        where = f"{setting.eval_prompts * setting.eval_samples} answers on {parts_at_once} replicas"
        rows.append(
            ["evaluations", f"{base.evaluation_s:.3g} s each", f"{where}, every {setting.eval_every} steps"]
        )
    return rows


def _tell_caveats(caveats: Sequence[str]) -> list[str]:
    return ["", "not modelled:", *(f"  {line}" for line in caveats)] if caveats else []


def _table_of(choices: Sequence[Choice]) -> list[str]:
    rows = [["choice", "step s", "trained tokens/s", "learner idle", "replicas idle", "mean lag", "masked"]]
    for one in choices:
        found = one.outcome
        shares = (f"{found.learner_idle:.0%}", f"{found.replica_idle:.0%}")
        figures = (f"{found.step_s:.3g}", f"{found.trained_per_s:.4g}", *shares)
        rows.append([one.label, *figures, f"{found.lag_mean:.2f}", f"{found.masked_share:.1%}"])
    return align(rows)
