"""Rates of a run that was measured, from its recorded rows.

Owns what each rate is taken from. The learner's seconds are a line through the steps' work against their
tokens; how fast the engines decode is found by simulating the very run until it samples as fast as the rows
say, because rows do not tell how many requests ran at once. Wants a window in which nothing was changed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import NormalDist, fmean, median
from typing import Any

from asyncrl.core.config.tree import Config
from asyncrl.core.errors import ConfigError
from asyncrl.core.variants import engine_facts
from asyncrl.planner.rates import Rates
from asyncrl.planner.setting import LengthsModel, Setting
from asyncrl.planner.sweep import predict

MIN_ROWS = 5
FIT_STEPS = 40
FIT_ROUNDS = 4
FIT_ERROR = 0.01
HALF_SPEED_AT = 16.0
"""Requests at which an engine of which nothing is known is taken to be half as fast as it can be at all."""
COLLINEAR = 1e-6
"""Of the spread of two causes, below which what is left of it is rounding."""
OUTLIER = 5.0
"""A step that took so many times the median is none of the run: the machine stood still."""
NOT_WORK = ("wait", "wait_paused", "wait_checkpoint", "wait_publisher", "update_weights", "save_checkpoint")

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Measured:
    """Figures of a window of rows, in the words of `Outcome`."""

    num_steps: int
    step_s: float
    learner_idle: float
    replica_idle: float
    lag_mean: float
    masked_share: float
    tokens_per_s: float
    sampled_per_s: float
    tokens_per_step: float
    sync_s: float


def steady_rows(rows: Sequence[Row]) -> list[Row]:
    """Return the rows of training steps, without the first of a start and without standstills.

    Raises:
        ConfigError: There are fewer than `MIN_ROWS`.
    """
    steps = [row for row in rows if "timing_s/step" in row and not row.get("training/is_first_after_start")]
    if len(steps) >= MIN_ROWS:
        usual = median(row["timing_s/step"] for row in steps)
        steps = [row for row in steps if row["timing_s/step"] <= OUTLIER * usual]
    if len(steps) < MIN_ROWS:
        raise ConfigError(
            f"{len(steps)} steady steps are too few to measure by",
            hint=f"Let the run train {MIN_ROWS} or more",
        )
    return steps


def taken_with(config: Config) -> dict[str, Any]:
    """Return what rates are taken with and hold for, by its key in a configuration."""
    return {
        "model.path": _name_of_model(Path(config.model.path)),
        "rollout.engine": ", ".join(config.rollout.engines),
        "rollout.group_size": config.rollout.group_size,
    }


def _name_of_model(path: Path) -> str:
    """Return what a configuration calls a model that a run has found in a folder."""
    if path.parent.name == "builtin":
        return f"builtin:{path.name}"
    if path.parent.name == "snapshots":  # of the hub's cache: models--OWNER--NAME/snapshots/COMMIT
        return path.parent.parent.name.removeprefix("models--").replace("--", "/")
    return str(path)


def base_rates(config: Config) -> Rates:
    """Return a shape of the decode curve for a run of which only rows are known."""
    known = [rate for name in config.rollout.engines if (rate := engine_facts(name).tokens_per_s)]
    if len(known) == len(config.rollout.engines):
        rate = fmean(known)
        return Rates(decode=((1.0, rate), (100_000.0, 100_000.0 * rate)))  # requests do not slow one another
    most = config.rollout.max_sequences
    points = sorted({*(2**power for power in range(11) if 2**power < most), most})
    return Rates(decode=tuple((float(n), n / (n + HALF_SPEED_AT)) for n in points))


def setting_of_rows(config: Config, rows: Sequence[Row]) -> Setting:
    """Return the setting of a run, with the fleet and the lengths that its rows tell."""
    rows_per_step = config.learner.groups_per_step * config.rollout.group_size
    lengths = lengths_of_rows(rows, rows_per_step, config.rollout.max_tokens)
    found = Setting.of(config, lengths, prompt_tokens=prompt_tokens_of_rows(rows))
    replicas = round(fmean(row.get("perf/rollout_replicas", found.replicas) for row in rows))
    share = zero_variance_share(rows, config.learner.groups_per_step)
    return replace(found, replicas=max(1, replicas), zero_variance_share=share)


def rates_of_run(config: Config, rows: Sequence[Row], base: Rates | None = None) -> tuple[Rates, Setting]:
    """Return the rates that a run's rows tell, and its setting."""
    setting = setting_of_rows(config, rows)
    return rates_of_rows(rows, setting, base or base_rates(config)), setting


