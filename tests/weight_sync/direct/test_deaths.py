"""Members of a direct transfer as processes: an engine of two, one that dies, and one that stands still."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from asyncrl.core.errors import AsyncrlError
from asyncrl.core.runtime.faults import VARIABLE
from tests.weight_sync.cluster import processes
from tests.weight_sync.direct.members import (
    MAX_BYTES,
    RUNTIME,
    TIMEOUT,
    WAIT_S,
    ScriptedSink,
    make_checkpoint,
    make_order,
    parts_at,
    random_regions,
)
from tests.weight_sync.direct.service import Service, await_ends
from tests.weight_sync.direct.service import carry as order_both
from weight_sync.backends.rendezvous import open_store
from weight_sync.direct.carrier import Carrier
from weight_sync.direct.orders import SeatOrder
from weight_sync.direct.seat import DeskAddress, Seat
from weight_sync.direct.snapshot import Snapshots
from weight_sync.memory.parts import Part, split_parts
from weight_sync.rectangles.parcels import Region
from weight_sync.rectangles.rectangle import Rectangle

SOURCES, WORLD = 2, 4
AT = [(1, "direct.source.pack@1.3"), (2, "direct.sink.pack@1.6")]
"""Members, and where they are struck: in the middle, while others wait for them."""


def carry(order: SeatOrder, fault: str, end: Connection) -> None:
    """Entry of a member: carry out one transfer, and tell how it ended."""
    if fault:
        os.environ[VARIABLE] = fault
    sink, source = ScriptedSink(random_regions(4)), Snapshots(RUNTIME)
    full = [
        Part(name, tuple(values.shape), 0, 0, values.reshape(len(values), -1))
        for name, values in make_checkpoint(1).items()
    ]
    shares = split_parts(full, order.rank % SOURCES, SOURCES)
    source.take(1, shares, dict.fromkeys(make_checkpoint(1), "float32"))
    party = source if order.rank < SOURCES else sink
    end.send("ready")
    end.recv()
    began = RUNTIME.now()
    try:
        Carrier(RUNTIME, party, order.secret, MAX_BYTES).run(order, began + order.deadline_s)
        told = ""
    except AsyncrlError as error:
        told = type(error).__name__
    end.send((told, RUNTIME.now() - began, any(stage.is_whole for stage in sink.stages.values())))
    end.recv()


class Processes:
    """The members of one transfer, each a process, and the one that is struck."""

    def __init__(self) -> None:
        self.store = open_store("127.0.0.1", 0, TIMEOUT)
        self.members: list[Any] = []
        self.ends: list[Connection] = []

    def run(self, deadline_s: float, struck: int, fault: str) -> None:
        order = make_order(self.store.port, SOURCES, WORLD, deadline_s)
        for rank in range(WORLD):
            ours, theirs = processes.Pipe()
            args = (replace(order, rank=rank), fault if rank == struck else "", theirs)
            self.members.append(processes.Process(target=carry, args=args, daemon=True))
            self.members[-1].start()
            theirs.close()
            self.ends.append(ours)
        for end in self.ends:
            assert end.poll(WAIT_S)
            assert end.recv() == "ready"
        for end in self.ends:
            end.send("go")

    def outcome(self, rank: int) -> tuple[str, float, bool]:
        assert self.ends[rank].poll(2 * WAIT_S), "the member reports nothing"
        return self.ends[rank].recv()


@pytest.fixture
def transfer() -> Iterator[Processes]:
    started = Processes()
    yield started
    for process in started.members:
        process.kill()
        process.join(WAIT_S)


def test_members_that_live_carry_all(transfer):
    transfer.run(WAIT_S, 0, "")
    assert [transfer.outcome(rank)[::2] for rank in range(WORLD)] == [("", False)] * 2 + [("", True)] * 2


@pytest.mark.parametrize(("member", "fault"), AT)
def test_a_member_that_dies_ends_the_transfer_of_all_at_once(transfer, member, fault):
    transfer.run(WAIT_S, member, fault)
    for rank in set(range(WORLD)) - {member}:
        told, took_s, is_whole = transfer.outcome(rank)
        assert told == "SyncError", (rank, told)
        assert took_s < WAIT_S
        assert not is_whole
    transfer.members[member].join(WAIT_S)
    assert transfer.members[member].exitcode == -signal.SIGKILL


@pytest.mark.parametrize(("member", "fault"), AT)
def test_a_member_that_stands_still_ends_the_transfer_at_the_deadline(transfer, member, fault):
    transfer.run(8.0, member, f"stop:{fault}")
    others = sorted(set(range(WORLD)) - {member})
    told = [transfer.outcome(rank)[0] for rank in others]
    assert "DeadlineExceeded" in told
    assert set(told) <= {"DeadlineExceeded", "SyncError"}
    assert Path(f"/proc/{transfer.members[member].pid}/stat").read_text().rpartition(") ")[2][0] == "T"


BY_COLUMNS = ("o_proj.weight", "down_proj.weight")
TP = 2


def read_by_worker(rank: int) -> list[Region]:
    """Return what a worker of an engine with TP2 loads: half of each matrix, and vectors of norms in full."""
    regions = []
    for name, values in make_checkpoint(1).items():
        start, stop = [0] * values.dim(), list(values.shape)
        if "norm" not in name:
            dim = int(name.endswith(BY_COLUMNS))
            start[dim], stop[dim] = (values.shape[dim] * edge // TP for edge in (rank, rank + 1))
        regions.append((name, Rectangle(tuple(start), tuple(stop))))
    return regions


def sit(address: str, index: int, count: int, held: list[tuple[Any, ...]] | None, end: Connection) -> None:
    """Entry of a seat's process: a learner rank that holds these parts, or a worker of the engine."""
    sink, source = ScriptedSink(read_by_worker(index) if held is None else []), Snapshots(RUNTIME)
    if held is not None:
        parts = [Part(*place, torch.from_numpy(values)) for *place, values in held]
        source.take(1, parts, dict.fromkeys(make_checkpoint(1), "float32"))
    seat = Seat(RUNTIME, DeskAddress(address), index, count, sink if held is None else source)
    seat.start()
    end.recv()
    end.send(held is not None or (sink.stages[1].is_whole, sink.has_all(1, make_checkpoint(1))))
    seat.close()


