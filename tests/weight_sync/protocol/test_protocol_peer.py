"""The peers' side of the protocol, and coordinators that are replaced while they live."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from asyncrl.cli.timeline.sync_history import read_entries
from asyncrl.core.errors import FencedError
from asyncrl.core.rpc import Client, Request, Server
from asyncrl.core.runtime.threads import ThreadRuntime
from tests.threads import in_thread
from tests.waiting import wait_for
from tests.weight_sync.protocol.world import receiver_hello
from weight_sync.coordination.coordinator import CoordinatorService
from weight_sync.coordination.journal import (
    JOURNAL_FILE,
    TOKEN_FILE,
    Journal,
    newest_token,
    read_fences,
    take_token,
)
from weight_sync.coordination.order_queue import ReportLog
from weight_sync.coordinator_session import CoordinatorSession, Introduction, Reset
from weight_sync.protocol.messages import Commit, Instruction, Pinned, Unpinned
from weight_sync.protocol.peer import CoordinatorEpoch, EpochCheck, Pin, RoundTracker, Stage
from weight_sync.protocol.protocol import Coordination
from weight_sync.protocol.rounds import Timing
from weight_sync.sync_records import BlameRecord, StartRecord

TIMING = Timing(deadline_s=2.0, offer_s=0.5, settle_s=0.25, silence_s=0.6, dead_s=6.0)
WAIT_S = 60.0


def test_the_same_start_twice_begins_once():
    rounds = RoundTracker()
    assert rounds.offer(1) and not rounds.offer(1)
    assert rounds.begin(1) and not rounds.begin(1)
    assert rounds.end(1) and not rounds.end(1)
    assert not rounds.offer(1) and not rounds.begin(1), "a round that is over does not begin again"


def test_a_transfer_without_an_offer_does_not_begin_but_the_publisher_needs_none():
    rounds = RoundTracker()
    assert not rounds.begin(1)
    assert rounds.begin(2, needs_offer=False) and not rounds.begin(2, needs_offer=False)


def test_a_pin_is_held_until_its_process_lets_go_or_another_one_polls():
    pin = Pin()
    assert pin.set("a", True) and pin.is_held and not pin.set("a", True)
    assert not pin.meet("a") and pin.is_held, "its own polls do not end it"
    assert pin.set("a", False) and not pin.is_held and not pin.set("a", False)
    pin.set("a", True)
    assert pin.meet("b") and not pin.is_held and not pin.meet("c")
    pin.set("b", True)
    assert pin.end() and not pin.is_held and not pin.end()


def test_an_abort_of_an_unknown_round_keeps_its_late_offer_out():
    rounds = RoundTracker()
    assert rounds.abort(1) is None
    assert not rounds.offer(1) and not rounds.begin(1, needs_offer=False)


def test_an_abort_is_obeyed_once_and_not_after_the_end():
    rounds = RoundTracker()
    rounds.offer(1)
    rounds.offer(2)
    rounds.begin(2)
    assert rounds.open_rounds == [1, 2]
    assert rounds.abort(1) is Stage.OFFERED and rounds.abort(1) is None
    assert rounds.end(2) and rounds.abort(2) is None
    assert rounds.open_rounds == []


def test_a_transfer_that_ends_after_its_abort_counts_for_nothing():
    rounds = RoundTracker()
    rounds.offer(1)
    rounds.begin(1)
    assert rounds.abort(1) is Stage.MOVING
    assert not rounds.end(1)


def test_only_so_many_rounds_are_remembered():
    rounds = RoundTracker()
    for round_id in range(1000):
        rounds.offer(round_id)
        rounds.abort(round_id)
    assert sum(rounds.stage_of(round_id) is not None for round_id in range(1000)) == 256


def test_a_peer_obeys_the_newest_coordinator_that_it_has_heard():
    epoch = CoordinatorEpoch()
    heard = [epoch.hear(token) for token in (5, 5, 7, 5, 7)]
    assert heard == [EpochCheck.SAME, EpochCheck.SAME, EpochCheck.NEWER, EpochCheck.OLDER, EpochCheck.SAME]


def test_a_report_that_is_repeated_is_taken_once():
    reports = ReportLog()
    assert reports.is_new("a", "1", 1) and not reports.is_new("a", "1", 1)
    assert reports.is_new("a", "1", 2) and reports.is_new("a", "2", 1)


# --- the token and the journal --------------------------------------------------------------------


def test_tokens_rise_also_if_the_clock_was_set_back(tmp_path):
    first = take_token(tmp_path)
    (tmp_path / TOKEN_FILE).write_text(f"{first + 10**9}\n")
    assert take_token(tmp_path) == first + 10**9 + 1 == newest_token(tmp_path)
    assert take_token(tmp_path / "none") > 0


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / JOURNAL_FILE).read_text().splitlines()]


def test_the_journal_stays_small_and_its_newest_lines_stay(tmp_path):
    journal = Journal(tmp_path, 1, max_bytes=4000)
    for number in range(200):
        journal.note(BlameRecord("a", "silent", number))
        assert (tmp_path / JOURNAL_FILE).stat().st_size <= 4000
    assert lines_of(tmp_path)[-1]["number"] == 199


def test_a_coordinator_that_was_replaced_journals_no_more(tmp_path):
    older = Journal(tmp_path, take_token(tmp_path))
    newer = Journal(tmp_path, take_token(tmp_path))
    older.note(BlameRecord("a", "silent", 1))
    newer.note(BlameRecord("b", "silent", 1))
    assert [line.get("culprit") for line in lines_of(tmp_path)] == [None, None, "b"]


def test_the_fences_of_the_last_coordinator_stay_however_long_the_journal_gets(tmp_path):
    assert read_fences(tmp_path) == {} == read_fences(tmp_path / "none")
    journal = Journal(tmp_path, 1, max_bytes=4000)
    journal.note_fences({"a": 3})
    journal.note_fences({"a": 3, "b": 4})
    for number in range(200):
        journal.note(BlameRecord("fences", "silent", number))
    assert read_fences(tmp_path) == {"a": 3, "b": 4}
    Journal(tmp_path, 2, fences=read_fences(tmp_path)).note_fences({})
    with (tmp_path / JOURNAL_FILE).open("a") as file:
        file.write('{"kind": "fences", "fen')
    assert read_fences(tmp_path) == {}


def test_lines_of_the_journal_that_cannot_be_read_are_passed_over(tmp_path):
    journal = Journal(tmp_path, 7)
    with (tmp_path / JOURNAL_FILE).open("a") as file:
        file.write('{"kind": "of a later version"}\n{"kind": "start"}\n\xff\n')
    journal.note(BlameRecord("a", "silent", 1))
    with (tmp_path / JOURNAL_FILE).open("a") as file:
        file.write('{"kind": "blame", "culpr')
    start, blame = read_entries(tmp_path)
    assert isinstance(start, StartRecord) and start.token == 7 and start.time > 0.0
    assert isinstance(blame, BlameRecord) and blame.culprit == "a"
    assert list(read_entries(tmp_path / "none")) == []


def test_a_full_disk_ends_no_coordinator(tmp_path):
    (tmp_path / JOURNAL_FILE).symlink_to("/dev/full")
    Journal(tmp_path, 1).note(BlameRecord("a", "silent", 1))


# --- coordinators and sessions over real sockets ---------------------------------------------------


@contextmanager
def coordinator(token: int, bind: str = "tcp://127.0.0.1:*") -> Iterator[CoordinatorService]:
    service = CoordinatorService(Coordination(TIMING, token=token), ThreadRuntime(), bind)
    with in_thread(service.run):
        yield service


INFO = {
    "serving": 0,
    "staged": 0,
    "attended": False,
    "pinned": False,
    "draining": False,
}


@contextmanager
def session(address: str, incarnation: str, heard: list[Instruction]) -> Iterator[CoordinatorSession]:
    def deliver(order: Instruction, _: bytes) -> None:
        heard.append(order)

    hello = receiver_hello("receiver.0", incarnation)
    made = CoordinatorSession(
        ThreadRuntime(), address, "receiver.0", incarnation, lambda: Introduction(hello), deliver
    )
    made.start()
    try:
        yield made
    finally:
        made.stop()


def address_of(service: CoordinatorService) -> str:
    return str(service.status().address)


def test_a_coordinator_that_hears_of_a_newer_one_gives_no_more_orders():
    with coordinator(token=5) as service:
        client = Client(ThreadRuntime(), address_of(service))
        who = {"name": "receiver.0", "incarnation": "1"}
        assert client.call("hello", token=5, started_ms=1, **INFO, **who).args["token"] == 5
        with pytest.raises(FencedError, match="token 5 is older than 6"):
            client.call("next_order", token=6, after=0, **who)
        with pytest.raises(FencedError):
            client.call("hello", token=0, started_ms=1, **INFO, **who)
        wait_for(lambda: service.status().state == "FENCED")
        client.close()


def test_an_older_coordinator_that_gets_the_address_back_knows_from_its_peers_that_it_was_replaced(tmp_path):
    address = f"ipc://{tmp_path}/c"
    with ExitStack() as stack:
        with coordinator(7, address) as first:
            peer = stack.enter_context(session(address, "1", []))
            wait_for(lambda: "receiver.0" in first.status().members)
        with coordinator(3, address) as older:
            wait_for(lambda: older.status().state == "FENCED")
            assert not older.status().members
        with coordinator(9, address) as newer:
            wait_for(lambda: "receiver.0" in newer.status().members)
            assert peer.counters["newer_coordinators"] == 1


def test_a_hello_that_is_read_behind_a_later_word_of_its_process_changes_nothing():
    """A connection that was given up may still bring one: its info is old, and nobody would say so again."""
    with coordinator(token=5) as service:
        client = Client(ThreadRuntime(), address_of(service))
        who = {"name": "receiver.0", "incarnation": "1", "token": 0}
        hello = {**INFO, **who, "started_ms": 1, "seq": 1}
        client.call("hello", **hello)
        client.call("report", event="loaded", fields={"number": 3, "ok": True, "error": ""}, seq=1, **who)
        assert client.call("hello", **hello).args["accepted"]
        wait_for(lambda: [one.version for one in service.status().members.values()] == [3])
        client.call("hello", **{**hello, "seq": 2})
        wait_for(lambda: service.status().members["receiver.0"].version == 0)
        client.close()


class DeafCoordinator:
    """Orders the same in every answer and looks at no token, as one that was thawed may."""

    def __init__(self, token: int, *before: dict[str, Any]) -> None:
        self._token, self._before = token, before

    def handle(self, request: Request) -> None:
        order = {"seq": 9, "kind": Commit.kind, "fields": {"number": self._token}, "frame": -1}
        answers = {
            "hello": {"accepted": True, "poll_s": 0.1},
            "next_order": {"known": True, "orders": [*self._before, order]},
            "report": {"known": True},
        }
        request.reply(token=self._token, **answers[request.op])

    def wake_at(self) -> float:
        return math.inf

    def tick(self, now: float) -> None:
        return


@contextmanager
def deaf_coordinator(token: int, address: str, *before: dict[str, Any]) -> Iterator[None]:
    with in_thread(partial(Server(ThreadRuntime(), address).serve, DeafCoordinator(token, *before))):
        yield


def test_a_peer_does_not_obey_an_older_coordinator_than_the_newest_it_has_heard(tmp_path):
    address, heard = f"ipc://{tmp_path}/c", []
    with ExitStack() as stack:
        with deaf_coordinator(7, address):
            peer = stack.enter_context(session(address, "1", heard))
            wait_for(lambda: Commit(7) in heard)
        with deaf_coordinator(3, address):
            wait_for(lambda: peer.counters["older_coordinators"] > 2)
    assert Commit(3) not in heard


def test_an_order_that_cannot_be_read_holds_up_none_behind_it(tmp_path):
    address, heard = f"ipc://{tmp_path}/c", []
    unreadable = [
        {"seq": 1, "kind": "dance", "fields": {}, "frame": -1},
        {"seq": 2, "kind": Commit.kind, "fields": {"number": "seven"}, "frame": -1},
    ]
    with deaf_coordinator(7, address, *unreadable), session(address, "1", heard) as peer:
        wait_for(lambda: Commit(7) in heard)
        assert peer.counters["unreadable_orders"] >= 2


def test_a_peer_leaves_a_coordinator_that_was_stopped_for_the_one_that_took_its_address(tmp_path):
    address = f"ipc://{tmp_path}/c"
    stopped = Server(ThreadRuntime(), address)  # takes connections, answers nothing
    with ExitStack() as stack:
        stack.callback(stopped.close)
        stack.enter_context(session(address, "1", []))
        with coordinator(7, address) as newer:
            wait_for(lambda: "receiver.0" in newer.status().members)


def test_a_process_whose_name_a_newer_one_has_taken_is_fenced_and_gets_no_orders():
    with coordinator(token=1) as service:
        address = address_of(service)
        with session(address, "old", old_heard := []) as old:
            wait_for(lambda: "receiver.0" in service.status().members)
            with session(address, "new", []) as new:
                wait_for(lambda: old.counters["hellos_refused"])
                assert old.is_fenced and not new.is_fenced
    assert set(old_heard) <= {Reset()}


def test_a_peer_that_cannot_introduce_itself_tries_again_whatever_the_error_was():
    errors = [OSError("no descriptor is left"), RuntimeError("a bug"), MemoryError()]

    def introduce() -> Introduction:
        if errors:
            raise errors.pop()
        return Introduction(receiver_hello("receiver.0", "1"))

    with coordinator(token=5) as service:
        made = CoordinatorSession(
            ThreadRuntime(), address_of(service), "receiver.0", "1", introduce, lambda *_: None
        )
        made.start()
        wait_for(lambda: "receiver.0" in service.status().members)
        assert made.counters["coordinator_unreachable"] == 3
        made.stop()


def test_a_hello_that_a_report_overtakes_is_said_again_with_what_has_changed():
    infos = []

    def is_pinned() -> bool:
        return service._coordination.members["receiver.0"].is_pinned

    def introduce() -> Introduction:
        infos.append(receiver_hello("receiver.0", "1", attended=True, pinned=len(infos) == 1))
        if len(infos) == 2:
            made.report(Unpinned())  # after its state was read, and heard before its hello
            wait_for(lambda: not is_pinned())
        return Introduction(infos[-1])

    with coordinator(token=5) as service:
        made = CoordinatorSession(
            ThreadRuntime(), address_of(service), "receiver.0", "1", introduce, lambda *_: None
        )
        made.start()
        wait_for(lambda: "receiver.0" in service.status().members)
        made.report(Pinned())
        wait_for(is_pinned)
        made._must_say_hello.set()
        wait_for(lambda: made.counters["hellos_outdated"] and not made._must_say_hello.is_set())
        wait_for(lambda: made._session == 2)
        made.stop()
        assert len(infos) == 3 and not is_pinned()


def test_who_ends_in_order_has_retired_at_once():
    with coordinator(token=1) as service:
        with session(address_of(service), "1", []):
            wait_for(lambda: "receiver.0" in service.status().members)
        wait_for(lambda: service.status().members["receiver.0"].state == "RETIRED")


def test_a_time_in_which_a_peer_did_not_run_is_no_silence_of_the_coordinator():
    with coordinator(token=1) as service:
        with session(address_of(service), "1", []) as peer:
            wait_for(lambda: "receiver.0" in service.status().members)
            peer._look_at -= 60.0
            peer._heard_at -= 60.0
            assert peer.lost_for_s < 5.0
