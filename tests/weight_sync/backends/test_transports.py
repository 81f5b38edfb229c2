"""The contract of transports: gloo over real processes, and what holds of a folder too."""

from __future__ import annotations

import os
import queue
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
from torch.distributed import TCPStore

from asyncrl.core.errors import DeadlineExceeded, SyncError
from asyncrl.core.files.private import make_secret
from asyncrl.core.runtime.threads import ThreadEvent, ThreadRuntime
from tests.weight_sync.cluster import WAIT_S, processes
from weight_sync.backends.contract import DigestMismatch, Group, Transport
from weight_sync.backends.folder import FolderTransport, Shelf
from weight_sync.backends.gloo import GlooTransport
from weight_sync.backends.store import Store, StoreError
from weight_sync.backends.tags import TaggedTransport
from weight_sync.encoding.delta_codec import carry_whole
from weight_sync.protocol.rounds import DIGEST, STORE, TRANSPORT
from weight_sync.transfer_executor import MAX_UNDER_WAY, TransferExecutor, TransferOrder

CLOCK = ThreadRuntime()
BIG_BYTES = 64 << 20
SECRET = make_secret()


def until(seconds: float) -> float:
    return CLOCK.now() + seconds


def make_store() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=10))


def make_group(store: TCPStore, world: int, membership: int = 1, rank: int = 0) -> Group:
    return Group(membership, rank, world, "127.0.0.1", store.port)


def receive(group: Group, secret: str, sizes: list[int], end: Connection) -> None:
    """Entry of a peer: receive a bucket of each size, or stop where the size is negative."""
    torch.set_num_threads(1)
    transport = GlooTransport(CLOCK, secret)
    transport.form(group, until(WAIT_S))
    for size in sizes:
        if size < 0:
            os.kill(os.getpid(), signal.SIGSTOP)
        bucket = torch.zeros(abs(size), dtype=torch.uint8)
        transport.broadcast(bucket, until(WAIT_S))
        end.send((int(bucket[0]), int(bucket[-1]), int(bucket.sum())))
    end.recv()


class Peers:
    """Receiving processes of one group."""

    def __init__(self) -> None:
        self.processes: list[Any] = []
        self.ends: list[Connection] = []

    def start(self, group: Group, sizes: list[int]) -> None:
        ours, theirs = processes.Pipe()
        process = processes.Process(target=receive, args=(group, SECRET, sizes, theirs), daemon=True)
        process.start()
        self.processes.append(process)
        self.ends.append(ours)

    def next(self, index: int) -> Any:
        assert self.ends[index].poll(WAIT_S), "the peer reports nothing"
        return self.ends[index].recv()

    def kill(self, index: int) -> None:
        os.kill(self.processes[index].pid, signal.SIGKILL)


@pytest.fixture
def peers() -> Iterator[Peers]:
    started = Peers()
    yield started
    for process in started.processes:
        process.kill()
        process.join(WAIT_S)


def bucket_of(size: int, value: int) -> torch.Tensor:
    return torch.full((size,), value, dtype=torch.uint8)


def test_every_member_receives_every_bucket_in_order(peers):
    store = make_store()
    for rank in (1, 2):
        peers.start(make_group(store, 3, rank=rank), [100, 5000, 1])
    transport = GlooTransport(CLOCK, SECRET, store)
    transport.form(make_group(store, 3), until(WAIT_S))
    for size, value in ((100, 3), (5000, 7), (1, 9)):
        transport.broadcast(bucket_of(size, value), until(WAIT_S))
        assert [peers.next(i) for i in (0, 1)] == [(value, value, size * value)] * 2
    transport.close()


def test_broadcasts_that_are_under_way_together_arrive_each_in_its_place(peers):
    store, sizes = make_store(), [BIG_BYTES, 100, BIG_BYTES]
    for rank in (1, 2):
        peers.start(make_group(store, 3, rank=rank), sizes)
    transport = GlooTransport(CLOCK, SECRET, store)
    transport.form(make_group(store, 3), until(WAIT_S))
    under_way = [transport.start(bucket_of(size, 1 + i), until(WAIT_S)) for i, size in enumerate(sizes)]
    for i, broadcast in enumerate(under_way):
        broadcast.wait()
        assert [peers.next(index)[:2] for index in (0, 1)] == [(1 + i, 1 + i)] * 2
    transport.close()


def test_a_group_that_does_not_come_together_fails_at_its_deadline():
    store = make_store()
    transport = GlooTransport(CLOCK, SECRET, store)
    with pytest.raises(DeadlineExceeded, match="membership 1 did not form"):
        transport.form(make_group(store, 2), until(0.3))


def test_a_member_that_is_killed_fails_the_broadcast_at_once(peers):
    store = make_store()
    peers.start(make_group(store, 2, rank=1), [1, BIG_BYTES])
    transport = GlooTransport(CLOCK, SECRET, store)
    transport.form(make_group(store, 2), until(WAIT_S))
    transport.broadcast(bucket_of(1, 1), until(WAIT_S))
    peers.next(0)
    peers.kill(0)
    with pytest.raises(SyncError):
        transport.broadcast(bucket_of(BIG_BYTES, 1), until(60.0))


