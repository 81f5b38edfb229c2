"""Direct rounds at a receiver: offers without memory, what the workers hold, its loss; and at a publisher."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from asyncrl.core.runtime.threads import ThreadEvent
from tests.runtimes import ManualRuntime
from tests.weight_sync.direct.members import RUNTIME
from tests.weight_sync.direct.test_desk import Room
from tests.weight_sync.memory.test_shared_memory import make_manifest
from weight_sync import coordinator_session
from weight_sync.backends.contract import Group
from weight_sync.memory import segments
from weight_sync.memory.manifest import ANY_VERSION
from weight_sync.memory.pool import SegmentPool
from weight_sync.memory.staging_area import Copy, StagingArea
from weight_sync.protocol import messages as told
from weight_sync.protocol.rounds import ABORTED, DIGEST, TRANSPORT
from weight_sync.publisher import Endpoint, PublisherService
from weight_sync.receiving.assembly import NO_BYTES
from weight_sync.receiving.inbound_rounds import InboundRounds
from weight_sync.receiving.receiver import ReceiverService, ignore_bucket
from weight_sync.transfer_executor import TransferOrder


class Receiver:
    """The rounds of a receiver with the desk of an engine of one worker."""

    def __init__(self, prefix: str, *, has_desk: bool = True) -> None:
        self.prefix, self.room = prefix, Room(count=1)
        self.room.ask(0)
        self.staging = StagingArea(prefix, uuid.uuid4().hex, keeps_base=True)
        self.events: list[Any] = []
        self.rounds = InboundRounds(
            self.staging,
            make_transport=lambda group: pytest.fail("no transport is wanted"),
            report=self.events.append,
            call_soon=lambda call: call(),
            on_bucket=ignore_bucket,
            on_end=lambda: None,
            bounds=ANY_VERSION,
            counters=Counter(),
            runtime=RUNTIME,
            desk=self.room.desk if has_desk else None,
        )

    def begin(self, number: int, base: int = 0) -> None:
        """Accept an offer, and have the worker receive; the round has the version's number."""
        self.rounds.accept(told.Offer(number, number, direct=True), make_manifest(number).to_bytes())
        group = Group(1, 2, 3, "127.0.0.1", 1)
        self.rounds.receive(TransferOrder(number, number, group, frozenset({1}), 5.0, base, sources=2))

    def end(self, number: int, cause: str = "") -> None:
        self.room.end(0, cause, round_id=number)

    def stage(self, number: int) -> None:
        """Have a version come staged."""
        copy = self.staging.make_room(make_manifest(number))
        while not self.staging.reserve(copy):
            pass
        self.staging.put_verified(copy)

    def told(self) -> list[tuple[str, str]]:
        return [(event.kind, getattr(event, "cause", "")) for event in self.events]


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    made = Receiver(f"asyncrl-{uuid.uuid4().hex[:8]}-")
    yield made
    made.staging.close()


def test_a_version_that_the_workers_hold_takes_no_shared_memory_and_is_shared_with_nobody(receiver, caplog):
    receiver.begin(1)
    receiver.end(1)
    assert receiver.told() == [("accepted", ""), ("verified", "")] and receiver.events[1].path == ""
    assert not segments.find_names(receiver.prefix) and receiver.staging.base_number == 0
    assert not caplog.records, "nobody tries to share it"
    receiver.staging.commit(1)
    copy = receiver.staging.take(0)
    assert copy is not None and copy.path == "" and copy.manifest == make_manifest(1)


def test_the_workers_are_told_which_versions_the_engine_may_still_load(receiver):
    for number in (1, 2):
        receiver.begin(number)
        receiver.end(number)
        receiver.staging.commit(number)
        assert receiver.staging.take(number - 2 if number == 1 else 0) is not None
    receiver.room.ask(0)
    receiver.begin(3)
    assert receiver.room.answers[0][-1].keep == (1, 2)


@pytest.mark.parametrize("cause", [DIGEST, TRANSPORT])
def test_a_worker_that_fails_fails_the_round_with_its_cause(receiver, cause):
    receiver.begin(1)
    receiver.end(1, cause)
    assert receiver.told() == [("accepted", ""), ("failed", cause)] and receiver.rounds.num_transfers == 0
    assert receiver.staging.newest_verified == 0


def test_an_abort_is_told_to_the_workers_and_a_late_end_of_theirs_changes_nothing(receiver):
    receiver.begin(1)
    receiver.room.ask(0, round_id=1)
    receiver.rounds.abort(1)
    assert receiver.room.answers[0][-1].round == 0 and receiver.rounds.num_transfers == 0
    receiver.end(1)
    assert receiver.told() == [("accepted", ""), ("failed", ABORTED)]
    assert receiver.staging.newest_verified == 0


def test_without_a_worker_at_the_desk_the_round_fails_at_once(receiver):
    receiver.room.clock.advance(60.0)
    receiver.room.desk.tick()
    receiver.begin(1)
    assert receiver.told() == [("accepted", ""), ("failed", TRANSPORT)]


def test_an_order_that_comes_twice_is_carried_out_once(receiver):
    receiver.begin(1)
    receiver.end(1)
    receiver.begin(1)
    assert receiver.told() == [("accepted", ""), ("verified", "")] and receiver.room.desk._transfer is None


