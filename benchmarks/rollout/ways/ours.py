"""Our own path: a replica as a run has it, with its buffer in another process and weights that were synced.

Both are built by the composition roots of the project. No learner takes groups away: it would cost a
processor that the engine needs, and what is measured is the replica.
"""

from __future__ import annotations

import contextlib
import threading
import time
from multiprocessing.connection import Connection
from typing import Any

from asyncrl.buffer import composition as buffer_composition
from asyncrl.buffer.client import LearnerClient
from asyncrl.core.errors import ServiceFailed
from asyncrl.core.runtime.threads import ThreadEvent
from asyncrl.core.service import ServiceContext
from asyncrl.core.states import ServiceState
from asyncrl.core.status.replica import ReplicaStatus
from benchmarks.rollout.ways.bare import tokens_in_flight
from benchmarks.rollout.ways.setting import START_S, Count
from benchmarks.weight_sync.peers.peers import now_s, obey
from rollout_service import composition
from rollout_service.replica.service import Replica

POLL_S = 0.05


def run_buffer(pipe: Connection, context: ServiceContext) -> None:
    """Entry of the buffer's process: one version is registered, then replicas are served."""
    service = buffer_composition.build(context)
    stop = ThreadEvent()
    thread = threading.Thread(target=service.run, args=(stop,), daemon=True)
    thread.start()
    with contextlib.closing(LearnerClient(service.address, keys=context.client_keys)) as learner:
        learner.open("bench")
        learner.register_version(0)
    pipe.send(service.address)
    try:
        obey(pipe, {"status": service.status})
    finally:
        stop.set()
        thread.join()


class Ours:
    """The replica in a thread of its own, as a Ray actor runs it; it begins once a version is published."""

    def __init__(self, context: ServiceContext) -> None:
        self._replica: Replica = composition.build(context)
        self._stop = ThreadEvent()
        self._thread = threading.Thread(target=self._replica.run, args=(self._stop,), daemon=True)
        self._thread.start()
        end = time.monotonic() + START_S
        while self.status().state == ServiceState.STARTING:
            if time.monotonic() > end:
                raise ServiceFailed("the replica does not start")
            time.sleep(POLL_S)

    def core_pids(self) -> list[int]:
        """Return the processes that compute."""
        return list(self.status().child_pids)

    def count(self) -> Count:
        """Return what the replica has generated so far."""
        status, parts = self.status(), self._replica.parts
        assert parts is not None, "it has started"
        client: Any = parts.engine._engine
        assert status.engine is not None, "it has started"
        num_tokens = status.engine.tokens + tokens_in_flight(client.client)
        return Count(now_s(), num_tokens, status.engine.trajectories, status.engine.in_flight_requests)

    def status(self) -> ReplicaStatus:
        """Return the replica's status. Raises ServiceFailed if it has ended."""
        if not self._thread.is_alive():
            raise ServiceFailed("the replica has ended")
        return self._replica.status()

    def close(self) -> None:
        """End it in order."""
        self._stop.set()
        self._thread.join()