@pytest.mark.long
def test_an_engine_with_two_workers_gets_its_halves_of_a_learner_with_tp2_and_pp2():
    """All at once: four learner ranks at the publisher's desk, two workers at that of one receiver."""
    assert not set(read_by_worker(0)) >= set(read_by_worker(1)), "they want other halves"
    secret, store = "5ec" * 8, open_store("127.0.0.1", 0, TIMEOUT)
    publisher, receiver = Service(secret), Service(secret)
    started: list[tuple[Any, Connection]] = []
    for service, count in ((publisher, 4), (receiver, TP)):
        for index in range(count):
            ours, theirs = processes.Pipe()
            held = None
            if service is publisher:
                held = [
                    (part.name, part.shape, part.row, part.column, part.values_RC.numpy().copy())
                    for part in parts_at(1, index)
                ]
            args = (service.server.address, index, count, held, theirs)
            started.append((processes.Process(target=sit, args=args, daemon=True), ours))
            started[-1][0].start()
            theirs.close()
    try:
        assert all(service.is_complete.wait(2 * WAIT_S) for service in (publisher, receiver))
        order_both(publisher, receiver, 1, 7, ranks=(4, TP), port=store.port)
        assert await_ends(publisher, receiver) == ["", ""]
        wanted = sum(
            rectangle.num_elements * 4 for rank in range(TP) for _, rectangle in read_by_worker(rank)
        )
        assert receiver.ends[-1][2] >= wanted, "packs are aligned"
        for _, end in started:
            end.send("tell")
        assert all(end.poll(WAIT_S) for _, end in started)
        assert [end.recv() for _, end in started] == [True] * 4 + [(True, True)] * TP
    finally:
        for process, _ in started:
            process.kill()
            process.join(WAIT_S)
        publisher.close()
        receiver.close()