def measure(rows: Sequence[Row], groups_per_step: int) -> Measured:
    """Return the figures of a window of `steady_rows`. Shares and rates are weighted by time."""
    wall_s = sum(row["timing_s/step"] for row in rows)
    tokens = sum(row["perf/total_num_tokens"] for row in rows)
    trained = sum(row["staleness/trained_tokens"] for row in rows)
    masked = sum(row["staleness/masked_tokens"] for row in rows)
    return Measured(
        num_steps=len(rows),
        step_s=wall_s / len(rows),
        learner_idle=sum(row["timing_s/wait"] for row in rows) / wall_s,
        replica_idle=sum(row["perf/rollout_idle_share"] * row["timing_s/step"] for row in rows) / wall_s,
        lag_mean=sum(row["staleness/lag_mean"] * row["staleness/trained_tokens"] for row in rows) / trained,
        masked_share=masked / (masked + trained),
        tokens_per_s=tokens / wall_s,
        sampled_per_s=(masked + trained) / wall_s / (1.0 - zero_variance_share(rows, groups_per_step)),
        tokens_per_step=tokens / len(rows),
        sync_s=fmean(row.get("weights/transfer_s", 0.0) + row.get("weights/apply_s", 0.0) for row in rows),
    )


def rates_of_rows(rows: Sequence[Row], setting: Setting, base: Rates) -> Rates:
    """Return the rates of the run that `setting` describes and `rows` measured.

    Args:
        base: Its decode curve is the shape that is scaled; what rows do not tell is taken from it.
    """
    found = measure(rows, setting.ledger.groups_per_step)
    step_s, step_s_per_token, part_s = fit_steps(
        [row["perf/total_num_tokens"] for row in rows],
        [row.get("stream/parts", 1.0) - 1.0 for row in rows],
        [_work_s(row) for row in rows],
    )
    rates = replace(
        base,
        step_s=step_s,
        step_s_per_token=step_s_per_token,
        part_s=base.part_s if part_s is None else part_s,
        publish_s=fmean(_seconds(row, "update_weights") + _seconds(row, "wait_publisher") for row in rows),
        transfer_s=fmean(row.get("weights/transfer_s", base.transfer_s) for row in rows),
        swap_s=fmean(row.get("weights/apply_s", base.swap_s) for row in rows),
        checkpoint_s=_mean_of([_seconds(row, "save_checkpoint") for row in rows], base.checkpoint_s),
        checkpoint_write_s=_mean_of(
            [row.get("checkpoint/write_s", 0.0) for row in rows], base.checkpoint_write_s
        ),
        source=f"{len(rows)} steps of a run",
    )
    return fit_decode(rates, setting, found)


def fit_decode(rates: Rates, setting: Setting, found: Measured) -> Rates:
    """Return the rates with the decode curve scaled until a simulated replica, while busy, is as fast."""
    if setting.replicas == 0:
        return rates
    target = found.sampled_per_s / setting.replicas / max(1e-3, 1.0 - found.replica_idle)
    most = min(setting.max_sequences, setting.max_groups * setting.num_samples)
    rates = scale_decode(rates, target / (most * rates.token_rate(most)))  # as if the batch were always full
    for _ in range(FIT_ROUNDS):
        got = predict(setting, rates, seed=0, steps=FIT_STEPS)
        rate = got.sampled_per_s / setting.replicas / max(1e-3, 1.0 - got.replica_idle)
        rates = scale_decode(rates, target / max(1e-9, rate))
        if abs(target / max(1e-9, rate) - 1.0) < FIT_ERROR:
            break
    return rates


def scale_decode(rates: Rates, factor: float) -> Rates:
    """Return rates whose engines are `factor` times as fast."""
    return replace(
        rates,
        decode=tuple((n, rate * factor) for n, rate in rates.decode),
        prefill_s_per_token=rates.prefill_s_per_token / factor,
    )


