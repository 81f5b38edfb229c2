"""A live run that is scaled: `asyncrl up`, then `scale` from one to several replicas.

Owns the run, and the figures of each number of replicas: steps, idle times, and how long it took from the
command to the new replica's first trajectory.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from asyncrl.cli.run import start as run
from asyncrl.cli.run.client import RunClient, connect
from asyncrl.cli.run.handle import RunHandle
from asyncrl.control.snapshot import ServiceView
from asyncrl.core.config.load import load_config
from asyncrl.core.errors import ServiceFailed
from asyncrl.core.metrics.metric import Row
from asyncrl.core.metrics.row_log import read_rows
from benchmarks.pipeline.cases import FOREVER, make_task
from configs import shipped

POLL_S = 0.05
START_S, JOIN_S, STOP_S = 200.0, 120.0, 20.0
SETTLING_STEPS, MIN_STEPS = 3, 5
SETTINGS = {
    "data.eval": "null",
    "eval.every_steps": 0,
    "reward.fn": "gsm8k_flexible",
    "rollout.replicas": 1,
    "rollout.group_size": 4,
    "rollout.max_sequences": 32,
    "rollout.max_tokens": 160,
    "rollout.response_tokens": "lognormal:0.5:40",
    "learner.groups_per_step": 16,
    "learner.steps": FOREVER,
    "checkpoint.every_steps": FOREVER,
    "buffer.journal": "none",
}

Figures = dict[str, Any]


def measure(
    engine: str, counts: Iterable[int], seconds: float, folder: Path, say: Callable[[str], None]
) -> list[Figures]:
    """Return the figures of each number of replicas, in the order of `counts`.

    Args:
        engine: `vllm`, or `scripted`: 200 tokens a second for each of up to 32 requests.

    Raises:
        ServiceFailed: The run did not start, or a replica did not come.
    """
    with _running(engine, folder, say) as (handle, client):
        return [_measure_count(handle, client, count, seconds, say) | {"engine": engine} for count in counts]


@contextmanager
def _running(engine: str, folder: Path, say: Callable[[str], None]) -> Iterator[tuple[RunHandle, RunClient]]:
    task = make_task(folder / f"task-{engine}")
    values = SETTINGS | {
        "run.name": f"scale-{engine}",
        "run.dir": folder,
        "model.path": task,
        "data.train": task / "train.parquet",
        "rollout.engine": engine,
    }
    config = load_config(shipped()["quickstart"], [f"{key}={value}" for key, value in values.items()])
    handle = run.start(config, say)
    try:
        yield handle, _await_training(handle)
    finally:
        handle.stop(STOP_S)


def _await_training(handle: RunHandle) -> RunClient:
    end_s = time.monotonic() + START_S
    while time.monotonic() < end_s and not handle.is_over:
        client = connect(handle.folder)
        if client is not None and (client.status().step or 0) >= SETTLING_STEPS:
            return client
        time.sleep(POLL_S)
    raise ServiceFailed(f"the run did not train: {handle.result()}")


def _measure_count(
    handle: RunHandle, client: RunClient, count: int, seconds: float, say: Callable[[str], None]
) -> Figures:
    """Scale to `count` replicas, and measure for `seconds` from the newcomer's first trajectory on."""
    began_s = time.monotonic()
    known = set(_replicas(client))
    joining: Figures = {}
    if count != len(known):
        before = len(_rows(handle))
        client.scale(count)
        joining["first_trajectory_s"] = _await_first_trajectory(handle, client, known, count) - began_s
        joining |= {f"joining_{name}": value for name, value in _jitter(_rows(handle)[before:]).items()}
        say(f"{count} replicas: the first trajectory after {joining['first_trajectory_s']:.1f} s")
    first = len(_rows(handle)) + SETTLING_STEPS
    _await_steps(handle, first + MIN_STEPS, seconds)
    return {"replicas": count, **_describe(_rows(handle)[first:]), **joining}


def _await_steps(handle: RunHandle, num_rows: int, seconds: float) -> None:
    """Return once `seconds` have passed and there are so many rows; `_describe` judges what came too late."""
    began_s = time.monotonic()
    time.sleep(seconds)
    while len(_rows(handle)) < num_rows and time.monotonic() < began_s + JOIN_S and not handle.is_over:
        time.sleep(POLL_S)


def _rows(handle: RunHandle) -> list[Row]:
    return read_rows(handle.folder.path)


def _replicas(client: RunClient) -> dict[str, ServiceView]:
    services = client.status().services.items()
    return {name: status for name, status in services if name.startswith("rollout.")}


def _await_first_trajectory(handle: RunHandle, client: RunClient, known: set[str], count: int) -> float:
    """Return when all replicas that were not known have a trajectory."""
    end_s = time.monotonic() + JOIN_S
    while time.monotonic() < end_s and not handle.is_over:
        fresh = [status for name, status in _replicas(client).items() if name not in known]
        if len(fresh) + len(known) >= count and all(status.trajectories for status in fresh):
            return time.monotonic()
        time.sleep(POLL_S)
    raise ServiceFailed(f"{count} replicas were asked for, and not all came within {JOIN_S:g} s")


def _describe(rows: list[dict[str, Any]]) -> Figures:
    if len(rows) < MIN_STEPS:
        raise ServiceFailed(f"only {len(rows)} steps while one number of replicas was measured")
    elapsed_s = sum(row["timing_s/step"] for row in rows)
    tokens = sum(row["staleness/trained_tokens"] + row["staleness/masked_tokens"] for row in rows)
    return {
        "num_steps": len(rows),
        "tokens_per_s": tokens / elapsed_s,
        "trained_tokens_per_s": sum(row["staleness/trained_tokens"] for row in rows) / elapsed_s,
        "learner_idle_share": sum(row["timing_s/wait"] for row in rows) / elapsed_s,
        "lag_mean": statistics.fmean(row["staleness/lag_mean"] for row in rows),
        "masked_share": statistics.fmean(row["staleness/masked_share"] for row in rows),
        **_jitter(rows),
    }


def _jitter(rows: list[dict[str, Any]]) -> Figures:
    """Return median step time, the longest, and the standard deviation over the mean."""
    if len(rows) < 2:
        return {}
    steps_s = [row["timing_s/step"] for row in rows]
    return {
        "step_s": statistics.median(steps_s),
        "step_max_s": max(steps_s),
        "step_jitter": statistics.stdev(steps_s) / statistics.fmean(steps_s),
        "step_samples_s": steps_s,
    }