def test_a_member_that_is_stopped_fails_the_broadcast_at_its_deadline_and_the_others_wake(peers):
    store = make_store()
    peers.start(make_group(store, 2, rank=1), [1, -BIG_BYTES])
    transport = GlooTransport(CLOCK, SECRET, store)
    transport.form(make_group(store, 2), until(WAIT_S))
    transport.broadcast(bucket_of(1, 1), until(WAIT_S))
    peers.next(0)
    with pytest.raises(DeadlineExceeded):
        transport.broadcast(bucket_of(BIG_BYTES, 1), until(0.5))


def test_closing_a_group_does_not_wait_for_an_operation_that_hangs(peers):
    store = make_store()
    peers.start(make_group(store, 2, rank=1), [1, -BIG_BYTES])
    transport, deadline = GlooTransport(CLOCK, SECRET, store), until(20.0)
    transport.form(make_group(store, 2), deadline)
    transport.broadcast(bucket_of(1, 1), deadline)
    peers.next(0)
    with ThreadPoolExecutor() as pool:
        hanging = pool.submit(transport.broadcast, bucket_of(BIG_BYTES, 1), deadline)
        time.sleep(0.2)  # if it has not begun by then, the test shows nothing, but it does not fail
        transport.abort()
        transport.close()
        assert CLOCK.now() < deadline
        assert not hanging.done()
        peers.kill(0)
        with pytest.raises(SyncError):
            hanging.result()
    assert transport._process_group is None


def test_two_memberships_of_the_same_members_do_not_meet(peers):
    store = make_store()
    for membership in (1, 2):
        peers.start(make_group(store, 2, membership, rank=1), [10])
    for membership in (2, 1):
        transport = GlooTransport(CLOCK, SECRET, store)
        transport.form(make_group(store, 2, membership), until(WAIT_S))
        transport.broadcast(bucket_of(10, membership), until(WAIT_S))
        assert peers.next(membership - 1)[0] == membership


class HungTransport:
    """Stands for a peer that never comes: waits until it is closed."""

    def __init__(self) -> None:
        self.is_formed, self.is_closed = ThreadEvent(), ThreadEvent()

    def form(self, group: Group, until: float) -> None:
        self.is_formed.set()

    def start(self, bucket: torch.Tensor, until: float, name: str = "") -> HungTransport:
        return self

    def wait(self) -> None:
        assert self.is_closed.wait(WAIT_S), "nobody closed it"
        raise SyncError("it was closed")

    def abort(self) -> None:
        self.is_closed.set()

    close = abort


def test_closing_a_carrier_wakes_its_running_transfers():
    transport, ends = HungTransport(), queue.Queue[str]()
    transfers = TransferExecutor(CLOCK, lambda _: transport)
    order = TransferOrder(1, 1, Group(1, 0, 2, "127.0.0.1", 1), frozenset({1}), 10 * WAIT_S)
    transfers.carry(order, [bucket_of(10, 1)], lambda *_: None, lambda order, cause, message: ends.put(cause))
    assert transport.is_formed.wait(WAIT_S)
    transfers.close()
    assert ends.get(timeout=WAIT_S / 4) == TRANSPORT


def make_folder_transport() -> FolderTransport:
    store = Store(CLOCK, f"memory://{make_secret()}")
    return FolderTransport(CLOCK, store, SECRET, Shelf(CLOCK, store, SECRET, "run"))


def make_unformed(name: str) -> Transport:
    made: dict[str, Transport] = {
        "gloo": GlooTransport(CLOCK, SECRET),
        "tagged": TaggedTransport(GlooTransport(CLOCK, SECRET), SECRET),
        "folder": make_folder_transport(),
    }
    return made[name]


@pytest.mark.parametrize("name", ["gloo", "tagged", "folder"])
def test_a_transport_that_never_formed_or_was_closed_refuses_to_broadcast(name):
    transport = make_unformed(name)
    with pytest.raises(SyncError, match="not usable"):
        transport.broadcast(bucket_of(1, 1), until(WAIT_S))
    transport.close()
    transport.close()
    transport.abort()


@pytest.mark.parametrize("name", ["gloo", "tagged", "folder"])
def test_no_time_left_is_a_missed_deadline(name):
    with pytest.raises(DeadlineExceeded):
        make_unformed(name).form(Group(1, 0, 1, "127.0.0.1", 1), until(-1.0))


class LateMismatch:
    """Checks of buckets: the second one fails, and only after the fourth bucket has arrived."""

    def __init__(self) -> None:
        self.arrived: list[int] = []
        self.fourth = ThreadEvent()

    def __call__(self, index: int, bucket: torch.Tensor) -> Callable[[], None]:
        self.arrived.append(index)
        if index == 3:
            self.fourth.set()
        return partial(self._check, index)

    def _check(self, index: int) -> None:
        if index == 1:
            assert self.fourth.wait(WAIT_S), "the transfer waited for a check"
            raise DigestMismatch("bucket 1")