def fit_line(xs: Sequence[float], ys: Sequence[float]) -> tuple[float, float]:
    """Return (a, b), both >= 0, of the line y = a + b x with the least squares.

    >>> fit_line([1.0, 2.0, 3.0], [3.0, 5.0, 7.0])
    (1.0, 2.0)
    """
    mean_x, mean_y = fmean(xs), fmean(ys)
    spread = sum((x - mean_x) ** 2 for x in xs)
    if spread == 0.0:
        return mean_y, 0.0
    slope = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True)) / spread
    slope = min(max(0.0, slope), mean_y / mean_x)  # neither seconds without tokens nor tokens below 0
    return mean_y - slope * mean_x, slope


def fit_steps(
    tokens: Sequence[float], more_parts: Sequence[float], seconds: Sequence[float]
) -> tuple[float, float, float | None]:
    """Return (a, b, c), all >= 0, of seconds = a + b tokens + c more_parts with the least squares.

    c is None where the parts do not tell: there are none, or as many in every step.

    >>> fit_steps([1.0, 2.0, 3.0, 1.0], [1.0, 1.0, 2.0, 0.0], [10.0, 12.0, 19.0, 5.0])
    (3.0, 2.0, 5.0)
    """
    mean_x, mean_z, mean_y = fmean(tokens), fmean(more_parts), fmean(seconds)
    xx = sum((x - mean_x) ** 2 for x in tokens)
    zz = sum((z - mean_z) ** 2 for z in more_parts)
    xz = sum((x - mean_x) * (z - mean_z) for x, z in zip(tokens, more_parts, strict=True))
    if zz * max(xx, 1.0) - xz * xz <= COLLINEAR * zz * max(xx, 1.0):
        return *fit_line(tokens, seconds), None
    xy = sum((x - mean_x) * (y - mean_y) for x, y in zip(tokens, seconds, strict=True))
    zy = sum((z - mean_z) * (y - mean_y) for z, y in zip(more_parts, seconds, strict=True))
    part_s = (zy * xx - xy * xz) / (xx * zz - xz * xz) if xx else zy / zz
    part_s = min(max(0.0, part_s), mean_y / mean_z)
    rest = [y - part_s * z for z, y in zip(more_parts, seconds, strict=True)]
    return *fit_line(tokens, rest), part_s


def lengths_of_rows(rows: Sequence[Row], rows_per_step: int, max_tokens: int) -> LengthsModel:
    """Return log-normal lengths with the rows' mean, and the skew that their longest answers hint at.

    Of `rows_per_step` answers the longest is expected at a known quantile; where most steps have one that
    was cut at `max_tokens` the skew is a lower bound.
    """
    mean = fmean(row["response_length/mean"] for row in rows)
    longest = min(float(max_tokens), median(row["response_length/max"] for row in rows))
    z = NormalDist().inv_cdf(1 - 0.5 / max(2, rows_per_step))
    ratio = math.log(max(1.0, longest / mean))
    sigma = z - math.sqrt(max(0.0, z * z - 2 * ratio))  # the smaller root of s z - s^2 / 2 = ln(max / mean)
    return LengthsModel(sigma, mean * math.exp(-sigma * sigma / 2))


def zero_variance_share(rows: Sequence[Row], groups_per_step: int) -> float:
    """Return how many of the sampled groups were dropped for equal rewards, so that nobody trained them."""
    name, first, last = "buffer/dropped/zero_variance", rows[0], rows[-1]
    num_dropped = max(0.0, last.get(name, 0.0) - first.get(name, 0.0))
    num_trained = groups_per_step * (last["training/global_step"] - first["training/global_step"])
    return num_dropped / (num_dropped + num_trained) if num_trained else 0.0


def prompt_tokens_of_rows(rows: Sequence[Row]) -> float:
    """Return the mean length of a prompt."""
    return fmean(row["prompt_length/mean"] for row in rows)


def _mean_of(values: Sequence[float], otherwise: float) -> float:
    """Return the mean of those that are not 0: the rows in which it happened."""
    found = [value for value in values if value]
    return fmean(found) if found else otherwise


def _work_s(row: Row) -> float:
    return float(row["timing_s/step"] - sum(_seconds(row, stage) for stage in NOT_WORK))


def _seconds(row: Row, stage: str) -> float:
    return float(row.get(f"timing_s/{stage}", 0.0))
