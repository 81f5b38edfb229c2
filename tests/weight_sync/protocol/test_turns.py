"""Reports that a coordinator finds together are settled together, with one look at the members."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from asyncrl.core.errors import FencedError
from asyncrl.core.rpc import Request
from asyncrl.core.runtime.threads import ThreadEvent
from asyncrl.core.staleness import PolicyVersion
from tests.runtimes import ManualRuntime
from tests.weight_sync.protocol.world import TIMING, World, receiver_hello
from weight_sync.coordination.coordinator import (
    DESCRIBE_S,
    PICTURE_MEMBERS,
    PICTURE_S,
    CoordinatorService,
)
from weight_sync.coordination.journal import read_fences
from weight_sync.protocol.members import PublisherInfo
from weight_sync.protocol.protocol import PUBLISHER, Coordination
from weight_sync.protocol.round_manager import RoundManager
from weight_sync.protocol.rounds import Timing
from weight_sync.protocol.state import ID_BITS
from weight_sync.protocol.swap_scheduler import MAX_LOAD_FAILURES
from weight_sync.sync_records import JOURNAL_FILE, MembersRecord, parse_entry

NAMES = [f"receiver.{index}" for index in range(64)]


def test_reports_that_come_together_cost_one_look_at_the_members(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[float] = []
    advance = RoundManager.advance

    def count(rounds: RoundManager, now: float) -> None:
        looks.append(now)
        advance(rounds, now)

    monkeypatch.setattr(RoundManager, "advance", count)
    world = World(*NAMES, parallelism=len(NAMES), is_prompt=False)
    world.obey(*NAMES)
    looks.clear()
    world.publish(1)
    world.obey(*NAMES)
    assert all(world.member(name).serving == 1 for name in NAMES)
    assert len(looks) == 4, "published; accepted; verified and sent; loaded"


@pytest.mark.parametrize("event", ["pin", "drain", "retire"])
def test_who_goes_in_the_turn_in_which_the_last_accepts_is_not_in_the_transfer(event: str) -> None:
    world = World("a", "b", "c", is_prompt=False)
    world.publish(1)
    for order in world.take():
        world.obey_order(order, loads=False)
    getattr(world.coordination, event)("b", world.now)
    world.obey("a", "c")
    assert [order.to for order in world.orders("transfer")] == [PUBLISHER, "a", "c"]
    assert world.member("a").serving == world.member("c").serving == 1
    assert not world.coordination.culprit


class Asked(Request):
    """A request that keeps its answer, and what `look` saw when it was given."""

    def __init__(self, op: str, look: Callable[[], Any] = dict, **args: Any) -> None:
        super().__init__(op, args, [], b"", 1, None)  # type: ignore[arg-type]
        self.look = look
        self.answers: list[tuple[dict[str, Any], Any]] = []

    def reply(self, frames: Any = (), **args: Any) -> None:
        self.answers.append((args, self.look()))


INFO = {"serving": 0, "staged": 0, "attended": True, "pinned": False}
ME = {"name": "receiver.0", "incarnation": "1"}


@contextmanager
def serving(run_dir: Path) -> Iterator[tuple[CoordinatorService, Coordination, ManualRuntime]]:
    clock, coordination = ManualRuntime(100.0), Coordination(TIMING, token=3)
    service = CoordinatorService(coordination, clock, f"ipc://{run_dir}/c", None, run_dir)
    over = ThreadEvent()
    over.set()
    try:
        service.handle(Asked("hello", **ME, **INFO))
        service.end_turn()
        yield service, coordination, clock
    finally:
        service.run(over)


def test_a_fence_is_written_down_before_its_member_hears_of_it(tmp_path: Path) -> None:
    """Also if the member polls a second time in the very turn in which it is fenced."""
    with serving(tmp_path) as (service, coordination, _):
        poll = Asked("next_order", lambda: read_fences(tmp_path), **ME, after=3 << ID_BITS)
        service.handle(poll)
        for seq in range(1, MAX_LOAD_FAILURES + 1):
            fields = {"number": 1, "ok": False, "error": "no room"}
            service.handle(Asked("report", **ME, event="loaded", fields=fields, seq=seq))
        service.handle(Asked("next_order", **ME, after=3 << ID_BITS))
        assert coordination.members["receiver.0"].is_fenced and not poll.answers
        service.end_turn()
    [(answer, written)] = poll.answers
    assert answer["fenced"] and not answer["orders"] and written == {"receiver.0": 1}


def test_a_coordinator_that_hears_of_its_successor_keeps_what_the_same_turn_led_to(tmp_path: Path) -> None:
    with serving(tmp_path) as (service, coordination, clock):
        coordination.publisher_hello(PublisherInfo("p", "", 1, clock.now()), None, clock.now())
        poll = Asked("next_order", **ME, after=3 << ID_BITS)
        service.handle(poll)
        coordination.published(PolicyVersion(1, 0), clock.now())
        with pytest.raises(FencedError):
            service.handle(Asked("report", **ME, event="attended", fields={}, seq=1, token=4))
        service.end_turn()
        assert not poll.answers, "without the successor it would be offered version 1"


def test_a_coordinator_that_hears_of_its_successor_ends_polls_without_orders(tmp_path: Path) -> None:
    with serving(tmp_path) as (service, coordination, clock):
        coordination.publisher_hello(PublisherInfo("p", "", 1, clock.now()), None, clock.now())
        coordination.published(PolicyVersion(1, 0), clock.now())
        lost = poll(service)
        assert [order["kind"] for order in lost.answers[0][0]["orders"]] == ["offer"]
        again = Asked("next_order", **ME, after=3 << ID_BITS)  # the answer did not arrive
        service.handle(again)
        with pytest.raises(FencedError):
            service.handle(Asked("report", **ME, event="attended", fields={}, seq=1, token=4))
        service.end_turn()
        clock.advance(TIMING.poll_s)
        service.tick(0.0)
        [(answer, _)] = again.answers
        assert not answer["orders"]


def poll(service: CoordinatorService) -> Asked:
    """Poll as the member that has acknowledged nothing."""
    asked = Asked("next_order", **ME, after=3 << ID_BITS)
    service.handle(asked)
    service.end_turn()
    return asked


def report(service: CoordinatorService, seq: int, event: str, **fields: Any) -> None:
    service.handle(Asked("report", **ME, event=event, fields=fields, seq=seq))


@pytest.mark.parametrize(
    ("num_members", "num_pictures"), [(1, 4), (PICTURE_MEMBERS, 4), (2 * PICTURE_MEMBERS, 2)]
)
def test_the_members_of_a_large_fleet_are_journalled_less_often(
    tmp_path: Path, num_members: int, num_pictures: int
) -> None:
    with serving(tmp_path) as (service, _, clock):
        for index in range(1, num_members):
            service.handle(Asked("hello", **ME | {"name": f"receiver.{index}"}, **INFO))
        service.end_turn()
        clock.advance(PICTURE_MEMBERS * PICTURE_S)
        for number in range(1, 5):
            report(service, number, "loaded", number=number, ok=True, error="")
            service.end_turn()
            clock.advance(PICTURE_S)
        lines = (tmp_path / JOURNAL_FILE).read_text().splitlines()
    pictures = [entry for line in lines if isinstance(entry := parse_entry(line.encode()), MembersRecord)]
    assert sum(picture.members["receiver.0"].version > 0 for picture in pictures) == num_pictures


def test_a_poll_behind_one_that_was_answered_has_all_its_time(tmp_path: Path) -> None:
    with serving(tmp_path) as (service, coordination, clock):
        coordination.publisher_hello(PublisherInfo("p", "", 1, clock.now()), None, clock.now())
        first = poll(service)
        clock.advance(TIMING.poll_s / 2)
        coordination.published(PolicyVersion(1, 0), clock.now())
        service.end_turn()
        [order] = first.answers[0][0]["orders"]
        second = Asked("next_order", **ME, after=order["seq"])
        service.handle(second)
        service.end_turn()
        clock.advance(TIMING.poll_s / 2)
        service.tick(0.0)
        assert not second.answers, "the first one would end now"
        clock.advance(TIMING.poll_s / 2)
        service.tick(0.0)
        assert [answer["orders"] for answer, _ in second.answers] == [()]


def test_a_successor_in_the_turn_of_its_forerunner_s_abort_is_ordered_nothing_of_it(tmp_path: Path) -> None:
    """It would answer that it had not begun to send, and be blamed for it."""
    with serving(tmp_path) as (service, coordination, clock):
        publisher = {"store_host": "h", "store_port": 1}
        service.handle(Asked("publisher_hello", name=PUBLISHER, incarnation="p1", started_ms=1, **publisher))
        coordination.published(PolicyVersion(1, 0), clock.now())
        service.end_turn()
        assert coordination.round is not None
        number = coordination.round.id
        report(service, 1, "accepted", round=number)
        service.end_turn()
        clock.advance(0.1)
        report(service, 2, "failed", round=number, cause="transport")
        service.handle(Asked("publisher_hello", name=PUBLISHER, incarnation="p2", started_ms=2, **publisher))
        service.end_turn()
        asked = Asked("next_order", name=PUBLISHER, incarnation="p2", after=0)
        service.handle(asked)
        service.end_turn()
        assert not any(order["kind"] == "abort" for answer, _ in asked.answers for order in answer["orders"])


def test_a_process_in_the_turn_of_its_forerunner_s_offer_is_offered_once(tmp_path: Path) -> None:
    with serving(tmp_path) as (service, coordination, clock):
        coordination.publisher_hello(PublisherInfo("p", "", 1, clock.now()), None, clock.now())
        coordination.published(PolicyVersion(1, 0), clock.now())
        coordination.take_records()  # settles: the forerunner is offered version 1
        service.handle(Asked("hello", **ME | {"incarnation": "2"}, **INFO))
        service.end_turn()
        asked = Asked("next_order", **ME | {"incarnation": "2"}, after=0)
        service.handle(asked)
        service.end_turn()
        assert [order["kind"] for order in asked.answers[0][0]["orders"]] == ["offer"]


@pytest.mark.parametrize(
    ("info", "event", "fields", "attribute", "wanted"),
    [
        ({"pinned": True}, "unpin", {}, "is_pinned", False),
        ({"serving": 1}, "loaded", {"number": 2, "ok": True, "error": ""}, "serving", 2),
        ({"attended": False}, "attended", {}, "is_attended", True),
    ],
)
def test_a_hello_that_a_report_has_overtaken_undoes_nothing_and_is_said_again(
    tmp_path: Path, info: dict[str, Any], event: str, fields: dict[str, Any], attribute: str, wanted: object
) -> None:
    with serving(tmp_path) as (service, coordination, _):
        service.handle(Asked("hello", **ME, **INFO | info, seq=1, told=0))
        report(service, 1, event, **fields)
        late = Asked("hello", **ME, **INFO | info, seq=2, told=0)  # written before the report, read behind it
        service.handle(late)
        service.end_turn()
        assert getattr(coordination.members["receiver.0"], attribute) == wanted
        assert late.answers[0][0]["outdated"]
        after = Asked("hello", **ME, **INFO | info, seq=3, told=1)
        service.handle(after)
        service.end_turn()
        assert not after.answers[0][0]["outdated"]


def test_a_status_is_as_old_as_the_fleet_is_large(tmp_path: Path) -> None:
    with serving(tmp_path) as (service, coordination, clock):
        service.tick(0.0)
        for index in range(99):
            coordination.hello(receiver_hello(f"b{index}", "1"), clock.now())
        service.tick(0.0)
        assert len(service.status().members) == 1, "still the last one"
        clock.advance(DESCRIBE_S)
        service.tick(0.0)
        assert len(service.status().members) == 100
        clock.advance(99 * DESCRIBE_S)
        coordination.hello(receiver_hello("late", "1"), clock.now())
        service.tick(0.0)
        assert len(service.status().members) == 100
        clock.advance(2 * DESCRIBE_S)
        service.tick(0.0)
        assert len(service.status().members) == 101


def test_the_coordination_is_due_with_its_next_deadline_and_every_half_poll_at_the_latest() -> None:
    timing = Timing(deadline_s=8.0, offer_s=0.2, settle_s=0.1, silence_s=3.0, dead_s=30.0)
    coordination = Coordination(timing, token=1)
    coordination.tick(100.0)
    assert coordination.wake_at() == 100.0 + timing.poll_s / 2
    coordination.publisher_hello(PublisherInfo("p", "", 1, 100.0), PolicyVersion(1, 0), 100.0)
    coordination.hello(receiver_hello("receiver.0", "1", attended=True), 100.0)
    assert coordination.wake_at() <= 100.0, "what has happened is to be settled"
    assert [order.kind for order in coordination.take_orders()] == ["offer"]
    assert coordination.wake_at() == 100.0 + timing.offer_s
    coordination.tick(100.2)
    assert not coordination.rounds and coordination.culprit.startswith("receiver.0")
    assert coordination.wake_at() > 100.2, "a deadline that has passed is not due for ever"
