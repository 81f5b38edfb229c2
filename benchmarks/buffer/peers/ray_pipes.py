"""Two ways over Ray: its Queue, and its object store with references handed over in a queue.

Each process is a driver of one local Ray, as the processes of a run are.
"""

from __future__ import annotations

import contextlib
import os
import time
from typing import Any

from benchmarks.buffer.peers.load import Log, Turn, entry_of, make_pool, pace

NAME, NAMESPACE = "bench", "bench"
AHEAD_GROUPS = 32
OBJECT_STORE_BYTES = 1 << 30
# The drivers of one machine would not share the token of a local Ray. It is read when Ray is imported.
os.environ["RAY_AUTH_MODE"] = "disabled"


class RayServer:
    """A local Ray with a bounded queue, anew for each turn."""

    def __init__(self) -> None:
        self._queue: Any = None

    def open(self, turn: Turn) -> str:
        from ray.util.queue import Queue

        connect_to_ray("local")
        name = f"{NAME}.{time.monotonic_ns()}"
        options = {"name": name, "num_cpus": 0, "max_concurrency": 1000}
        self._queue = Queue(maxsize=max(1, self._queued(turn)), actor_options=options)
        self._queue.qsize()
        return f"{local_address()} {name}"

    def _queued(self, turn: Turn) -> int:
        return AHEAD_GROUPS * turn.group_size // turn.per_entry

    def connect(self, address: str) -> None:
        connect_to_ray(address.split()[0])

    def close(self) -> None:
        if self._queue is not None:
            self._queue.shutdown(force=True)
            self._queue = None


def local_address() -> str:
    """Return where the Ray of this process is reached on this machine, whatever it calls its host."""
    import ray

    return "127.0.0.1:" + str(ray.get_runtime_context().gcs_address).rpartition(":")[2]


def connect_to_ray(address: str) -> None:
    """Start a Ray (`local`) or join one, once per process."""
    import ray

    if ray.is_initialized():
        return
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    options: dict[str, Any] = {"namespace": NAMESPACE, "log_to_driver": False, "logging_level": "error"}
    options["_node_ip_address"] = "127.0.0.1"
    if address == "local":
        options |= {"num_cpus": 4, "include_dashboard": False, "object_store_memory": OBJECT_STORE_BYTES}
    ray.init(address=address, **options)


def _queue(address: str) -> Any:
    """Return the turn's queue, as a handle of this process."""
    import ray
    from ray.util.queue import Queue

    gcs_address, name = address.split()
    connect_to_ray(gcs_address)
    queue = Queue.__new__(Queue)
    queue.maxsize, queue.actor = 0, ray.get_actor(name)
    return queue


class RayQueue(RayServer):
    """`ray.util.queue.Queue`: one entry per put and get, as verl's and AReaL's trainers use it."""

    def produce(self, address: str, turn: Turn, index: int) -> Log:
        from ray.util.queue import Full

        log, pool, queue = Log(), make_pool(turn), _queue(address)
        for serial, number in pace(turn, index, log):
            with contextlib.suppress(Full):
                queue.put((number, entry_of(pool, serial, turn)), timeout=0.3)
        return log

    def consume(self, address: str, turn: Turn, index: int) -> Log:
        from ray.util.queue import Empty

        log, queue = Log(), _queue(address)
        while time.monotonic() < turn.stop_s:
            with contextlib.suppress(Empty):
                number, entry = queue.get(timeout=0.1)
                log.note(turn, number, len(entry))
        return log


class RayObjects(RayServer):
    """`ray.put` of each entry; its reference goes through the queue; `ray.get` maps it without a copy."""

    def produce(self, address: str, turn: Turn, index: int) -> Log:
        import ray
        from ray.util.queue import Full

        log, pool, queue = Log(), make_pool(turn), _queue(address)
        for serial, number in pace(turn, index, log):
            with contextlib.suppress(Full):
                queue.put((number, [ray.put(entry_of(pool, serial, turn))]), timeout=0.3)
        return log

    def consume(self, address: str, turn: Turn, index: int) -> Log:
        import ray
        from ray.util.queue import Empty

        log, queue = Log(), _queue(address)
        while time.monotonic() < turn.stop_s:
            with contextlib.suppress(Empty):
                number, (reference,) = queue.get(timeout=0.1)
                log.note(turn, number, len(ray.get(reference)))
        return log
