"""A stranger at the store of weight sync: he reads nothing, and is in no group."""

from __future__ import annotations

import gc
import threading
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch.distributed import PrefixStore, TCPStore

from asyncrl.core.errors import DeadlineExceeded, SyncError
from asyncrl.core.files.private import make_secret
from asyncrl.core.runtime.threads import ThreadRuntime
from tests.weight_sync.cluster import WAIT_S
from weight_sync.backends.contract import Group
from weight_sync.backends.gloo import GlooTransport
from weight_sync.backends.rendezvous import connect_store, open_store
from weight_sync.backends.sealed import SealedStore

CLOCK = ThreadRuntime()
TIMEOUT = timedelta(seconds=WAIT_S)
SECRET = make_secret()
STRANGER_S = 1.5


@pytest.fixture
def store() -> TCPStore:
    return open_store("127.0.0.1", 0, TIMEOUT)


@pytest.fixture
def stranger(store: TCPStore) -> TCPStore:
    """A connection of someone who knows the port."""
    return TCPStore("127.0.0.1", store.port, is_master=False, wait_for_workers=False, timeout=TIMEOUT)


class Member(threading.Thread):
    """Forms a group, and sends or receives 100 bytes."""

    def __init__(self, store: TCPStore, rank: int, secret: str = SECRET, wait_s: float = WAIT_S) -> None:
        super().__init__(daemon=True)
        self._transport = GlooTransport(CLOCK, secret, store)
        self._group = Group(1, rank, 2, "127.0.0.1", store.port)
        self._wait_s = wait_s
        self.bytes_B = torch.full((100,), 7 if rank == 0 else 0, dtype=torch.uint8)
        self.error: Exception | None = None
        self.start()

    def run(self) -> None:
        try:
            self._transport.form(self._group, CLOCK.now() + self._wait_s)
            self._transport.broadcast(self.bytes_B, CLOCK.now() + self._wait_s)
        except (SyncError, DeadlineExceeded) as error:
            self.error = error
        self._transport.close()

    def end(self) -> Exception | None:
        self.join(2 * WAIT_S)
        assert not self.is_alive()
        return self.error


@pytest.mark.parametrize("rank", [0, 1])
def test_who_lacks_the_secret_is_in_no_group_and_disturbs_none(store: TCPStore, rank: int) -> None:
    """As rank 1 he would be sent the weights, as rank 0 his own would be received."""
    thief = Member(store, rank, make_secret(), STRANGER_S)
    honest = Member(store, 1 - rank)
    assert isinstance(thief.end(), DeadlineExceeded), "he waits for members of his own"
    assert int(thief.bytes_B.sum()) == (0 if rank else 700)
    other = Member(store, rank)
    assert honest.end() is None and other.end() is None
    assert int(honest.bytes_B.sum()) == int(other.bytes_B.sum()) == 700


def sealed(store: TCPStore, secret: str = SECRET, membership: int = 1) -> SealedStore:
    return SealedStore(
        connect_store(store, "127.0.0.1", store.port, TIMEOUT), secret, f"membership/{membership}"
    )


@pytest.fixture
def planted(store: TCPStore) -> SealedStore:
    """A membership in which a member has said where it listens."""
    found = sealed(store)
    found.set("0/1", b"10.0.0.7:4711")
    return found


def test_a_member_reads_what_another_has_set(store: TCPStore, planted: SealedStore) -> None:
    other = sealed(store)
    other.wait(["0/1"], TIMEOUT)
    assert other.check(["0/1"]) and not other.check(["0/2"]) and other.get("0/1") == b"10.0.0.7:4711"
    assert planted.add("count", 2) + other.add("count", 3) == 7


def test_a_thread_with_a_connection_of_its_own_reads_the_same_also_as_c_calls_it(
    store: TCPStore, planted: SealedStore
) -> None:
    """ProcessGroupNCCL may clone the store that it is given, and keeps no reference to what Python made."""
    assert planted.clone().get("0/1") == b"10.0.0.7:4711"
    prefixed: Any = PrefixStore("0", planted)
    other = prefixed.clone()
    gc.collect()
    assert other.get("1") == b"10.0.0.7:4711"


def test_a_stranger_who_lists_the_store_learns_nothing(stranger: TCPStore, planted: SealedStore) -> None:
    (name,) = stranger.list_keys()
    assert "0/1" not in name and "membership" not in name
    assert b"10.0.0.7" not in stranger.get(name) and b"4711" not in stranger.get(name)


def test_what_a_stranger_has_written_is_refused(
    store: TCPStore, stranger: TCPStore, planted: SealedStore
) -> None:
    (first,) = stranger.list_keys()
    planted.set("0/2", b"10.0.0.8:4711")
    (second,) = {*stranger.list_keys()} - {first}
    for forged in (b"10.6.6.6:1", b"", stranger.get(second)):  # also a member's own, from another place
        stranger.set(first, forged)
        with pytest.raises(RuntimeError, match="what stands under '0/1' in the store is of no member"):
            planted.get("0/1")
    assert not sealed(store, membership=2).check(["0/1"]), "another membership has other names"
