"""The limit of a replica's unfinished samples, beside a model of an engine whose cache holds so many."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.buffer.client import ReplicaClient
from asyncrl.buffer.messages import LeaseReply
from asyncrl.control.rows.metering import Meter
from asyncrl.core.status.replica import CacheStatus, LimitStatus
from rollout_service.replica.concurrency import Change, Limit
from rollout_service.rewards.calling import FunctionReward
from rollout_service.rewards.rules.matching import score_digit_sort
from tests.rollout.replica.replica_parts import open_stage
from tests.statuses import statuses_of
from tests.waiting import wait_for

DIGIT_SORT = FunctionReward("digit_sort", score_digit_sort)
BOUND, LEAST = 40, 8

caches = st.builds(
    CacheStatus,
    preemptions=st.integers(0, 50),
    usage=st.floats(0, 1),
    running=st.integers(0, 60),
    waiting=st.integers(0, 60),
)


@given(st.lists(st.tuples(caches, st.integers(0, 80), st.integers(0, 20)), max_size=30))
def test_the_limit_is_at_least_a_group_and_never_over_its_bound(looks: list[tuple[CacheStatus, int, int]]):
    limit, num_ended = Limit.at_bound(BOUND, LEAST), 0
    for cache, num_unfinished, ended in looks:
        num_ended += ended
        limit = limit.step(cache, num_unfinished, num_ended)
        assert LEAST <= limit.samples <= BOUND
        assert LEAST <= limit.places <= BOUND


@given(st.lists(st.tuples(caches, st.integers(0, 80)), max_size=30))
def test_an_engine_that_never_preempts_keeps_the_bound(looks: list[tuple[CacheStatus, int]]):
    limit = Limit.at_bound(BOUND, LEAST)
    for number, (cache, num_unfinished) in enumerate(looks):
        calm = CacheStatus(usage=cache.usage, running=cache.running, waiting=cache.waiting)
        limit = limit.step(calm, num_unfinished, number)
        assert (limit.places, limit.change) == (BOUND, Change.NONE)


class EngineModel:
    """A cache for `fits` samples: of more, the rest waits, and one is preempted at each end."""

    def __init__(self, fits: int) -> None:
        self.fits = fits
        self.num_preempted = self.num_ended = 0

    def turn_over(self, limit: Limit) -> Limit:
        """Let as many samples end as may be unfinished, one by one, each replaced by another."""
        for _ in range(limit.places):
            held = limit.places
            running = min(held, self.fits)
            self.num_preempted += held > running
            self.num_ended += 1
            told = CacheStatus(0, 0, self.num_preempted, running / self.fits, running, held - running)
            limit = limit.step(told, held, self.num_ended)
        return limit


@pytest.mark.parametrize(("before", "after"), [(200, 16), (16, 200), (12, 30), (30, 12)])
def test_it_finds_what_fits_within_a_few_turnovers_of_a_change_of_workload(before: int, after: int):
    engine, limit = EngineModel(before), Limit.at_bound(BOUND, LEAST)
    for fits in (before, after):
        engine.fits = fits
        for _ in range(12):
            limit = engine.turn_over(limit)
        assert min(BOUND, fits) <= limit.samples <= min(BOUND, 1.3 * fits)


def test_the_cache_lost_at_a_swap_is_no_pressure():
    limit = Limit.at_bound(BOUND, LEAST)
    assert limit.step(CacheStatus(preemptions=32, usage=0.4, running=32, waiting=8), 40, 1).places == BOUND


@pytest.mark.parametrize(
    ("cache", "num_unfinished"),
    [
        (CacheStatus(preemptions=1), 0),
        (CacheStatus(preemptions=1, usage=0.5, waiting=5), 20),
        (CacheStatus(preemptions=1, running=5), 20),
        (CacheStatus(preemptions=1, usage=0.5, running=5), 0),
    ],
    ids=["idle", "paused", "cache cleared", "about to end"],
)
def test_an_engine_that_shows_no_request_at_work_teaches_nothing(cache: CacheStatus, num_unfinished: int):
    cut = Limit.at_bound(BOUND, LEAST).step(
        CacheStatus(preemptions=1, usage=1.0, running=10, waiting=30), 40, 1
    )
    assert cut.change is Change.CUT and cut.samples < 20
    looked = cut.step(cache, num_unfinished, 50)
    assert (looked.samples, looked.in_cache, looked.usage) == (cut.samples, cut.in_cache, cut.usage)
    assert looked.num_ended == 50, "what ended before counts to no later turnover"


class Recorder(ReplicaClient):
    """Keeps how many groups each lease call wants."""

    wants: list[int]

    async def lease(self, version: int, want: int, *rest: Any) -> LeaseReply:
        self.wants.append(want)
        return await super().lease(version, want, *rest)


def test_a_replica_whose_engine_preempts_asks_for_fewer_groups_and_tells_why(tmp_path: Path):
    class Told(Recorder):
        wants: ClassVar[list[int]] = []

    with open_stage(tmp_path, DIGIT_SORT, tokens_per_s=50.0, make_client=Told) as stage:
        counts = itertools.count()
        stage.engine.cache_status = lambda: CacheStatus(0, 0, next(counts), 1.0, 4, 12)  # type: ignore[method-assign]
        stage.serve_first_version()
        wait_for(lambda: stage.census().stored_groups >= 4, "all groups that may be leased before a step")
        wait_for(lambda: len(Told.wants) > 1, "the next lease call")
        status = stage.replica.status()
    assert Told.wants[0] == 4 and max(Told.wants[1:]) == 1, Told.wants
    assert status.limit is not None and (status.limit.bound, status.limit.places) <= (16, 7)
    assert status.counters["limit/cut"] > 0


def test_a_replica_s_limit_grows_with_what_has_ended_since_its_cut(tmp_path: Path):
    with open_stage(tmp_path, DIGIT_SORT, tokens_per_s=50.0) as stage:
        looks = itertools.count()

        def tell() -> CacheStatus:
            look = next(looks)
            return CacheStatus(0, 0, min(look, 2), *((1.0, 4, 12) if look < 3 else (0.5, 4, 0)))

        stage.engine.cache_status = tell  # type: ignore[method-assign]
        stage.serve_first_version()
        wait_for(lambda: stage.replica.status().counters.get("limit/grow", 0) > 0, "a limit that grows")
        assert "limit/none" not in stage.replica.status().counters, "only changes are counted"


def test_a_replica_whose_engine_tells_nothing_keeps_its_bound(tmp_path: Path):
    with open_stage(tmp_path, DIGIT_SORT) as stage:
        stage.serve_first_version()
        wait_for(lambda: stage.census().stored_groups >= 4, "groups")
        assert stage.replica.status().limit == LimitStatus(16, 16, "none")


def test_the_metrics_tell_the_tightest_limit_and_its_changes_by_reason():
    engine = {"tokens": 1, "busy_s": 1.0, "cache": {"usage": 0.5}}
    told = {
        "rollout.0": engine
        | {"limit": {"places": 10, "bound": 40, "change": "cut"}, "counters": {"limit/cut": 2}},
        "rollout.1": engine
        | {"limit": {"places": 40, "bound": 40, "change": "grow"}, "counters": {"limit/cut": 1}},
        "rollout.2": engine | {"cache": None, "limit": {"places": 1, "bound": 40, "change": "none"}},
    }
    meter = Meter()
    for time_s in (1.0, 1e6):
        row = meter.update(time_s, statuses_of(told))
        assert (row["perf/rollout_limit"], row["perf/rollout_limit/cut"]) == (0.25, 3), "since the start"
