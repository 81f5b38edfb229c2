"""A replica's time adds up: busy seconds and idle ones by their cause are the time that passed."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

from asyncrl.control.rows.metering import Meter
from rollout_service.engine.metered import BUSY, SWAP, MeteredEngine
from rollout_service.replica.states import START, State, idle_cause
from rollout_service.rewards.calling import FunctionReward
from rollout_service.rewards.rules.matching import score_digit_sort
from tests.rollout.replica.replica_parts import open_stage
from tests.runtimes import ManualClock
from tests.statuses import statuses_of
from tests.waiting import wait_for

DIGIT_SORT = FunctionReward("digit_sort", score_digit_sort)


class TimedEngine:
    """An engine whose calls take time by the test's clock, and nothing else does."""

    def __init__(self, clock: ManualClock, generate_s: float = 4.0, swap_s: float = 2.0) -> None:
        self._clock, self._generate_s, self._swap_s = clock, generate_s, swap_s

    async def generate(self, *args: Any) -> Any:
        self._clock.advance(self._generate_s)
        raise TimeoutError

    async def swap(self, staged: Any) -> None:
        self._clock.advance(self._swap_s)


def test_injected_waits_come_out_by_cause_and_all_of_it_adds_up():
    clock = ManualClock(100.0)
    engine = MeteredEngine(TimedEngine(clock), clock)

    async def live() -> None:
        clock.advance(8.0)
        engine.wait_for("weights")
        clock.advance(1.0)
        await engine.swap(None)
        engine.wait_for("lease")
        clock.advance(0.5)
        engine.wait_for("group")
        with pytest.raises(TimeoutError):
            await engine.generate((), None, "request")
        clock.advance(0.25)
        with engine.request():
            clock.advance(0.125)
            await engine.swap(None)
            clock.advance(0.0625)

    asyncio.run(live())
    account = engine.account()
    assert account == {
        START: 8.0, "weights": 1.0, SWAP: 4.0, "lease": 0.5, BUSY: 4.0 + 0.1875, "group": 0.25,
    }  # fmt: skip
    assert sum(account.values()) == clock.now() - 100.0
    clock.advance(3.0)
    assert engine.account() == account | {"group": 3.25}, "what goes on is counted up to the question"


def test_whatever_happens_in_whatever_order_the_account_is_the_time_that_passed():
    dice = random.Random(0)
    clock = ManualClock()
    engine = MeteredEngine(TimedEngine(clock), clock)
    open_requests: list[Any] = []

    def begin() -> None:
        open_requests.append(engine.request())
        open_requests[-1].__enter__()

    def end() -> None:
        if open_requests:
            open_requests.pop(dice.randrange(len(open_requests))).__exit__(None, None, None)

    def swap() -> None:
        asyncio.run(engine.swap(None))

    for _ in range(500):
        dice.choice([begin, end, swap, lambda: engine.wait_for(dice.choice("abc"))])()
        clock.advance(dice.randrange(16) / 16)
        assert sum(engine.account().values()) == clock.now()


def test_a_replica_waits_for_what_its_state_and_its_groups_say():
    nothing = {"has_groups": False, "is_fenced": False, "is_standby": False}
    assert {idle_cause(state, **nothing) for state in State} == {
        "start", "weights", "lease", "evaluation", "drain",
    }  # fmt: skip
    assert idle_cause(State.READY, **dict.fromkeys(nothing, True)) == "group"
    assert idle_cause(State.READY, **nothing | {"is_fenced": True}) == "fenced"
    assert idle_cause(State.READY, **nothing | {"is_standby": True}) == "standby"


def test_a_real_replica_says_what_it_waits_for(tmp_path: Path):
    with open_stage(tmp_path, DIGIT_SORT) as stage:
        wait_for(lambda: stage.state() == "SYNCING", "SYNCING")
        wait_for(lambda: "weights" in stage.replica.status().engine.idle_by_cause, "the wait for weights")
        stage.serve_first_version()
        wait_for(lambda: stage.replica.status().engine.busy_s, "work")
        # The buffer admits (max_lag + 1) steps' groups and then no more: the replica waits for leases.
        wait_for(lambda: stage.replica.status().engine.idle_by_cause.get("lease"), "the wait for a lease")
        status = stage.replica.status()
    assert status.engine is not None
    assert status.engine.idle_s == sum(status.engine.idle_by_cause.values())
    assert {"start", "weights", "swap"} <= set(status.engine.idle_by_cause)