def test_a_receiver_without_a_desk_fails_a_direct_round(receiver):
    without = Receiver(receiver.prefix, has_desk=False)
    without.begin(1)
    assert without.told() == [("accepted", ""), ("failed", TRANSPORT)] and not without.rounds.num_transfers


def test_what_the_workers_have_lost_is_dropped_wherever_it_stands_and_staged_copies_stay(receiver):
    staging = receiver.staging
    for number in (1, 2, 3):
        receiver.begin(number)
        receiver.end(number)
        if number < 3:
            staging.commit(number)
            staging.take(0)
    assert (staging.taken_number, staging.committed_number, staging.newest_verified) == (1, 2, 3)
    assert sorted(staging.drop_direct()) == [1, 2, 3] and staging.drop_direct() == []
    assert (staging.taken_number, staging.committed_number, staging.newest_verified) == (0, 0, 0)
    assert not staging._free, "there was no segment"
    receiver.stage(4)
    assert staging.drop_direct() == [] and staging.newest_verified == 4


def test_a_receiver_tells_the_coordinator_of_each_version_that_silent_workers_have_lost(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(coordinator_session, "CALL_DEADLINE_S", 0.1)  # nobody answers its hello
    room, staging = Room(count=1), StagingArea(f"asyncrl-{uuid.uuid4().hex[:8]}-", "1", keeps_base=True)
    nobody, here = f"ipc://{tmp_path}/nobody", f"ipc://{tmp_path}/r"
    service = ReceiverService(
        nobody, "receiver.0", "1", staging, pytest.fail, ManualRuntime(100.0), 60.0, bind=here, desk=room.desk
    )
    room.ask(0)
    staging.put_verified(Copy(make_manifest(1), "", NO_BYTES))
    room.clock.advance(60.0)
    service.tick(100.0)
    reports = service._session._reports
    told_of = [reports.get_nowait().event for _ in range(reports.qsize())]
    assert told_of == [told.SeatsChanged(1), told.Lost(1), told.SeatsChanged(0)]
    assert staging.newest_verified == 0
    over = ThreadEvent()
    over.set()
    service.run(over)


def test_what_the_workers_hold_is_the_base_of_direct_differences_alone_until_it_is_lost_or_older(receiver):
    staging = receiver.staging
    receiver.begin(1)
    receiver.end(1)
    assert (staging.direct_base, staging.base_number) == (1, 0)
    receiver.room.ask(0)
    receiver.begin(2, base=1)
    assert receiver.room.answers[0][-1].base == 1, "the worker is told"
    receiver.end(2)
    staging.drop_direct()
    assert staging.direct_base == 0
    receiver.begin(3)
    receiver.end(3)
    assert staging.find_base(3, make_manifest(3).layout) is None
    receiver.stage(4)
    assert (staging.direct_base, staging.base_number) == (0, 4)


class Publisher:
    """A publisher with the desk of a learner of two ranks, or with none; its thread is this one."""

    def __init__(self, *, has_desk: bool = True) -> None:
        self.room = Room()
        self.service = PublisherService(
            "tcp://127.0.0.1:1",
            "p",
            SegmentPool(f"asyncrl-{uuid.uuid4().hex[:8]}-", "p"),
            Endpoint("127.0.0.1", 1),
            lambda group: pytest.fail("no transport is wanted"),
            RUNTIME,
            desk=self.room.desk if has_desk else None,
        )
        for index in range(2):
            self.room.ask(index)

    def obey(self, order: told.Instruction) -> None:
        self.service._obey(order)

    def begin(self) -> None:
        order = {"membership": 1, "rank": 0, "store_host": "127.0.0.1", "store_port": 1, "live": (1,)}
        self.obey(told.Transfer(round=7, number=1, world=3, deadline_s=5.0, sources=2, **order))

    def told(self) -> list[tuple[str, str]]:
        reports = self.service._session._reports
        events = [reports.get().event for _ in range(reports.qsize())]
        return [(event.kind, getattr(event, "cause", "")) for event in events]


def test_a_publisher_has_the_learners_ranks_send_and_tells_when_they_come_and_have_ended():
    publisher = Publisher()
    assert publisher.told() == [("seats", "")] and publisher.service._introduce().hello.seats == 2
    publisher.begin()
    assert [answers[-1].round for answers in publisher.room.answers.values()] == [7, 7]
    for index in range(2):
        publisher.room.end(index)
    assert publisher.told() == [("sent", "")] and publisher.service.status().transfers == 0


def test_an_abort_at_the_publisher_is_told_to_the_learners_ranks():
    publisher = Publisher()
    publisher.begin()
    for index in range(2):
        publisher.room.ask(index, round_id=7)
    publisher.obey(told.Abort(7))
    assert [answers[-1].round for answers in publisher.room.answers.values()] == [0, 0]
    assert ("send_failed", ABORTED) in publisher.told() and not publisher.service._transfer_starts


def test_a_publisher_gives_up_a_rank_that_is_silent_and_a_round_for_which_it_has_no_desk():
    publisher = Publisher()
    publisher.begin()
    publisher.room.clock.advance(60.0)
    publisher.service.tick(60.0)
    assert ("send_failed", TRANSPORT) in publisher.told() and publisher.room.desk.num_seats == 0
    without = Publisher(has_desk=False)
    without.begin()
    assert without.told() == [("send_failed", TRANSPORT)]
