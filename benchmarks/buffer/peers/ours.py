"""Our own way: the buffer service with its ledger and journal, its replica and learner clients."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import zmq

from asyncrl.buffer.client import LearnerClient, ReplicaClient
from asyncrl.buffer.ledger.tickets import LedgerSettings
from asyncrl.buffer.messages import LeaseGrant
from asyncrl.core.experience import Group, Trajectory
from asyncrl.core.runtime.threads import ThreadEvent, ThreadRuntime
from asyncrl.core.staleness import Span
from benchmarks.buffer.peers.load import Log, Turn, make_pool

GROUPS_PER_STEP = 16
PACED_GROUPS_PER_STEP = 2
GROUPS_PER_CHECKPOINT = 64
MEMORY_BYTES = 512 << 20
PUSHES_IN_FLIGHT = 8
WAIT_S = 0.5


class Ours:
    """The full path: lease, encode, push, check, ledger, journal, reserve, fetch, decode, checkpoint."""

    def __init__(self) -> None:
        self._stop = ThreadEvent()
        self._thread: threading.Thread | None = None
        self._folder: Path | None = None

    def open(self, turn: Turn) -> str:
        self._folder = Path(tempfile.mkdtemp(prefix="asyncrl-bench-"))
        group_bytes = turn.num_bytes + 256 * turn.group_size + 4096
        settings = LedgerSettings(
            run_seed=0,
            groups_per_step=_groups_per_step(turn),
            max_lag=1 << 30,
            ready_batches=4 if not turn.groups_per_s else 1 << 20,
            memory_bytes=max(MEMORY_BYTES, 4 * GROUPS_PER_STEP * group_bytes),
            max_group_bytes=group_bytes,
            lease_s=60.0,
            max_attempts=3,
        )
        from asyncrl.buffer.journals.kind import open_journal  # only the server's process needs it
        from asyncrl.buffer.service import BufferService
        from asyncrl.buffer.store import ExperienceStore
        from asyncrl.core.config.tree import BufferSection

        kind = turn.options["journal"]
        url = "managed" if kind == "redis" else None
        journal = open_journal(BufferSection(journal=kind, url=url), self._folder)
        runtime = ThreadRuntime()
        store = ExperienceStore(
            settings, journal, turn.group_size, drops_constant_groups=False, now=runtime.now()
        )
        service = BufferService(store, runtime)
        self._stop.clear()
        self._thread = threading.Thread(target=service.run, args=(self._stop,))
        self._thread.start()
        leader = LearnerClient(service.address)
        with contextlib.closing(leader):
            leader.open("bench")
            leader.register_version(0)
        return json.dumps(
            {"buffer": service.address, "ranks": f"ipc://{self._folder}/ranks", "token": leader.token}
        )

    def connect(self, address: str) -> None:
        pass

    def close(self) -> None:
        if self._thread is not None:
            self._stop.set()
            self._thread.join()
            self._thread = None
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def produce(self, address: str, turn: Turn, index: int) -> Log:
        return asyncio.run(_Replica(json.loads(address)["buffer"], turn, index).run())

    def consume(self, address: str, turn: Turn, index: int) -> Log:
        where = json.loads(address)
        with contextlib.closing(LearnerClient(where["buffer"], where["token"])) as client:
            if index:
                return _fetch_for_leader(client, turn, f"{where['ranks']}{index}")
            return _lead(client, turn, where["ranks"])


def _groups_per_step(turn: Turn) -> int:
    """A paced turn trains small batches, so that a group waits for the buffer and not for its batch."""
    return PACED_GROUPS_PER_STEP if turn.groups_per_s else GROUPS_PER_STEP


class _Replica:
    """A producer: leases ahead, encodes, and keeps a few pushes in flight."""

    def __init__(self, address: str, turn: Turn, index: int) -> None:
        self._turn = turn
        self._index = index
        self._log = Log()
        self._client = ReplicaClient(address, f"rollout.{index}")
        self._grants: asyncio.Queue[LeaseGrant] = asyncio.Queue(2 * PUSHES_IN_FLIGHT)
        self._room = asyncio.Semaphore(PUSHES_IN_FLIGHT)

    async def run(self) -> Log:
        turn = self._turn
        await self._client.describe_data(1 << 20, "bench")
        pool = [
            tuple(
                Trajectory(
                    response_ids=arrays["response_ids"],
                    loss_mask=arrays["loss_mask"],
                    logprobs=arrays["logprobs"],
                    spans=(Span(1, 0, turn.num_tokens),),
                    reward=float(sample % 2),
                    finish_reason="stop",
                )
                for sample, arrays in enumerate(group)
            )
            for group in make_pool(turn)
        ]
        prompt = pool[0][0].response_ids[:64].copy()
        leasing = asyncio.create_task(self._lease())
        await asyncio.sleep(turn.start_s - time.monotonic())
        pushes: set[asyncio.Task[None]] = set()
        for serial, due in enumerate(self._dues()):
            if due:
                await asyncio.sleep(max(0.0, due - time.monotonic()))
            await self._room.acquire()
            try:
                async with asyncio.timeout(turn.stop_s - time.monotonic()):
                    grant = await self._grants.get()
            except TimeoutError:
                break
            if due:
                self._log.times[grant.ticket] = due
            group = Group(grant.ticket, grant.attempt, prompt, pool[serial % len(pool)])
            task = asyncio.create_task(self._push(group))
            pushes.add(task)
            task.add_done_callback(pushes.discard)
        leasing.cancel()
        for task in pushes:
            task.cancel()
        await asyncio.gather(leasing, *pushes, return_exceptions=True)
        self._client.close()
        return self._log

    def _dues(self) -> Iterator[float]:
        turn, serial = self._turn, 0
        while time.monotonic() < turn.stop_s:
            if not turn.groups_per_s:
                yield 0.0
                continue
            due = turn.start_s + (serial * turn.num_producers + self._index) / turn.groups_per_s
            if due >= turn.stop_s:
                return
            yield due
            serial += 1

    async def _lease(self) -> None:
        while True:
            reply = await self._client.lease(1, PUSHES_IN_FLIGHT, WAIT_S)
            for grant in reply.grants:
                await self._grants.put(grant)

    async def _push(self, group: Group) -> None:
        try:
            await self._client.push(group)
        finally:
            self._room.release()


def _lead(client: LearnerClient, turn: Turn, ranks: str) -> Log:
    """Reserve, fetch the own share, wait for the other ranks, train; checkpoint now and then."""
    log, step = Log(), 0
    others: list[zmq.Socket[bytes]] = []
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
    for rank in range(1, turn.num_consumers):
        other = context.socket(zmq.PAIR)
        other.bind(f"{ranks}{rank}")
        others.append(other)
    while (left_s := turn.stop_s - time.monotonic()) > 0:
        batch = client.reserve(step, min(WAIT_S, left_s))
        if batch is None:
            continue
        tickets = [ticket.ticket for ticket in batch.tickets]
        shares = [tickets[rank :: turn.num_consumers] for rank in range(turn.num_consumers)]
        for other, share in zip(others, shares[1:], strict=True):
            other.send_json(share)
        _take(client, shares[0], turn, log)
        for other in others:
            other.recv()
        client.trained(step)
        step += 1
        if step * _groups_per_step(turn) % GROUPS_PER_CHECKPOINT == 0:
            client.checkpointed(step, f"digest-{step}", [step])
    for other in others:
        other.send(b"null")
        other.close(linger=1000)
    return log


def _fetch_for_leader(client: LearnerClient, turn: Turn, ranks: str) -> Log:
    log = Log()
    leader: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PAIR)
    with leader:
        leader.connect(ranks)
        while (share := json.loads(leader.recv())) is not None:
            _take(client, share, turn, log)
            leader.send(b"")
    return log


def _take(client: LearnerClient, tickets: list[int], turn: Turn, log: Log) -> None:
    ahead = GROUPS_PER_STEP if turn.num_consumers == 1 and not turn.groups_per_s else 0
    for group in client.fetch(tickets, prefetch=ahead):
        log.note(turn, group.ticket, len(group.trajectories))
