"""Rendezvous of torch.distributed groups, and the interface on which it can be reached."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import psutil
import pytest
import torch
from torch.distributed import ProcessGroupGloo, Store

from asyncrl.control.machine.ports import HeldPort
from asyncrl.core.errors import SyncError
from asyncrl.core.files.private import make_secret
from weight_sync.backends.rendezvous import connect_store, join_store, open_store, own_address

TIMEOUT = timedelta(seconds=20)
STRANGER_TIMEOUT = timedelta(seconds=60)


def listening() -> set[tuple[str, int]]:
    connections = psutil.Process(os.getpid()).net_connections()
    return {tuple(one.laddr) for one in connections if one.status == psutil.CONN_LISTEN}


def test_a_store_listens_on_its_host_alone() -> None:
    before = listening()
    store = open_store("127.0.0.1", 0, TIMEOUT)
    assert listening() - before == {("127.0.0.1", store.port)}


def test_ranks_meet_whoever_comes_first() -> None:
    port = open_store("127.0.0.1", 0, TIMEOUT).port  # closed again at once: free
    with ThreadPoolExecutor() as pool:
        late = pool.submit(join_store, f"127.0.0.1:{port}", 1, TIMEOUT)
        first = join_store(f"127.0.0.1:{port}", 0, TIMEOUT)
        first.set("greeting", "hello")
        assert late.result().get("greeting") == b"hello"


class Meeting:
    """Two ranks that meet, with a stranger at the store before the second one comes."""

    def __init__(self, port: HeldPort, secret: str) -> None:
        self._place, self._secret = port.address, secret
        self._leader = join_store(port.address, 0, STRANGER_TIMEOUT, secret)
        self.stranger: Any = join_store(port.address, 2, STRANGER_TIMEOUT)

    def sums(self) -> list[float]:
        """Return the sum of 1 and 2 as each rank has it."""
        with ThreadPoolExecutor() as pool:
            first = pool.submit(self._reduce, 0, self._leader)
            second = pool.submit(self._reduce, 1, join_store(self._place, 1, STRANGER_TIMEOUT, self._secret))
            return [first.result(), second.result()]

    def _reduce(self, rank: int, store: Store) -> float:
        gloo: Any = ProcessGroupGloo
        options = gloo._Options()
        options._timeout, options._devices = STRANGER_TIMEOUT, [gloo.create_device(hostname="127.0.0.2")]
        values = torch.tensor([rank + 1.0])
        gloo(store, rank, 2, options).allreduce([values]).wait()
        return float(values)


def test_a_stranger_who_comes_first_and_speaks_for_the_ranks_ends_no_group() -> None:
    with HeldPort("127.0.0.2") as first, HeldPort("127.0.0.2") as second:
        seen = Meeting(first, "")
        assert seen.sums() == [3.0, 3.0]
        names = seen.stranger.list_keys()
        assert names, "he knows what a group without a secret calls its members"
        meeting = Meeting(second, make_secret())
        for name in names:
            meeting.stranger.set(name, "10.6.6.6:1")
        assert meeting.sums() == [3.0, 3.0]


def test_a_host_of_another_machine_is_refused_by_name() -> None:
    with pytest.raises(SyncError, match=r"nothing can listen on 203\.0\.113\.77"):
        open_store("203.0.113.77", 0, TIMEOUT)


def test_a_peer_on_loopback_is_met_there() -> None:
    assert own_address("127.0.0.1") == "127.0.0.1"


def test_who_waits_in_the_store_holds_up_no_other() -> None:
    store = open_store("127.0.0.1", 0, TIMEOUT)

    has_begun = threading.Event()

    def wait_for_the_last() -> None:
        waiting = connect_store(store, "127.0.0.1", store.port, TIMEOUT)
        has_begun.set()
        waiting.wait(["last"], timedelta(seconds=60))

    waiter = threading.Thread(target=wait_for_the_last)
    waiter.start()
    assert has_begun.wait(60.0)
    own = connect_store(store, "127.0.0.1", store.port, TIMEOUT)
    for index in range(20):
        own.set(f"key {index}", "")
        time.sleep(0.01)
    assert waiter.is_alive()
    own.set("last", "")
    waiter.join(60.0)
    assert not waiter.is_alive()
