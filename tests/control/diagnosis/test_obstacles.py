"""Obstacles of a run: their source, their blocking, the time of their report, the end of a run by one."""

from __future__ import annotations

from typing import Any

import pytest

from asyncrl.control.diagnosis import obstacles
from asyncrl.control.diagnosis.obstacles import MAX_TRIES, verdict
from asyncrl.control.diagnosis.watch import AWAY_S, GROWTH, ObstacleWatch
from asyncrl.core.obstacle import MAX_REASON_CHARACTERS, Cause, Obstacle
from tests.statuses import statuses_of

REFUSED = "vLLM refused the load of version 16: the probe does not match"


def told(cause: Cause, reason: str = "it did not work", count: int = 1) -> list[Obstacle]:
    """What a service reports."""
    return [Obstacle("", cause, reason, count)]


def gather(statuses: dict[str, dict[str, Any]], stall: str = "") -> list[Obstacle]:
    return obstacles.gather(statuses_of(statuses), stall)


def replica(state: str = "READY", cause: Cause | None = None, count: int = 1, **more: Any) -> dict[str, Any]:
    return {"state": state, "obstacles": [] if cause is None else told(cause, REFUSED, count), **more}


def test_an_obstacle_is_told_under_its_services_name_and_in_its_words() -> None:
    away = told(Cause.JOURNAL_AWAY, "Redis at localhost:1 is away: Connection refused")
    (found,) = gather({"buffer.0": {"state": "READY", "obstacles": away}, "learner.0": {"state": "READY"}})
    assert (found.service, found.cause, found.blocks) == ("buffer.0", Cause.JOURNAL_AWAY, True)
    assert found.sentence == "Redis at localhost:1 is away: Connection refused"


def test_a_reason_is_cut_to_a_length_that_a_status_can_carry() -> None:
    (found,) = gather({"rollout.0": {"state": "READY", "obstacles": told(Cause.GROUPS_FAIL, "x" * 9999)}})
    assert len(found.reason) == MAX_REASON_CHARACTERS


@pytest.mark.parametrize(
    ("second", "blocks"),
    [
        (replica(), False),
        (replica(standby=True), True),
        (replica("SYNCING"), True),
        (replica("READY", Cause.GROUPS_FAIL), True),
    ],
)
def test_a_replicas_obstacle_blocks_unless_another_replica_works_without_one(
    second: dict[str, Any], blocks: bool
) -> None:
    found = gather({"rollout.0": replica("SYNCING", Cause.WEIGHTS_REFUSED), "rollout.1": second})
    assert found[0].service == "rollout.0" and found[0].blocks is blocks


def test_what_blocks_comes_first_and_then_the_graver_cause() -> None:
    statuses = {
        "rollout.0": replica("READY", Cause.NO_AGENT),
        "rollout.1": replica("SYNCING", Cause.WEIGHTS_REFUSED),
        "buffer.0": {"state": "READY", "obstacles": told(Cause.DISK_FULL)},
        "publisher.0": {"state": "DEAD", "error": "failed: OSError: no room"},
    }
    assert [(one.service, one.blocks) for one in gather(statuses)] == [
        ("buffer.0", True),
        ("publisher.0", True),
        ("rollout.1", True),
        ("rollout.0", True),
    ]
    statuses["rollout.2"] = replica()
    assert [one.service for one in gather(statuses) if not one.blocks] == ["rollout.1"]


def test_a_redis_that_evicts_is_told_and_blocks_nothing() -> None:
    (found,) = gather({"buffer.0": {"state": "READY", "obstacles": told(Cause.JOURNAL_EVICTS)}})
    assert not found.blocks


def test_nobody_asks_only_where_every_replica_that_works_says_so() -> None:
    idle, busy = replica("READY", Cause.NO_AGENT), replica()
    assert [one.cause for one in gather({"rollout.0": idle, "rollout.1": idle})] == [Cause.NO_AGENT] * 2
    assert gather({"rollout.0": idle, "rollout.1": busy}) == []
    assert len(gather({"rollout.0": idle, "rollout.1": replica("STARTING")})) == 1


def test_why_a_service_failed_is_told_until_it_works_again() -> None:
    starting = {"rollout.0": {"state": "STARTING", "failure": "EngineDied: head_dim=16"}}
    assert [one.reason for one in gather(starting)] == ["EngineDied: head_dim=16"]
    assert gather({"rollout.0": {"state": "READY", "failure": ""}}) == []


def test_a_stall_counts_where_no_service_knows_what_blocks() -> None:
    assert [one.cause for one in gather({}, stall="no step for 60 s")] == [Cause.STALL]
    known = {"buffer.0": {"obstacles": told(Cause.JOURNAL_AWAY)}}
    assert [one.cause for one in gather(known, stall="no step for 60 s")] == [Cause.JOURNAL_AWAY]


