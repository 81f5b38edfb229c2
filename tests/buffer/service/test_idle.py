"""A buffer that nobody asks sleeps until a lease or a wait is over, and then acts by itself."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from asyncrl.buffer.service import BufferService
from asyncrl.buffer.store import ExperienceStore
from asyncrl.core.rpc import Client
from tests.buffer.parts import make_store
from tests.runtimes import CountingRuntime
from tests.threads import in_thread

WATCHED_S, WAIT_S = 4.0, 60.0


@contextmanager
def serving(store: ExperienceStore, runtime: CountingRuntime) -> Iterator[BufferService]:
    service = BufferService(store, runtime)
    with in_thread(service.run):
        yield service


def lease(client: Client, wait_s: float = 0.0) -> int:
    asked = {"replica": "a", "version": 1, "want": 1, "wait_s": wait_s}
    return len(client.call("lease", deadline_s=WAIT_S, **asked).args["grants"])


def begin(client: Client) -> None:
    client.call("describe_data", num_prompts=100, digest="digest", sources=[])
    token = client.call("open", holder="learner").args["token"]
    client.call("register_version", token=token, step=0)


def test_a_buffer_with_a_lease_and_a_wait_wakes_for_what_is_due_alone(tmp_path: Path) -> None:
    runtime = CountingRuntime()
    with serving(make_store(tmp_path, lease_s=30.0), runtime) as service:
        with closing(Client(CountingRuntime(), service.address)) as client:
            begin(client)
            while lease(client):
                pass
            client.begin("lease", replica="a", version=1, want=1, wait_s=20.0, deadline_s=WAIT_S)
            time.sleep(2.5)  # the journal is synced, the status renewed, the guard of memory at its slowest
            began = time.monotonic()
            with runtime.counting() as counted:
                time.sleep(WATCHED_S)
            watched_s = time.monotonic() - began
    assert 0 < counted.total() <= 2 * watched_s, counted


def test_a_lease_that_ends_is_granted_to_who_waits_without_another_call(tmp_path: Path) -> None:
    with serving(make_store(tmp_path, lease_s=3.0), CountingRuntime()) as service:
        with closing(Client(CountingRuntime(), service.address)) as client:
            begin(client)
            while lease(client):
                pass
            assert lease(client, wait_s=600.0), "the first lease is over after three seconds"
