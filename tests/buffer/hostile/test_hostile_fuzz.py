"""Requests changed at random against each reader: what comes out is an AsyncrlError, or a right value."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from asyncrl.buffer.service import RequestHandler
from asyncrl.core import wire
from asyncrl.core.errors import AsyncrlError, WireError
from asyncrl.core.experience import decode_group, encode_group
from asyncrl.core.rpc.request import read_request
from asyncrl.core.runtime.clock import SystemClock
from asyncrl.core.runtime.interface import Arrival
from asyncrl.core.sockets.keys import Role
from tests.buffer.hostile.hostile_mutations import Mutator
from tests.buffer.hostile.hostile_parts import BufferProcess, Honest, dealer
from tests.buffer.parts import make_store

TURN = 20
"""Messages between two ends of a turn."""


def read_headers(mutator: Mutator, num_frames: int) -> Counter[str]:
    counts: Counter[str] = Counter()
    while counts.total() < num_frames:
        data = mutator.message()[0]
        try:
            fields = wire.unpack_header(data, wire.MAX_REQUEST_BYTES, wire.RPC_VERSION)
        except WireError:
            counts["refused"] += 1
        else:
            assert isinstance(fields, dict)
            counts["read"] += 1
    return counts


def read_groups(mutator: Mutator, num_frames: int) -> Counter[str]:
    counts: Counter[str] = Counter()
    while counts["frames"] < num_frames:
        frames = mutator.group()
        counts["frames"] += len(frames)
        try:
            group = decode_group(frames)
        except WireError:
            counts["refused"] += 1
        else:
            counts["read"] += 1
            assert decode_group(encode_group(group)).num_tokens == group.num_tokens
    return counts


class DeskUnderTest:
    """A handler over a file journal; nobody reads its replies."""

    def __init__(self, folder: Path) -> None:
        store = make_store(folder, max_lag=50, ready_batches=10, max_attempts=1000, memory_bytes=1 << 20)
        self.handler = RequestHandler(store, SystemClock())
        self.counts: Counter[str] = Counter()

    def take(self, message: Sequence[bytes]) -> None:
        """Handle one message as the server does; anything but an AsyncrlError comes through."""
        self.counts["frames"] += len(message)
        self.counts["messages"] += 1
        if self.counts["messages"] % TURN == 0:
            self.handler.tick(0.0)
        try:
            request = read_request(Arrival(b"peer", list(message), False, Role.SERVICE, lambda parts: None))
        except WireError:
            self.counts["malformed"] += 1
            return
        try:
            self.handler.handle(request)
            self.counts["handled"] += 1
        except AsyncrlError as error:
            self.counts[type(error).__name__] += 1

    def hints(self) -> dict[str, int]:
        """Return numbers that fit what the ledger waits for."""
        state = self.handler.store.ledger.state
        leased = next((one for held in state.leases.values() for one in held), 1)
        ticket = state.tickets.get(leased)
        return {
            "token": state.token,
            "step": state.steps_trained,
            "version": state.versions.last_number,
            "ticket": leased,
            "attempt": ticket.attempt if ticket else 1,
            "lag_max": 0,
        }

    def close(self) -> None:
        self.handler.end_turn()
        status = self.handler.status()
        self.counts.update({"tickets/issued": status.issued, "tickets/trained": status.trained})
        assert status.residue == 0
        self.handler.store.journal.close()


def flood_desk(folder: Path, seed: int, num_frames: int) -> Counter[str]:
    subject, mutator = DeskUnderTest(folder), Mutator(seed)
    try:
        while subject.counts["frames"] < num_frames:
            mutator.hints = subject.hints()
            subject.take(mutator.message())
    finally:
        subject.close()
    return subject.counts


def await_counted(honest: Honest, num_messages: int) -> Counter[str]:
    """Return the service's counters once it has counted so many messages besides the questions for them."""
    end = time.monotonic() + 60.0
    for num_asked in itertools.count():
        counters = Counter(honest.learner.status().counters)
        names = ("wire/requests", "wire/malformed", "wire/oversized")
        if sum(counters[name] for name in names) >= num_messages + num_asked:
            return counters
        assert time.monotonic() < end, counters
    raise AssertionError


def flood_socket(folder: Path, seed: int, num_messages: int) -> Counter[str]:
    """Send to a service in a process of its own while an honest pair trains; return what it counted."""
    process, mutator = BufferProcess(folder), Mutator(seed)
    try:
        honest = Honest(process.address)
        before = process.num_bytes
        with dealer(process.address) as end:
            for number in range(num_messages):
                end.send_multipart(mutator.message())
                while number % 100 == 0 and end.poll(0):
                    end.recv_multipart()
            counters = await_counted(honest, num_messages)
        assert process.is_alive
        assert honest.learner.status().residue == 0
        assert process.num_bytes - before < 96 << 20
        honest.close()
        return counters
    finally:
        process.end()


def test_changed_headers_are_read_or_refused() -> None:
    counts = read_headers(Mutator(1), 10_000)
    assert min(counts["read"], counts["refused"]) > 1000, counts


def test_changed_groups_are_read_or_refused() -> None:
    counts = read_groups(Mutator(2), 10_000)
    assert min(counts["read"], counts["refused"]) > 100, counts


def test_the_handler_answers_changed_requests_or_refuses_them(tmp_path: Path) -> None:
    counts = flood_desk(tmp_path, 3, 10_000)
    assert min(counts["handled"], counts["malformed"], counts["WireError"]) > 300, counts


def test_a_service_takes_changed_requests_over_its_socket(tmp_path: Path) -> None:
    counts = flood_socket(tmp_path, 4, 1000)
    assert counts["wire/malformed"] > 200, counts
    assert counts["wire/internal_errors"] == 0, counts


@pytest.mark.long
@pytest.mark.parametrize("seed", range(4))
def test_a_quarter_of_a_million_frames_let_nothing_but_our_errors_out(
    tmp_path: Path, seed: int, capsys: pytest.CaptureFixture[str]
) -> None:
    headers = read_headers(Mutator(100 + seed), 125_000)
    groups = read_groups(Mutator(200 + seed), 75_000)
    handler = flood_desk(tmp_path, 300 + seed, 75_000)
    with capsys.disabled():
        print(f"\nseed {seed}: headers {dict(headers)}, groups {dict(groups)}, handler {dict(handler)}")
    assert headers.total() + groups["frames"] + handler["frames"] >= 250_000


@pytest.mark.long
def test_twenty_thousand_changed_requests_over_a_real_socket(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    counts = flood_socket(tmp_path, 5, 20_000)
    with capsys.disabled():
        print(f"\nsocket: {dict(counts)}")
    assert counts["wire/internal_errors"] == 0, counts
