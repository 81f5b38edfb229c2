"""A live run whose bound and fleet are changed under way, watched in windows between the changes.

Owns the run: it ends with the `with` block. A window begins when the change has settled: the fleet is as
large as asked, and all that was admitted under the old bound is trained.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from asyncrl.cli.run import start as run
from asyncrl.cli.run.client import NotRunning, RunClient, connect
from asyncrl.cli.run.handle import RunHandle
from asyncrl.control.rows.recorder import training_rows
from asyncrl.control.rows.row_files import load_rows
from asyncrl.core.config.tree import Config
from asyncrl.core.errors import AsyncrlError, ServiceFailed
from asyncrl.core.states import ServiceState
from asyncrl.planner.calibration import Row, steady_rows

START_S, CHANGE_S, STOP_S = 240.0, 90.0, 20.0
POLL_S = 0.5
SETTLING_STEPS = 3
MIN_STEPS = 8
"""Of a window, however slow they are."""


@dataclass(frozen=True)
class LiveRun:
    """One run that trains."""

    handle: RunHandle
    client: RunClient
    max_lag: int

    def change(self, replicas: int, max_lag: int) -> None:
        """Have so many replicas ready, and admit under this bound.

        Raises:
            ServiceFailed: The fleet is not that large in time.
        """
        self.client.tighten(max_lag)
        self.client.scale(replicas)
        end = time.monotonic() + CHANGE_S
        while time.monotonic() < end:
            services = self.client.status().services
            states = [one.state for name, one in services.items() if name.startswith("rollout.")]
            if states.count(ServiceState.READY) == len(states) == replicas:
                return
            time.sleep(POLL_S)
        raise ServiceFailed(f"there were not {replicas} replicas ready after {CHANGE_S:g} s")

    def watch(self, seconds: float) -> list[Row]:
        """Return the steady rows of so many seconds and `MIN_STEPS`, once the last change has settled."""
        first = (self.client.status().step or 0) + SETTLING_STEPS + self.max_lag
        self._await_step(first)
        time.sleep(seconds)
        self._await_step(first + MIN_STEPS)
        last = self.client.status().step or 0
        time.sleep(2 * POLL_S)  # the supervisor writes rows a moment later
        rows = training_rows(load_rows(self.handle.folder.metrics))
        return steady_rows([row for row in rows if first < row["training/global_step"] <= last])

    def _await_step(self, step: int) -> None:
        end = time.monotonic() + CHANGE_S
        while (self.client.status().step or 0) < step:
            if time.monotonic() > end:
                raise ServiceFailed(f"the run was not at step {step} after {CHANGE_S:g} s")
            time.sleep(POLL_S)


@contextmanager
def live_run(config: Config, say: Callable[[str], None]) -> Iterator[LiveRun]:
    """Start a run, yield it once it trains, and end it.

    Raises:
        ServiceFailed: It did not train in time, or ended.
    """
    began = time.monotonic()
    handle = run.start(config, say)
    try:
        client = _await_training(handle)
        say(f"{config.run.name} trains after {time.monotonic() - began:.0f} s")
        yield LiveRun(handle, client, config.staleness.max_lag)
    finally:
        handle.stop(STOP_S)


def _await_training(handle: RunHandle) -> RunClient:
    end = time.monotonic() + START_S
    while time.monotonic() < end and not handle.is_over:
        client = connect(handle.folder)
        if client is not None and step_of(client) >= SETTLING_STEPS:
            return client
        time.sleep(POLL_S)
    raise ServiceFailed(f"the run in {handle.folder.path} did not train: {handle.result()}")


def step_of(client: RunClient) -> int:
    """Return the step that a run has done, 0 while it does not answer."""
    try:
        return client.status().step or 0
    except (AsyncrlError, NotRunning):
        return 0


def builtin_paths(say: Callable[[str], None]) -> Sequence[str]:
    """Return settings that name the built-in model and its prompts, made once and kept."""
    from pathlib import Path

    from asyncrl.planner.plan.prepare import make_builtin

    made = make_builtin("builtin:digit_sort", Path("runs").absolute() / "builtin", say)
    prompts = (f"data.train={made / 'train.parquet'}", f"data.eval={made / 'eval.parquet'}")
    return (f"model.path={made}", *prompts)
