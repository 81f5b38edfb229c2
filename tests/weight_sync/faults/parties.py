"""The two parties beside the services, as small processes: an engine stand-in and a learner.

The engine stand-in takes staged copies through the real link and copies them tensor by tensor, as a load
that overwrites in place does. It writes down what it holds after each load, so that a test can tell a
mix of versions. The learner publishes through the real publisher_client, when it is told to.
"""

from __future__ import annotations

import asyncio
import json
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from asyncrl.core.errors import AsyncrlError, SyncError
from asyncrl.core.runtime.faults import VARIABLE, fault_point, is_wanted
from asyncrl.core.runtime.threads import ThreadRuntime
from asyncrl.core.staleness import UNLOADED, PolicyVersion
from tests.weight_sync.cluster import follow_test, model, prepare_child
from weight_sync.link import ReceiverLink
from weight_sync.memory.staging import Staged, open_tensors
from weight_sync.publisher_client import PublisherClient

POLL_S = 0.2
MIX = -1
"""Stands for the version of weights that are not all of one version."""


@dataclass(frozen=True)
class EngineRole:
    """An engine beside the receiver at `receiver_address`; it appends its loads to `loads_path`.

    Attributes:
        scale: Of the model, see `cluster.model`.
        load_s: How long a load takes at least.
    """

    receiver_address: str
    loads_path: Path
    log_path: Path
    scale: int = 1
    load_s: float = 0.0


@dataclass(frozen=True)
class Load:
    """One load as the engine stand-in saw it.

    Attributes:
        number: Version number that it was told to load.
        held: Version number of all its weights afterwards, or MIX.
        ok: Whether the load was whole; an engine that failed serves nothing.
        began_s: Start of the load, by the machine's monotonic clock.
        at_s: Its end.
        started_s: Of the engine's process.
    """

    number: int
    held: int
    ok: bool
    began_s: float
    at_s: float
    started_s: float


class EngineStandIn:
    """See the module."""

    def __init__(self, role: EngineRole) -> None:
        self._role = role
        self._weights: dict[str, torch.Tensor] = {}
        self._started_s = time.monotonic()
        self.serving = UNLOADED

    async def follow(self, stop: threading.Event) -> None:
        """Load what comes until `stop`."""
        link = ReceiverLink(ThreadRuntime(), self._role.receiver_address)
        while not stop.is_set():
            try:
                await self._pin_if_told(link)
                staged = await link.next_staged(self.serving, POLL_S)
                if staged is not None:
                    await self._swap(link, staged)
            except AsyncrlError:
                await asyncio.sleep(POLL_S / 4)  # the receiver is away
        link.close()

    async def _pin_if_told(self, link: ReceiverLink) -> None:
        """Pin or unpin, as a replica does around an evaluation, once where the environment says so."""
        for point, call in (("engine.pins", link.pin), ("engine.unpins", link.unpin)):
            if is_wanted(point):
                del os.environ[VARIABLE]
                await call()

    async def _swap(self, link: ReceiverLink, staged: Staged) -> None:
        number = staged.version.number
        began_s = time.monotonic()
        fault_point("engine.swapping", number)
        is_ok = self._load(staged)
        self.serving = number if is_ok else UNLOADED
        self._note(number, is_ok, began_s)
        fault_point("engine.loaded", number)
        await link.report_loaded(number, ok=is_ok, error="" if is_ok else "half loaded")

    def _load(self, staged: Staged) -> bool:
        tensors = list(open_tensors(staged))
        time.sleep(self._role.load_s)
        for index, (name, tensor) in enumerate(tensors):
            self._weights[name] = tensor.clone()
            if index == len(tensors) // 2:
                fault_point("engine.half", staged.version.number)
                if is_wanted("engine.fails", staged.version.number):
                    del os.environ[VARIABLE]  # once
                    return False
        return True

    def _note(self, number: int, is_ok: bool, began_s: float) -> None:
        load = Load(number, self._held(number), is_ok, began_s, time.monotonic(), self._started_s)
        with self._role.loads_path.open("a") as file:
            file.write(json.dumps(asdict(load)) + "\n")

    def _held(self, number: int) -> int:
        wanted = dict(model(number, self._role.scale))
        is_whole = wanted.keys() == self._weights.keys() and all(
            torch.equal(self._weights[name], tensor) for name, tensor in wanted.items()
        )
        return number if is_whole else MIX


def run_engine(role: EngineRole, test: Connection) -> None:
    """Entry of an engine's process."""
    stop = prepare_child(role.log_path)
    test.send("up")
    threading.Thread(target=follow_test, args=(test, stop), daemon=True).start()
    asyncio.run(EngineStandIn(role).follow(stop))


@dataclass(frozen=True)
class LearnerRole:
    """A learner with a fencing token."""

    publisher_address: str
    shm_prefix: str
    bucket_bytes: int
    token: int
    log_path: Path
    scale: int = 1


def run_learner(role: LearnerRole, test: Connection) -> None:
    """Entry of a learner's process: publishes each number that comes, answers with (error or "", seconds)."""
    stop = prepare_child(role.log_path)
    test.send("up")
    publisher_client: PublisherClient | None = None
    while not stop.is_set():
        if not test.poll(POLL_S):
            continue
        try:
            order = test.recv()
        except EOFError:
            break
        if isinstance(order, dict):
            os.environ.update(order)
            test.send("armed")
            continue
        start = time.monotonic()
        error = ""
        try:
            if publisher_client is None:
                publisher_client = PublisherClient(
                    ThreadRuntime(), role.publisher_address, role.shm_prefix, role.bucket_bytes, role.token
                )
            _publish(publisher_client, order, role.scale)
        except AsyncrlError as found:
            error = f"{type(found).__name__}: {found}"
        test.send((error, time.monotonic() - start))
    if publisher_client is not None:
        publisher_client.close()


def _publish(publisher_client: PublisherClient, number: int, scale: int) -> None:
    fault_point("learner.asking", number)
    if not publisher_client.publish(PolicyVersion(number, number - 1), _exported(number, scale)):
        raise SyncError("no segment is free")
    fault_point("learner.published", number)


def _exported(number: int, scale: int) -> Iterator[tuple[str, Any]]:
    for index, entry in enumerate(model(number, scale)):
        yield entry
        fault_point("learner.tensor", number, index)
