"""Two of a kind: a learner that was thought dead and writes on, a coordinator that speaks on."""

from __future__ import annotations

import signal

import pytest

from tests.weight_sync.cluster import WAIT_S, wait_until
from tests.weight_sync.faults.cases import LEARNER_POINTS
from tests.weight_sync.faults.outcomes import bound_s, check_transfers, finish
from tests.weight_sync.faults.stage import running_stage
from tests.weight_sync.faults.traces import num_segments

pytestmark = pytest.mark.long


@pytest.mark.parametrize("point", LEARNER_POINTS)
@pytest.mark.parametrize("publisher_dies", [False, True], ids=["", "after the publisher has died too"])
def test_a_thawed_learner_is_refused_once_a_newer_one_has_opened(point, publisher_dies, tmp_path):
    with running_stage(tmp_path) as stage:
        stage.serve(1)
        stage.arm("learner", "stop", point, ("learner",))
        stage.tell_learner(2)
        stage.wait_for_strike("learner")
        zombie = stage.others["learner"]
        stage.start("learner")
        stage.serve(3, bound_s(stage))
        if publisher_dies:
            stage.party("publisher").signal(signal.SIGKILL)
            stage.bring_back("publisher")
        zombie.signal(signal.SIGCONT)
        assert zombie.lifeline.poll(WAIT_S)
        error, _ = zombie.lifeline.recv()
        assert error.startswith("FencedError"), error
        stage.serve(4, bound_s(stage))
        zombie.end()
        assert not [load for index in stage.replicas for load in stage.loads(index) if load.number == 2]
        assert num_segments(stage.cluster.shm_prefix, "publisher") <= 3
        finish(stage)


@pytest.mark.parametrize("point", LEARNER_POINTS)
def test_a_learner_killed_while_it_hands_over_leaves_room_for_the_next_one(point, tmp_path):
    with running_stage(tmp_path) as stage:
        stage.serve(1)
        for number in (2, 3, 4, 5):  # more often than there are segments
            stage.arm("learner", "kill", point.replace("@2", f"@{number}"), ("learner",))
            stage.tell_learner(number)
            stage.wait_for_strike("learner")
            stage.bring_back("learner")
        stage.serve(6, bound_s(stage))
        assert not stage.blamed()
        assert num_segments(stage.cluster.shm_prefix, "publisher") <= 3
        finish(stage)


def test_two_coordinators_at_once_do_no_harm_and_the_younger_one_remains(tmp_path):
    with running_stage(tmp_path) as stage:
        stage.serve(1)
        stage.arm("coordinator", "stop", "coordinator.transfer@2", ("coordinator",))
        stage.publish(2)
        stage.wait_for_strike("coordinator")
        older = stage.cluster.children["weight_sync.0"]
        stage.start("coordinator")  # under the same address: who connects from here on finds this one
        stage.add_replica(2)
        wait_until(lambda: "receiver.2" in stage.status("coordinator").members, "the joiner to be known")
        older.signal(signal.SIGCONT)
        stage.publish(3)
        stage.wait_served(3, [0, 1], 2 * bound_s(stage))
        older.kill()
        stage.publish(4)
        stage.wait_served(4, [0, 1, 2], 2 * bound_s(stage))
        check_transfers(stage)
        finish(stage)


def test_a_thawed_receiver_whose_place_was_taken_does_not_get_it_back(tmp_path):
    with running_stage(tmp_path) as stage:
        stage.serve(1)
        stage.arm("receiver.0", "stop", "receiver.bucket@2.1", ("receiver.0",))
        stage.publish(2)
        stage.wait_for_strike("receiver.0")
        zombie = stage.service("receiver.0")
        stage.party("engine.0").end()
        for name in ("receiver.0", "engine.0"):
            stage.start(name)
        stage.wait_served(2, [0, 1], bound_s(stage))
        zombie.signal(signal.SIGCONT)
        refused = "refused_hellos"
        wait_until(
            lambda: stage.status("coordinator").counters.get(refused, 0) > 0, "the older to be refused"
        )
        for number in (3, 4):
            stage.publish(number)
            stage.wait_served(number, [0, 1], bound_s(stage))
        zombie.kill()
        finish(stage)
