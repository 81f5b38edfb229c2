"""A receiver reserves the memory of an offer piece by piece, and answers others in between."""

from __future__ import annotations

from typing import Any

import pytest

from asyncrl.core.errors import SyncError
from asyncrl.core.staleness import PolicyVersion
from tests.weight_sync.protocol.test_late_calls import receiver
from weight_sync.memory import segments, staging_area
from weight_sync.memory.manifest import Bucket, Manifest, TensorSpec, plan
from weight_sync.protocol.messages import Abort, Accepted, Failed, Offer, Progress
from weight_sync.receiving import inbound_rounds
from weight_sync.receiving.receiver import ReceiverService

__all__ = ["receiver"]
PIECE_BYTES, NUM_PIECES = 4096, 5
OFFER = Offer(round=9, number=3)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging_area, "RESERVE_STEP_BYTES", PIECE_BYTES)


def offer(receiver: ReceiverService) -> None:
    layout = plan([TensorSpec("w", "uint8", (PIECE_BYTES * NUM_PIECES,))], 1 << 20)
    manifest = Manifest(PolicyVersion(3, 2), layout, (Bucket(layout.total_bytes, "0" * 32),))
    receiver._obey(OFFER, manifest.to_bytes())


def turn(receiver: ReceiverService) -> bool:
    """Make the calls of one turn of the server; return whether there were any."""
    return receiver._server._make_calls()


def reported(receiver: ReceiverService) -> list[Any]:
    found = []
    while not receiver._session._reports.empty():
        found.append(receiver._session._reports.get().event)
    return found


def test_an_offer_is_accepted_once_its_memory_is_there_with_a_turn_for_each_piece(
    receiver: ReceiverService,
) -> None:
    offer(receiver)
    for _ in range(NUM_PIECES - 1):
        assert reported(receiver) == []
        assert turn(receiver)
    assert reported(receiver) == [Accepted(9)] and not turn(receiver)
    offer(receiver)
    assert reported(receiver) == [Accepted(9)], "the same order again, whose answer was lost"


def test_an_offer_that_comes_again_while_it_is_being_reserved_is_answered_once(
    receiver: ReceiverService,
) -> None:
    offer(receiver)
    offer(receiver)
    while turn(receiver):
        pass
    assert reported(receiver) == [Accepted(9)]


def test_progress_is_told_now_and_then_while_memory_is_reserved_and_buckets_are_checked(
    receiver: ReceiverService, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer(receiver)
    assert turn(receiver) and reported(receiver) == [], "little time has passed"
    monkeypatch.setattr(inbound_rounds, "PROGRESS_EVERY_S", 0.0)
    assert turn(receiver) and turn(receiver)
    assert reported(receiver) == [Progress(9, 3), Progress(9, 4)]
    while turn(receiver):
        pass
    incoming = receiver._rounds._incoming[9]
    receiver._rounds._counting(incoming)(0, incoming.copy.bytes_B)
    assert reported(receiver) == [Progress(9, 5), Accepted(9), Progress(9, 6)]


def test_an_abort_between_two_pieces_ends_the_reservation_and_leaves_no_segment(
    receiver: ReceiverService,
) -> None:
    offer(receiver)
    assert turn(receiver) and len(segments.find(receiver._staging._prefix)) == 1
    receiver._obey(Abort(round=9), b"")
    while turn(receiver):
        pass
    assert [type(event) for event in reported(receiver)] == [Failed]
    assert segments.find(receiver._staging._prefix) == []


def test_a_disk_that_is_full_between_two_pieces_refuses_the_offer_and_ends_nothing(
    receiver: ReceiverService, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer(receiver)

    def refuse(*_: object) -> None:
        raise SyncError("no room for 4096 bytes in /dev/shm: No space left on device")

    monkeypatch.setattr(segments, "reserve", refuse)
    assert turn(receiver) and not turn(receiver)
    (failed,) = reported(receiver)
    assert failed.round == 9 and failed.cause.startswith("refused: no room for 4096 bytes")
    assert receiver.counters["refused_orders"] == 1 and segments.find(receiver._staging._prefix) == []
