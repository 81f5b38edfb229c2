"""Pending requests of the buffer: their order, their deadlines and their end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.buffer.pending_requests import MIN_KEPT, PendingRequest, PendingRequests
from asyncrl.buffer.service import RequestHandler
from asyncrl.core.experience import encode_group
from asyncrl.core.rpc import Request
from asyncrl.core.wire import Frame
from tests.buffer.parts import make_group, make_store
from tests.runtimes import ManualClock


def park(lot: PendingRequests, name: str, lane: object = "lease", deadline: float = 10.0) -> PendingRequest:
    request = Request("lease", {}, [], name.encode(), 1, None)  # type: ignore[arg-type]
    parked = PendingRequest(request, lambda: None, dict, deadline, 99.0, ("replica", name), lane)  # type: ignore[arg-type]
    lot.add(parked)
    return parked


def asked_by(lot: PendingRequests, answered: set[str], *, are_alike: bool = True) -> list[str]:
    """Offer, answer those in `answered`, and return who was asked."""
    asked: list[str] = []

    def answers(parked: PendingRequest) -> bool:
        asked.append(parked.owner[1])
        return parked.owner[1] in answered

    lot.offer(answers, are_alike=are_alike)
    return asked


def test_a_lane_whose_first_cannot_be_answered_is_not_asked_further() -> None:
    lot = PendingRequests()
    for name in "abc":
        park(lot, name)
    assert asked_by(lot, set()) == ["a"]
    assert asked_by(lot, {"a", "b"}) == ["a", "b", "c"]
    assert len(lot) == 1


def test_who_came_first_is_asked_first_across_lanes() -> None:
    lot = PendingRequests()
    for name, lane in (("a", 1), ("b", 2), ("c", 1), ("d", 2)):
        park(lot, name, lane)
    assert asked_by(lot, {"a", "b", "c", "d"}) == ["a", "b", "c", "d"]


def test_those_that_are_not_alike_are_all_asked_and_keep_their_order() -> None:
    lot = PendingRequests()
    for name in "abcd":
        park(lot, name)
    assert asked_by(lot, {"b"}, are_alike=False) == ["a", "b", "c", "d"]
    assert asked_by(lot, set(), are_alike=False) == ["a", "c", "d"]


def test_a_wait_ends_once_at_its_deadline() -> None:
    lot = PendingRequests()
    park(lot, "late", deadline=5.0)
    early = park(lot, "early", deadline=1.0)
    gone = park(lot, "gone", deadline=1.0)
    lot.remove(gone)
    assert list(lot.take_expired(2.0)) == [early]
    assert list(lot.take_expired(2.0)) == []
    assert asked_by(lot, set()) == ["late"]


def test_an_owner_is_found_while_it_waits_and_not_after() -> None:
    lot = PendingRequests()
    first, second = park(lot, "a"), park(lot, "a")
    assert lot.of(("replica", "a")) == [first, second]
    lot.remove(first)
    assert lot.of(("replica", "a")) == [second]
    assert lot.of(("replica", "b")) == []


def test_what_has_left_is_forgotten_though_the_lane_and_the_deadlines_stand_still() -> None:
    lot = PendingRequests()
    park(lot, "first", deadline=1000.0)
    for number in range(20 * MIN_KEPT):
        lot.remove(park(lot, f"{number}", deadline=1000.0))
    assert len(lot) == 1
    assert len(lot._deadlines) <= 2 * MIN_KEPT
    assert sum(map(len, lot._lanes.values())) <= 2 * MIN_KEPT


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 5)), max_size=120))
def test_a_lot_answers_whom_a_plain_list_would_answer(events: list[tuple[int, int, int]]) -> None:
    """The model: a list in the order of coming; each lane is granted a number of places per turn."""
    lot, plain = PendingRequests(), list[PendingRequest]()
    for number, (kind, lane, amount) in enumerate(events):
        if kind == 0:
            plain.append(park(lot, str(number), lane, deadline=float(amount)))
        elif kind == 1 and plain:
            lot.remove(plain.pop(amount % len(plain)))
        elif kind == 2:
            expired = [one for one in plain if one.deadline <= amount]
            assert set(lot.take_expired(float(amount))) == set(expired)
            plain = [one for one in plain if one not in expired]
        else:
            told: list[PendingRequest] = []
            lot.offer(grant(lane, amount, told), are_alike=True)
            expected: list[PendingRequest] = []
            grants = grant(lane, amount, expected)
            plain = [one for one in plain if not grants(one)]
            assert told == expected
        assert len(lot) == len(plain)


def grant(lane: int, places: int, told: list[PendingRequest]) -> Callable[[PendingRequest], bool]:
    """Return what answers the first `places` of a lane."""

    def answers(parked: PendingRequest) -> bool:
        if parked.lane != lane or len(told) >= places:
            return False
        told.append(parked)
        return True

    return answers


@dataclass
class Heard(Request):
    """A request whose answer is looked at."""

    answer: dict[str, Any] | None = None

    def reply(self, frames: Sequence[Frame] = (), **args: Any) -> None:
        self.answer = args


class FirstSteps:
    """A handler that is asked as over the wire, of a run that has registered its first version."""

    def __init__(self, **settings: Any) -> None:
        self.handler = RequestHandler(make_store(**settings), ManualClock())
        self.ask("describe_data", num_prompts=10, digest="d", sources=[])
        opened = self.ask("open", holder="learner").answer
        assert opened is not None
        self.token = opened["token"]
        self.ask("register_version", token=self.token, step=0)

    def send(self, op: str, client: str = "learner", frames: Sequence[Frame] = (), **args: Any) -> Heard:
        request = Heard(op, args, list(frames), client.encode(), 1, None)  # type: ignore[arg-type]
        self.handler.handle(request)
        return request

    def ask(self, op: str, client: str = "learner", **args: Any) -> Heard:
        request = self.send(op, client, **args)
        self.handler.end_turn()
        return request

    def take(self, name: str, version: int) -> list[int]:
        """Lease all that is to be had; return the tickets."""
        wanted = {"replica": name, "version": version, "want": 8, "wait_s": 0.0}
        answer = self.ask("lease", name, evaluating=None, **wanted).answer
        assert answer is not None
        return [grant["ticket"] for grant in answer["grants"]]

    def push(self, name: str, ticket: int, version: int) -> None:
        frames = encode_group(make_group(ticket, version=version))
        self.send("push", name, frames, replica=name, ticket=ticket, attempt=1)

    def train(self, step: int) -> None:
        """Train what is complete as step `step`, and publish the next version."""
        ready = self.ask("reserve", token=self.token, step=step, wait_s=0.0).answer
        assert ready is not None and ready["ready"]
        self.ask("trained", token=self.token, step=step, dropped=[], lag_max=step)
        self.ask("register_version", token=self.token, step=step + 1)

    def lease(self, name: str, evaluating: int | None = None, want: int = 1) -> Heard:
        wanted = {"replica": name, "version": 1, "want": want, "wait_s": 5.0}
        return self.ask("lease", name, evaluating=evaluating, **wanted)


def test_an_evaluation_reaches_a_waiting_replica_behind_one_that_is_at_work_on_another() -> None:
    """Alike as they are to the ledger's leases, evaluations tell them apart."""
    run = FirstSteps()
    run.handler.is_paused = True  # no leases: both wait
    busy, free = run.lease("a", evaluating=7), run.lease("b")
    assert (busy.answer, free.answer) == (None, None)
    run.ask("request_evaluation", token=run.token, step=0)
    assert busy.answer is None
    assert free.answer is not None and free.answer["evaluate"] is not None