MAX_REFUSALS, MAX_TRANSFERS = MAX_TRIES[Cause.WEIGHTS_REFUSED], MAX_TRIES[Cause.WEIGHTS_UNDELIVERED]
REFUSING = replica("SYNCING", Cause.WEIGHTS_REFUSED, MAX_REFUSALS)


@pytest.mark.parametrize(
    ("statuses", "is_over"),
    [
        ({"rollout.0": REFUSING}, True),
        ({"rollout.0": REFUSING, "rollout.1": REFUSING}, True),
        ({"rollout.0": replica("SYNCING", Cause.WEIGHTS_REFUSED, MAX_REFUSALS - 1)}, False),
        ({"rollout.0": REFUSING, "rollout.1": replica()}, False),
        ({"rollout.0": REFUSING, "rollout.1": replica("STARTING")}, False),
        ({"rollout.0": REFUSING, "rollout.1": replica("SYNCING")}, False),
        ({"rollout.0": REFUSING, "rollout.1": replica("READY", standby=True)}, True),
        ({"rollout.0": replica("READY", Cause.GROUPS_FAIL, 99)}, False),
        ({}, False),
    ],
)
def test_a_run_ends_when_all_its_replicas_have_refused_every_version_often_enough(
    statuses: dict[str, Any], is_over: bool
) -> None:
    found = verdict(gather(statuses), statuses_of(statuses))
    assert (found is not None) is is_over
    assert found is None or (found.reason, found.count) == (REFUSED, MAX_REFUSALS)


def undelivered(*receivers: str, count: int = MAX_TRANSFERS) -> dict[str, Any]:
    """Return a coordinator whose last transfers to these receivers have failed."""
    met = [Obstacle(name, Cause.WEIGHTS_UNDELIVERED, "no room", count) for name in receivers]
    return {"state": "READY", "obstacles": met}


@pytest.mark.parametrize(
    ("first", "second", "coordinator", "ends_for"),
    [
        (replica("SYNCING"), replica("SYNCING"), undelivered("receiver.0", "receiver.1"), "receiver.0"),
        (replica("READY"), replica("READY"), undelivered("receiver.0", "receiver.1"), "receiver.0"),
        (REFUSING, replica("SYNCING"), undelivered("receiver.1"), "rollout.0"),
        (replica("SYNCING"), REFUSING, undelivered("receiver.0"), "rollout.1"),
        (replica("SYNCING"), REFUSING, undelivered("receiver.0", count=MAX_TRANSFERS - 1), ""),
        (replica("SYNCING"), replica("SYNCING"), undelivered("receiver.0"), ""),
        (replica("SYNCING"), replica("SYNCING"), undelivered("receiver.1", "receiver.2"), ""),
        (replica("SYNCING"), replica("PINNED"), undelivered("receiver.0", "receiver.1"), ""),
        (replica("SYNCING"), replica("RETIRED"), undelivered("receiver.0", "receiver.1"), ""),
    ],
)
def test_a_run_ends_when_versions_reach_or_enter_no_replica(
    first: dict[str, Any], second: dict[str, Any], coordinator: dict[str, Any], ends_for: str
) -> None:
    statuses = {"rollout.0": first, "rollout.1": second, "weight_sync.0": coordinator}
    found = verdict(gather(statuses), statuses_of(statuses))
    assert (found.service if found else "") == ends_for


def one(count: int = 1, reason: str = REFUSED) -> Obstacle:
    return Obstacle("rollout.0", Cause.WEIGHTS_REFUSED, reason, count)


def test_an_obstacle_is_told_at_once_again_when_it_has_grown_and_when_it_is_over() -> None:
    watch = ObstacleWatch()
    (first,) = watch.look(100.0, [one()])
    assert first.text == REFUSED and first.obstacle.since == 100.0
    assert watch.look(101.0, [one(GROWTH - 1)]) == []
    (grown,) = watch.look(102.0, [one(GROWTH)])
    assert grown.text == f"{REFUSED} ({GROWTH} times in a row)" and grown.obstacle.since == 100.0
    assert watch.present[0].count == GROWTH
    assert watch.look(103.0, []) == [] and watch.present == []
    (over,) = watch.look(102.0 + AWAY_S, [])
    assert over.is_over and over.text == f"over after 2 s: {REFUSED}"
    assert watch.look(200.0, []) == []
    assert len(watch.look(201.0, [one()])) == 1, "it is another one"


def test_one_that_comes_and_goes_is_told_once() -> None:
    watch = ObstacleWatch()
    news = [watch.look(float(second), [one()] if second % 4 else []) for second in range(1, 200)]
    assert sum(map(len, news)) == 1


def test_another_reason_is_told_and_other_numbers_are_none() -> None:
    watch = ObstacleWatch()
    assert len(watch.look(0.0, [one(reason="version 16 refused")])) == 1
    assert watch.look(1.0, [one(reason="version 17 refused")]) == []
    assert len(watch.look(2.0, [one(reason="out of memory")])) == 1
    assert watch.look(3.0, [one(reason="version 18 refused")]) == [], "the two alternate"