KINDS = pytest.mark.parametrize("kind", ["gloo", "folder"])


def carry_alone(kind: str, after_bucket: Any, deadline_s: float) -> tuple[str, str]:
    """Carry five buckets in a group of one member; return the cause and the message of the end."""
    store = make_store()
    made: Transport = GlooTransport(CLOCK, SECRET, store) if kind == "gloo" else make_folder_transport()
    transfers = TransferExecutor(CLOCK, lambda _: made)
    order = TransferOrder(1, 1, replace(make_group(store, 1), folder="run/1/1"), frozenset({1}), deadline_s)
    ends: queue.Queue[tuple[str, str]] = queue.Queue()
    buckets = [bucket_of(10, index) for index in range(5)]
    carry_bucket = partial(carry_whole, digests=[f"digest{index}" for index in range(5)])
    transfers.carry(
        order, buckets, after_bucket, lambda order, cause, message: ends.put((cause, message)), carry_bucket
    )
    end = ends.get(timeout=WAIT_S)
    transfers.close()
    return end


@KINDS
def test_buckets_are_checked_while_later_ones_travel_and_a_mismatch_fails_the_transfer(kind):
    checks = LateMismatch()
    assert carry_alone(kind, checks, WAIT_S) == (DIGEST, "bucket 1")
    assert checks.arrived == [0, 1, 2, 3, 4]


@KINDS
def test_a_check_that_does_not_end_fails_the_transfer_at_its_deadline(kind):
    never = ThreadEvent()
    cause, message = carry_alone(kind, lambda index, bucket: partial(never.wait, WAIT_S), 1.5)
    never.set()
    assert (cause, message) == (TRANSPORT, "the buckets were not verified in time")


@KINDS
def test_buckets_without_checks_are_carried(kind):
    assert carry_alone(kind, lambda index, bucket: None, WAIT_S) == ("", "")


class ScriptedTransport:
    """Stands for a group that breaks at its second broadcast; every broadcast must have its end."""

    def __init__(self) -> None:
        self.under_way: list[int] = []
        self.most_under_way = 0

    def form(self, group: Group, until: float) -> None:
        return

    def start(self, bucket: torch.Tensor, until: float, name: str = "") -> ScriptedBroadcast:
        assert int(bucket[0]) != 3, "goes on after a failure"
        self.under_way.append(int(bucket[0]))
        self.most_under_way = max(self.most_under_way, len(self.under_way))
        return ScriptedBroadcast(self, int(bucket[0]))

    def broadcast(self, bucket: torch.Tensor, until: float, name: str = "") -> None:
        self.start(bucket, until).wait()

    def abort(self) -> None:
        return

    def close(self) -> None:
        assert not self.under_way, "closed with a broadcast under way"


@dataclass
class ScriptedBroadcast:
    transport: ScriptedTransport
    value: int

    def wait(self) -> None:
        self.transport.under_way.remove(self.value)
        if self.value:
            raise SyncError(f"the group broke at bucket {self.value}")


def test_a_transfer_that_fails_leaves_no_broadcast_behind_and_tells_the_first_failure():
    transport, ends = ScriptedTransport(), queue.Queue[tuple[str, str]]()
    transfers = TransferExecutor(CLOCK, lambda _: transport)
    order = TransferOrder(1, 1, Group(1, 0, 2, "127.0.0.1", 1), frozenset({1}), WAIT_S)
    buckets = [bucket_of(10, index) for index in range(5)]
    transfers.carry(order, buckets, lambda *_: None, lambda order, cause, message: ends.put((cause, message)))
    assert ends.get(timeout=WAIT_S) == (TRANSPORT, "the group broke at bucket 1")
    assert transport.most_under_way == MAX_UNDER_WAY and not transport.under_way
    transfers.close()


@KINDS
def test_an_error_that_nobody_foresaw_ends_the_transfer_with_its_cause(kind):
    def after_bucket(index: int, bucket: torch.Tensor) -> None:
        raise MemoryError("no memory is left")

    assert carry_alone(kind, after_bucket, WAIT_S) == (TRANSPORT, "no memory is left")


@KINDS
def test_a_failure_of_a_store_ends_the_transfer_with_a_cause_of_its_own(kind):
    def after_bucket(index: int, bucket: torch.Tensor) -> None:
        raise StoreError("it takes nothing")

    assert carry_alone(kind, after_bucket, WAIT_S) == (f"{STORE}: it takes nothing", "it takes nothing")


def test_bytes_that_are_mapped_and_wrong_end_their_check_with_its_cause():
    def after_bucket(index: int, bucket: torch.Tensor) -> None:
        raise DigestMismatch("other bytes")

    ends = queue.Queue[tuple[str, str]]()
    transfers = TransferExecutor(CLOCK, lambda _: ScriptedTransport())
    transfers.check(1, [bucket_of(10, 0)], after_bucket, lambda cause, message: ends.put((cause, message)))
    assert ends.get(timeout=WAIT_S) == (DIGEST, "other bytes")
    transfers.close()