def told(busy_s: float, **idle: float) -> dict[str, Any]:
    return {
        "tokens": int(busy_s * 100),
        "busy_s": busy_s,
        "idle_s": sum(idle.values()),
        "idle_by_cause": idle,
    }


def shares(row: dict[str, float]) -> dict[str, float]:
    prefix = "perf/rollout_idle/"
    return {name.removeprefix(prefix): value for name, value in row.items() if name.startswith(prefix)}


def test_the_hit_share_is_of_the_window_the_usage_of_the_fullest_cache_and_an_engine_may_tell_neither():
    meter = Meter()
    assert "perf/rollout_kv_usage" not in meter.update(0.0, statuses_of({"rollout.0": told(1.0, start=2.0)}))
    cache = {"prompt_tokens": 100, "cached_tokens": 90, "preemptions": 1, "usage": 0.5}
    meter.update(1.0, statuses_of({"rollout.0": told(1.5, start=2.0) | {"cache": cache}}))
    newer = {"prompt_tokens": 300, "cached_tokens": 140, "preemptions": 4, "usage": 0.25}
    fuller = {"usage": 0.75, "preemptions": 2, "prompt_tokens": 0, "cached_tokens": 0}
    told_now = {
        "rollout.0": told(2.0, start=2.0) | {"cache": newer},
        "rollout.1": told(0.5, start=1.0) | {"cache": fuller},
    }
    row = meter.update(3.5, statuses_of(told_now))
    assert row["perf/rollout_cache_hit_share"] == 0.25
    assert row["perf/rollout_preemptions"] == 6
    assert row["perf/rollout_kv_usage"] == 0.75
    assert "perf/rollout_cache_hit_share" not in meter.update(9.0, statuses_of(told_now)), "no prompt came"


def test_the_shares_of_all_replicas_add_up_to_one():
    meter = Meter()
    before = {"rollout.0": told(1.0, start=2.0), "rollout.1": told(0.0, start=1.0)}
    meter.update(0.0, statuses_of(before))
    after = {
        "rollout.0": told(2.0, start=2.0, lease=1.0),
        "rollout.1": told(0.5, start=1.0, swap=1.5),
    }
    row = meter.update(1.0, statuses_of(after))
    assert shares(row) == {"start": 0.0, "lease": 0.25, "swap": 0.375}
    assert row["perf/rollout_busy_share"] == 0.375
    assert row["perf/rollout_idle_share"] == 0.625


def test_a_replica_that_was_started_again_counts_from_zero_and_the_sums_go_on():
    meter = Meter()
    old, other = told(50.0, start=10.0), told(30.0, lease=10.0)
    meter.update(0.0, statuses_of({"rollout.0": old, "rollout.1": other}))
    meter.update(0.1, statuses_of({"rollout.0": {"state": "STARTING"}, "rollout.1": other}))
    after = {"rollout.0": told(0.0, start=1.0), "rollout.1": told(31.0, lease=10.0)}
    row = meter.update(1.0, statuses_of(after))
    assert row["perf/rollout_busy_share"] == 0.5
    assert shares(row) == {"start": 0.5, "lease": 0.0}
    assert row["perf/rollout_tokens_per_s"] == 100.0


def test_the_first_shares_are_those_since_the_start():
    row = Meter().update(5.0, statuses_of({"rollout.0": told(1.0, start=3.0)}))
    assert (row["perf/rollout_busy_share"], shares(row)) == (0.25, {"start": 0.75})
    assert row["perf/rollout_tokens_per_s"] == 0.0


def test_no_replica_is_neither_busy_nor_idle():
    row = Meter().update(1.0, statuses_of({}))
    assert (row["perf/rollout_busy_share"], row["perf/rollout_idle_share"], shares(row)) == (0.0, 0.0, {})
