"""The learner's time adds up: stages, waits by cause and the rest are the step, whatever it waits for."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from asyncrl.core.metrics import unknown_names
from asyncrl.core.runtime.threads import ThreadEvent
from learner.report.waits import BATCH, BUFFER, CAUSES, CHECKPOINT, Waits, describe_time
from tests.learner.guard.guarded_run import Faults, running
from tests.runtimes import ManualRuntime
from tests.weight_sync.cluster import running_cluster

WAITS_S = {"reserve": 3.0, "trained": 0.5, "register_version": 0.25, "checkpointed": 0.125}


class StillRuntime(ManualRuntime):
    """Its clock moves where the test moves it; who sleeps, the checkpoint's writer say, does so beside it."""

    def sleep(self, seconds: float) -> None:
        ThreadEvent().wait(seconds)


class SlowClient:
    """The real way to the buffer, on which calls take time by the test's clock; nothing else does."""

    def __init__(self, inner: Any, clock: ManualRuntime) -> None:
        self._inner, self._clock = inner, clock

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._inner, name)

        def wait(*args: Any, **fields: Any) -> Any:
            found = call(*args, **fields)
            if name != "reserve" or found is not None:
                self._clock.advance(WAITS_S.get(name, 0.0))
            return found

        return wait


class SlowFetch:
    def __init__(self, inner: Any, clock: ManualRuntime) -> None:
        self._inner, self._clock = inner, clock

    def fetch(self, *args: Any) -> Any:
        self._clock.advance(1.0)
        return self._inner.fetch(*args)

    def take_left_out(self) -> Any:
        return self._inner.take_left_out()


def shares_of(row: dict[str, float]) -> float:
    idle = [value for name, value in row.items() if name.startswith("perf/learner_idle/")]
    return row["perf/learner_busy_share"] + sum(idle)


def test_injected_waits_come_out_by_cause_and_all_of_it_adds_up(model: Path, tmp_path: Path):
    clock = StillRuntime()
    faults = Faults(runtime=clock, wrap=lambda client: SlowClient(client, clock))
    sections = {"learner": {"steps": 3}, "checkpoint": {"every_steps": 2}}
    with running_cluster() as cluster, running(model, cluster, tmp_path, faults, {}, **sections) as run:
        trainer = run.learner._trainer
        trainer._fetcher = SlowFetch(trainer._fetcher, clock)
        run.go()
        first, second, third = run.rows()
    for row in (first, second, third):
        assert unknown_names(row) == {}
        assert row["timing_s/wait"] == WAITS_S["reserve"]
        assert row["timing_s/fetch"] == 1.0
        assert row["timing_s/other"] == 0.0, "nothing else took time"
        parts = [value for name, value in row.items() if name.startswith("timing_s/")]
        assert math.fsum(parts) == 2 * row["timing_s/step"]
        assert shares_of(row) == pytest.approx(1.0)
        assert row["perf/learner_idle_share"] == row["perf/learner_idle/batch"] == 3.0 / row["timing_s/step"]
    assert "timing_s/restore" not in first, "the first step begins once the weights are there"
    assert first["timing_s/wait_buffer"] == WAITS_S["register_version"]
    assert second["timing_s/wait_buffer"] == WAITS_S["register_version"] + WAITS_S["trained"]
    assert third["timing_s/step"] >= 3.0 + 1.0 + 0.75


def test_a_wait_within_another_counts_once_and_for_the_inner_one():
    clock = ManualRuntime()
    waits = Waits(clock)
    with waits.on(CHECKPOINT):
        clock.advance(1.0)
        with waits.on(BUFFER):
            clock.advance(4.0)
        clock.advance(2.0)
    clock.advance(8.0)
    assert waits.take() == dict.fromkeys(CAUSES, 0.0) | {CHECKPOINT: 3.0, BUFFER: 4.0}
    assert waits.take() == dict.fromkeys(CAUSES, 0.0)


def test_a_wait_that_ends_with_an_error_is_counted_too():
    clock = ManualRuntime()
    waits = Waits(clock)

    def fail() -> None:
        with waits.on(BATCH):
            clock.advance(1.0)
            raise TimeoutError

    with pytest.raises(TimeoutError):
        fail()
    with waits.on(BUFFER):
        clock.advance(2.0)
    assert waits.take() == dict.fromkeys(CAUSES, 0.0) | {BATCH: 1.0, BUFFER: 2.0}


def test_a_steps_time_is_its_stages_its_waits_and_the_rest():
    waits = dict.fromkeys(CAUSES, 0.0) | {BATCH: 2.0, BUFFER: 1.0}
    found = describe_time({"timing_s/fetch": 3.0}, waits, 8.0)
    assert found["timing_s/other"] == 2.0
    assert (found["timing_s/wait"], found["timing_s/wait_buffer"]) == (2.0, 1.0)
    assert (found["perf/learner_busy_share"], found["perf/learner_idle_share"]) == (0.625, 0.25)
