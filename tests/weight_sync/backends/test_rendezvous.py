"""Rendezvous of torch.distributed groups, and the interface on which it can be reached."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import psutil
import pytest

from asyncrl.core.errors import SyncError
from weight_sync.backends.rendezvous import connect_store, join_store, open_store, own_address

TIMEOUT = timedelta(seconds=20)


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
