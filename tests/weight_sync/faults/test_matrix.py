"""Every process of weight sync is killed and stopped in every phase; the others go on, by their deadlines."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests.weight_sync.cluster import wait_until
from tests.weight_sync.faults.cases import MATRIX, Case
from tests.weight_sync.faults.outcomes import bound_s, check_loads, check_nothing_is_left, check_transfers
from tests.weight_sync.faults.stage import SLACK_S, TIMING, Stage, running_stage, wait_seconds
from tests.weight_sync.faults.traces import holdings_of
from weight_sync.protocol.rounds import Timing
from weight_sync.publisher_client import CALL_DEADLINE_S

STOP_S = 5.5
"""Longer than the deadline and its slack, so that who just waits for the end of a stop is found out."""
QUICK_NAMES = ("kill receiver.0 at middle",)
LONG_STOP_NAMES = (
    "stop publisher at first bucket",
    "stop coordinator at last bucket",
    "stop publisher at middle",
    "stop receiver.0 at middle",
    "stop engine.0 at swap",
)
LONG_STOPS = [case for case in MATRIX if case.name in LONG_STOP_NAMES]
QUICK = [case for case in MATRIX if case.name in QUICK_NAMES]


@pytest.mark.parametrize("case", QUICK, ids=lambda case: case.name)
def test_the_others_go_on(case, tmp_path):
    play(case, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("case", [case for case in MATRIX if case not in QUICK], ids=lambda case: case.name)
def test_the_others_go_on_in_every_phase(case, tmp_path):
    play(case, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("case", LONG_STOPS, ids=lambda case: case.name)
def test_the_others_go_on_while_one_is_stopped_until_it_counts_as_dead(case, tmp_path):
    play(case, tmp_path, replace(TIMING, dead_s=20.0), stop_s=30.0)


def play(case: Case, folder: Path, timing: Timing = TIMING, stop_s: float = STOP_S) -> None:
    """Bring version 1 everywhere, strike on the way of version 2, let all return, and bring version 3."""
    with running_stage(folder, case.num_replicas, timing=timing) as stage:
        stage.serve(1)
        witness, point = case.trigger
        stage.arm(witness, case.kind, point, case.victims)
        stage.tell_learner(2)
        stage.wait_for_strike(*case.victims)
        endure(stage, case, stop_s)
        stage.serve(3, bound_s(stage))
        check(stage, case)
        stage.end()
        check_nothing_is_left(stage)


def endure(stage: Stage, case: Case, stop_s: float) -> None:
    """Wait until the survivors have version 2 without the victims, or with them where they need them."""
    struck_s = time.monotonic()
    survivors = [
        index for index in stage.replicas if not {f"receiver.{index}", f"engine.{index}"} & set(case.victims)
    ]
    if not case.is_needed:
        stage.wait_served(2, not_needing_victim(stage, case, survivors), bound_s(stage))
    if case.blamed:
        wait_until(lambda: is_named(stage, case), f"someone to say '{case.blamed}'", bound_s(stage))
    elif case.victims == ("coordinator",):
        wait_until(lambda: is_missed(stage), "the others to miss the coordinator", bound_s(stage))
    for victim in [name for name in case.victims if name.startswith("receiver")]:
        member = stage.status("coordinator").members[victim]
        assert member.fenced and member.state == "SUSPECT", member
    if case.kind == "stop":
        wait_seconds(max(0.0, struck_s + stop_s - time.monotonic()))
    stage.bring_back(*case.victims)
    if not is_handed_over(stage, case):
        stage.publish(2)  # as a learner does that was told to come again
    stage.wait_served(2, survivors, bound_s(stage))


def not_needing_victim(stage: Stage, case: Case, survivors: list[int]) -> list[int]:
    """Return the survivors that get version 2 without the victim.

    The phase is that of replica 0: another replica may still be receiving when the publisher is struck.
    """
    if case.victims != ("publisher",) or case.phase not in ("swap", "commit"):
        return survivors
    status = {index: stage.status(f"receiver.{index}") for index in survivors}
    return [index for index, one in status.items() if index == 0 or max(one.staged, one.version) >= 2]


def is_named(stage: Stage, case: Case) -> bool:
    """Tell whether everyone who is to blame is named, in the log and in the status."""
    lines = stage.blamed()
    is_counted = stage.status("coordinator").counters.get("culprits", 0) >= len(case.blamed)
    return is_counted and all(any(line.startswith(start) for line in lines) for start in case.blamed)


def is_missed(stage: Stage) -> bool:
    return "the coordinator does not answer" in stage.log_of("receiver.0")


def is_handed_over(stage: Stage, case: Case) -> bool:
    """The learner hands its version over whatever happens to others, but for the publisher."""
    if case.victims == ("learner",) and case.kind == "kill":
        return True  # it was killed after that
    error, seconds = stage.hear_learner()
    if case.victims == ("publisher",):
        assert seconds <= CALL_DEADLINE_S + SLACK_S
        return not error
    assert not error and (case.victims == ("learner",) or seconds <= stage.timing.deadline_s), error
    return True


def check(stage: Stage, case: Case) -> None:
    check_waits(stage, case)
    check_loads(stage)
    innocent = [line for line in stage.blamed() if not line.startswith(case.blamed)]
    assert not innocent, "blamed without a reason"
    wait_until(lambda: stage.states() == {"READY"}, "all replicas to be READY", bound_s(stage))
    for name in stage.names():
        held = holdings_of(stage.party(name).pid)
        assert held.num_children == 0, name


def check_waits(stage: Stage, case: Case) -> None:
    """No service waited longer than its deadline, by its own clock."""
    check_transfers(stage, case.victims)
    if "coordinator" not in case.victims:
        longest_s = stage.status("coordinator").longest_round_s
        assert longest_s <= stage.timing.deadline_s + SLACK_S