def test_a_lease_that_is_refused_wakes_nobody_and_one_that_comes_back_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = FirstSteps()
    first = run.lease("a", want=64).answer
    assert first is not None and first["grants"], "all that may be open"
    waiting = [run.lease(f"b{index}") for index in range(8)]
    tried: list[str] = []
    lease = run.handler.store.ledger.lease

    def count(replica: str, *args: Any) -> Any:
        tried.append(replica)
        return lease(replica, *args)

    monkeypatch.setattr(run.handler.store.ledger, "lease", count)
    waiting += [run.lease("c"), run.lease("d")]
    run.ask("status")
    assert tried == ["c", "d"] and not any(one.answer for one in waiting)
    held = [[grant["ticket"], grant["attempt"]] for grant in first["grants"][:1]]
    run.ask("release", "a", replica="a", tickets=held)
    assert tried[2:] == ["b0", "b1"]
    assert waiting[0].answer is not None and waiting[0].answer["grants"]


def test_a_ticket_that_a_waiting_reservation_issues_again_goes_to_who_waits_for_a_lease() -> None:
    run = FirstSteps(policy="drop", ready_batches=4)
    first = run.take("a", 1)
    run.push("a", first[0], 1)
    run.push("a", first[1], 1)
    run.train(0)
    second = run.take("b", 2)
    run.push("a", first[3], 1)
    run.push("b", second[0], 2)
    run.train(1)
    third = run.take("c", 3)
    idle = run.ask("lease", "d", replica="d", version=3, want=1, wait_s=5.0, evaluating=None)
    reserved = run.ask("reserve", token=run.token, step=2, wait_s=5.0)
    assert idle.answer is None and reserved.answer is None
    run.push("a", first[2], 1)  # a straggler, over age
    run.push("b", second[1], 2)
    run.push("c", third[0], 3)
    run.handler.end_turn()
    assert reserved.answer is not None and reserved.answer["ready"]
    run.handler.tick(0.0)
    assert idle.answer is not None and len(idle.answer["grants"]) == 1


def test_a_lease_that_tells_of_lost_grants_lets_others_have_them() -> None:
    run = FirstSteps()
    first = run.lease("a", want=64).answer
    assert first is not None and first["grants"], "all that may be open"
    waiting = run.lease("b")
    run.ask("lease", "a", replica="a", version=1, want=0, wait_s=5.0, evaluating=None, held=[])
    assert waiting.answer is not None and waiting.answer["grants"]
