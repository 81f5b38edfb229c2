"""Replicas join and leave at any time, in the middle of a transfer too; the learner does not notice."""

from __future__ import annotations

import pytest

from tests.weight_sync.cluster import Fault, wait_until
from tests.weight_sync.faults.outcomes import bound_s, check_transfers, finish
from tests.weight_sync.faults.stage import SLACK_S, Stage, running_stage

pytestmark = pytest.mark.long
SLOW_S = 0.3
"""Per bucket: a transfer then takes over a second, and is under way while a test acts."""


def counters(stage: Stage) -> dict[str, int]:
    return dict(stage.status("coordinator").counters)


def wait_for_transfer(stage: Stage, name: str) -> None:
    wait_until(lambda: stage.status(name).transfers == 1, f"a transfer to {name} to begin")


def test_a_late_joiner_is_ready_after_one_transfer_and_one_load(tmp_path):
    with running_stage(tmp_path, num_replicas=1) as stage:
        stage.publish(1)
        stage.wait_served(1, [0])
        stage.party("learner").end()  # it is not needed
        stage.start("receiver.1")
        stage.start("engine.1")
        stage.replicas.append(1)
        stage.wait_served(1, [1])
        (load,) = stage.loads(1)
        allowed_s = stage.status("receiver.1").longest_transfer_s + load.at_s - load.began_s + 1.0
        assert load.at_s - stage.hello_s("receiver.1") <= allowed_s + SLACK_S
        wait_until(lambda: stage.status("coordinator").members["receiver.1"].state == "READY", "READY")
        assert not stage.blamed() and counters(stage).get("rounds_failed", 0) == 0
        stage.start("learner")
        check_transfers(stage)
        finish(stage)


def test_the_learner_publishes_on_while_a_joiner_hangs_in_its_transfer(tmp_path):
    with running_stage(tmp_path, num_replicas=1) as stage:
        stage.publish(1)
        stage.wait_served(1, [0])
        stage.start("receiver.1")
        stage.arm("receiver.1", "stop", "receiver.bucket", ("receiver.1",))
        stage.start("engine.1")
        stage.replicas.append(1)
        stage.publish(2)
        stage.wait_for_strike("receiver.1")
        stage.tell_learner(3)
        error, seconds = stage.hear_learner()
        assert not error and seconds < stage.timing.deadline_s, (error, seconds)
        stage.wait_served(3, [0], bound_s(stage))
        stage.bring_back("receiver.1")
        stage.wait_served(3, [1], 2 * bound_s(stage))
        check_transfers(stage, ("receiver.1",))
        finish(stage)


def test_who_joins_in_the_middle_of_a_transfer_gets_the_version_and_breaks_nothing(tmp_path):
    faults = {"receiver.0": Fault("slow", 2, None, seconds=SLOW_S)}
    with running_stage(tmp_path, faults=faults) as stage:
        stage.serve(1)
        stage.publish(2)
        wait_for_transfer(stage, "receiver.0")
        stage.add_replica(2)
        assert stage.status("receiver.0").transfers == 1, "the transfer ended too early for this test"
        stage.wait_served(2, stage.replicas, bound_s(stage))
        assert counters(stage).get("rounds_failed", 0) == 0 and not stage.blamed()
        check_transfers(stage)
        finish(stage)


@pytest.mark.parametrize("leaver", [0, 1], ids=["the slow one", "another one"])
def test_who_leaves_in_the_middle_of_a_transfer_costs_the_others_nothing_but_time(leaver, tmp_path):
    faults = {"receiver.0": Fault("slow", 2, None, seconds=SLOW_S)}
    with running_stage(tmp_path, num_replicas=3, faults=faults) as stage:
        stage.serve(1)
        stage.publish(2)
        wait_for_transfer(stage, "receiver.0")
        stage.remove_replica(leaver)
        stage.wait_served(2, stage.replicas, 2 * bound_s(stage))
        stage.serve(3, bound_s(stage))
        assert not [line for line in stage.blamed() if not line.startswith(f"receiver.{leaver}")]
        check_transfers(stage)
        finish(stage)


def test_no_more_replicas_swap_at_once_than_configured(tmp_path):
    with running_stage(tmp_path, num_replicas=4, parallelism=2, load_s=0.3) as stage:
        stage.serve(1)
        loads = [load for index in stage.replicas for load in stage.loads(index)]
        at_once = [sum(other.began_s <= load.began_s < other.at_s for other in loads) for load in loads]
        assert max(at_once) == 2
        check_transfers(stage)
        finish(stage)


def test_a_replica_pinned_in_the_middle_of_a_transfer_stays_at_its_version(tmp_path):
    faults = {"receiver.0": Fault("slow", 2, None, seconds=SLOW_S)}
    with running_stage(tmp_path, faults=faults) as stage:
        stage.serve(1)
        stage.publish(2)
        wait_for_transfer(stage, "receiver.0")
        stage.party("engine.0").arm("engine.pins")
        wait_until(lambda: is_pinned(stage), "the replica to be pinned")
        stage.wait_served(2, [1], 2 * bound_s(stage))
        stage.publish(3)
        stage.wait_served(3, [1], bound_s(stage))
        assert stage.served(0) == 1
        stage.party("engine.0").arm("engine.unpins")
        stage.wait_served(3, [0], bound_s(stage))
        assert not stage.blamed()
        check_transfers(stage)
        finish(stage)


def is_pinned(stage: Stage) -> bool:
    return bool(stage.status("coordinator").members["receiver.0"].pinned)
