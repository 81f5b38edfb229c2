"""A replica that has nothing to do sleeps."""

from __future__ import annotations

import time
from pathlib import Path

from asyncrl.core.service_command import Drain
from rollout_service.rewards.calling import FunctionReward
from rollout_service.rewards.rules.matching import score_digit_sort
from tests.rollout.replica.replica_parts import open_stage
from tests.runtimes import CountingRuntime
from tests.waiting import wait_for

WATCHED_S = 4.0
DIGIT_SORT = FunctionReward("digit_sort", score_digit_sort)


def test_an_idle_replica_wakes_twice_a_second_at_most(tmp_path: Path) -> None:
    runtime = CountingRuntime()
    with open_stage(tmp_path, DIGIT_SORT, runtime=runtime) as stage:
        stage.serve_first_version()
        wait_for(lambda: stage.census().stored_groups >= 4, "all groups that may be leased before a step")
        time.sleep(1.0)
        began = time.monotonic()
        with runtime.counting() as counted:
            time.sleep(WATCHED_S)
        watched_s = time.monotonic() - began
    assert 0 < counted.total() <= 2 * watched_s, counted


def test_a_replica_that_has_nothing_to_do_hears_that_it_is_to_stop(tmp_path: Path) -> None:
    with open_stage(tmp_path, DIGIT_SORT) as stage:
        stage.serve_first_version()
        wait_for(lambda: stage.census().stored_groups >= 4, "all groups that may be leased before a step")
        stage.replica.command(Drain())
        wait_for(lambda: stage.state() == "RETIRED", "RETIRED: nothing else is due that would end its wait")
