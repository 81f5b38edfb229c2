"""Bad bytes, bad loads, peers that come in another order or are slow: the others do not suffer for it."""

from __future__ import annotations

import asyncio
import signal
import time

import pytest

from asyncrl.core.errors import DeadlineExceeded
from asyncrl.core.runtime.threads import ThreadRuntime
from tests.weight_sync.cluster import Fault, wait_until
from tests.weight_sync.faults.cases import FIRST, LAST, MIDDLE
from tests.weight_sync.faults.outcomes import bound_s, check_transfers, finish
from tests.weight_sync.faults.stage import SERVICES, Stage, running_stage
from tests.weight_sync.faults.traces import state_of
from weight_sync.link import ReceiverLink

pytestmark = pytest.mark.long


def counters(stage: Stage) -> dict[str, int]:
    return dict(stage.status("coordinator").counters)


@pytest.mark.parametrize("bucket", [FIRST, MIDDLE, LAST])
@pytest.mark.parametrize("number", [2, None], ids=["once", "always"])
def test_a_corrupt_bucket_is_never_loaded_and_costs_only_its_receiver(bucket, number, tmp_path):
    faults = {"receiver.0": Fault("flip", number, bucket)}
    with running_stage(tmp_path, faults=faults) as stage:
        newest = 1 if number is None else 2
        for version in (1, 2):
            stage.publish(version)
            stage.wait_served(version, [0, 1] if version < newest else [1], bound_s(stage))
        wait_until(lambda: "receiver.0: digest" in stage.blamed(), "the receiver to be named", bound_s(stage))
        stage.publish(3)
        stage.wait_served(3, [0, 1] if number else [1], bound_s(stage))
        assert number or stage.loads(0) == []
        assert {line.split(":")[0] for line in stage.blamed()} == {"receiver.0"}
        check_transfers(stage)
        finish(stage)


def test_a_load_that_fails_half_way_stays_paused_and_loads_again_from_staging(tmp_path):
    with running_stage(tmp_path) as stage:
        stage.serve(1)
        wait_until(lambda: counters(stage).get("rounds") == 1, "the first round to be over")
        stage.party("engine.0").arm("kill:engine.fails@2")
        stage.serve(2, bound_s(stage))
        assert [(load.number, load.ok) for load in stage.loads(0)] == [(1, True), (2, False), (2, True)]
        wait_until(lambda: counters(stage).get("failed_loads") == 1, "the failed load to be counted")
        wait_until(lambda: counters(stage).get("rounds") == 2, "the second round to be over")
        stage.serve(3, bound_s(stage))
        wait_until(lambda: counters(stage).get("rounds") == 3, "no version to have been sent twice")
        check_transfers(stage)
        finish(stage)


def test_a_replica_takes_no_leases_while_its_receiver_is_gone(tmp_path):
    with running_stage(tmp_path, num_replicas=1) as stage:
        stage.serve(1)
        stage.party("engine.0").end()  # this test is in its place
        link_address = stage.service("receiver.0").address

        async def poll() -> list[bool]:
            link = ReceiverLink(ThreadRuntime(), link_address)
            fenced = [link.is_fenced]
            stage.party("receiver.0").signal(signal.SIGKILL)
            with pytest.raises(DeadlineExceeded):
                await link.next_staged(1, 0.0)
            fenced.append(link.is_fenced)
            stage.bring_back("receiver.0")
            end = time.monotonic() + bound_s(stage)
            while link.is_fenced and time.monotonic() < end:  # it was silent: first it says what it serves
                await link.next_staged(1, 0.1)
            link.close()
            return [*fenced, link.is_fenced]

        assert asyncio.run(poll()) == [False, True, False]
        stage.start("engine.0")
        stage.serve(2, bound_s(stage))
        check_transfers(stage)
        finish(stage)


@pytest.mark.parametrize("late", ["publisher", "receiver.0", "receiver.1"])
def test_members_of_a_group_may_meet_in_any_order(late, tmp_path):
    with running_stage(tmp_path) as stage:
        point = "publisher.transfer@1" if late == "publisher" else "receiver.transfer@1"
        stage.arm(late, "stop", point, (late,))
        stage.tell_learner(1)
        stage.wait_for_strike(late)
        others = {"publisher", "receiver.0", "receiver.1"} - {late}
        wait_until(lambda: all(stage.status(name).transfers == 1 for name in others), "the others to meet")
        stage.bring_back(late)
        stage.hear_learner()
        stage.wait_served(1, stage.replicas, bound_s(stage))
        check_transfers(stage)
        finish(stage)


def test_processes_may_be_started_in_the_opposite_order(tmp_path):
    with running_stage(tmp_path, num_replicas=0, services=()) as stage:
        for name in ("engine.1", "engine.0", "receiver.1", "receiver.0", "publisher", "coordinator"):
            stage.start(name)
        stage.replicas += [0, 1]
        stage.serve(1)
        assert not stage.blamed()
        assert all(state_of(stage.party(name).pid) != "X" for name in SERVICES)
        check_transfers(stage)
        finish(stage)


def test_a_receiver_that_is_ten_times_slower_holds_nobody_up_for_longer_than_a_deadline(tmp_path):
    faults = {"receiver.0": Fault("slow", None, None, seconds=0.4)}
    with running_stage(tmp_path, num_replicas=3, faults=faults) as stage:
        for number in range(1, 7):
            stage.publish(number)
            stage.wait_served(number, [1, 2], bound_s(stage))
        stage.wait_served(6, [0], 2 * bound_s(stage))
        assert {load.ok for index in stage.replicas for load in stage.loads(index)} == {True}
        check_transfers(stage)
        finish(stage)
