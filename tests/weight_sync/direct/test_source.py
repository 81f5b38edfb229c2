"""The learner's side of direct transfers: ranks that agree on dtypes, and a learner that trains and sends."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from asyncrl.core.runtime.faults import set_hook
from tests.learner.guard.guarded_run import Faults, running
from tests.learner.parts.samples import save_model
from tests.weight_sync.cluster import running_cluster
from tests.weight_sync.direct.members import RUNTIME, TIMEOUT, WAIT_S, ScriptedSink
from tests.weight_sync.direct.service import Service, await_ends, carry
from tests.weight_sync.memory.test_sharded_publish import (
    TENSORS,
    ThreadMeeting,
    make_layout,
    make_parts,
    run_ranks,
)
from weight_sync.backends.rendezvous import open_store
from weight_sync.direct.seat import DeskAddress, Seat
from weight_sync.direct.source import DirectSource
from weight_sync.rectangles.rectangle import Rectangle

SECRET = "5ec" * 8
PATH = "the publisher's segment"


@dataclass
class Services:
    publisher: Service
    receiver: Service
    port: int

    def seat(self, sink: ScriptedSink) -> Seat:
        seat = Seat(RUNTIME, DeskAddress(self.receiver.server.address), 0, 1, sink)
        seat.start()
        assert self.receiver.is_complete.wait(WAIT_S)
        return seat


@pytest.fixture
def services() -> Iterator[Services]:
    store = open_store("127.0.0.1", 0, TIMEOUT)
    started = Services(Service(SECRET), Service(SECRET), store.port)
    yield started
    set_hook(None)
    started.publisher.close()
    started.receiver.close()


class CountedMeeting:
    """A rank's meeting, of which shared bytes are counted."""

    def __init__(self, inner: ThreadMeeting) -> None:
        self._inner, self.rank, self.world_size, self.num_shared = inner, inner.rank, inner.world_size, 0

    def share_bytes(self, data: bytes | None) -> bytes:
        self.num_shared += 1
        return self._inner.share_bytes(data)


def test_ranks_share_dtypes_once_and_ask_for_orders_once_they_have_something_to_send(services):
    before = {*threading.enumerate()}
    wanted = [(name, Rectangle.whole(full.shape)) for name, full in TENSORS.items() if full.numel()]
    sink, layout = ScriptedSink(wanted), make_layout(4096, "bfloat16")
    seat = services.seat(sink)
    sources: list[DirectSource] = []

    def run(meeting: ThreadMeeting) -> tuple[int, int]:
        counted = CountedMeeting(meeting)
        source = DirectSource(RUNTIME, DeskAddress(services.publisher.server.address), counted)
        sources.append(source)
        known = layout if meeting.rank == 0 else None
        source.take(1, "", None, exporter(meeting, 1))
        of_first = counted.num_shared
        for number in (2, 3):
            source.take(number, PATH, known, exporter(meeting, number))
        return of_first, counted.num_shared

    assert run_ranks(2, run) == [(0, 1)] * 2
    assert services.publisher.is_complete.wait(WAIT_S)
    assert sum(thread.name == "seat" for thread in {*threading.enumerate()} - before) == 2 + 1
    carry(services.publisher, services.receiver, 3, 7, ranks=(2, 1), port=services.port)
    assert await_ends(services.publisher, services.receiver) == ["", ""]
    full = {name: (tensor + 3).to(torch.bfloat16) for name, tensor in TENSORS.items()}
    assert sink.has_all(3, full)
    for one in (*sources, seat):
        one.close()


def exporter(meeting: ThreadMeeting, number: int) -> SimpleNamespace:
    parts = make_parts(meeting.rank, meeting.world_size, number)
    return SimpleNamespace(named_parts=lambda: parts)


@pytest.fixture
def model(tmp_path: Path) -> Iterator[Path]:
    yield save_model(tmp_path / "model")
    if dist.is_initialized():
        from learner.megatron.groups import stop_groups

        stop_groups()


def test_a_learner_sends_what_it_publishes(services, model, tmp_path):
    """The learner is held while it publishes its second version, which the sink gets meanwhile."""
    is_sent, is_held, held = threading.Event(), threading.Event(), {}
    sections = {"learner": {"steps": 3}, "checkpoint": {"every_steps": 10}}
    with running_cluster() as cluster, running(model, cluster, tmp_path, Faults(), {}, **sections) as run:
        learner = run.learner
        address = DeskAddress(services.publisher.server.address)
        learner._direct = DirectSource(RUNTIME, address, learner._ranks)

        def hold(name: str, place: tuple[int | None, ...]) -> None:
            if name == "handoff.copied":
                number = place[0]
                held[number] = {name: full.clone() for name, full in learner._policy.named_tensors()}
                if len(held) == 2:
                    is_held.set()
                    is_sent.wait(WAIT_S)

        set_hook(hold)
        thread = threading.Thread(target=run.go)
        thread.start()
        assert services.publisher.is_complete.wait(WAIT_S), "its seat comes with its second version"
        assert is_held.wait(WAIT_S)
        first, number = list(held)
        changed = [name for name in held[first] if not torch.equal(held[first][name], held[number][name])]
        assert changed, "the second version is another one"
        sink = ScriptedSink([(name, Rectangle.whole(full.shape)) for name, full in held[number].items()])
        seat = services.seat(sink)
        carry(services.publisher, services.receiver, number, 7, ranks=(1, 1), port=services.port)
        assert await_ends(services.publisher, services.receiver) == ["", ""]
        assert sink.has_all(number, held[number])
        is_sent.set()
        thread.join(2 * WAIT_S)
        assert not thread.is_alive()
        assert learner._direct._seat._stop.is_set()
        seat.close()
