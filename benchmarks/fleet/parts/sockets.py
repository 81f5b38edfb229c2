"""A fleet over sockets: the buffer's service in a process, few processes that play many replicas, a learner.

Every replica has its own connection, leases, renewals and pushes; only what it generates is made up. Owns the
processes; what counts is the processor time of the buffer's process. Invariants: what is measured begins and
ends as a step of the learner does, and fleets of any size offer their rate from the first second on.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import multiprocessing
import os
import random
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from asyncrl.buffer.client import LearnerClient, ReplicaClient
from asyncrl.buffer.journals.kind import open_journal
from asyncrl.buffer.ledger.tickets import LedgerSettings
from asyncrl.buffer.messages import LeaseGrant
from asyncrl.buffer.service import BufferService
from asyncrl.buffer.store import ExperienceStore
from asyncrl.core.config.tree import BufferSection
from asyncrl.core.errors import DeadlineExceeded, ServiceFailed
from asyncrl.core.experience import Group, Trajectory
from asyncrl.core.runtime.allocation import keep_freed_memory
from asyncrl.core.runtime.threads import ThreadEvent, ThreadRuntime
from asyncrl.core.staleness import Span

FORKS = multiprocessing.get_context("forkserver")
GROUP_SIZE, NUM_TOKENS, PROMPT_TOKENS = 16, 4096, 64
GROUP_BYTES = 9 * GROUP_SIZE * NUM_TOKENS
GROUPS_PER_STEP, STEPS_PER_CHECKPOINT = 16, 4
IN_FLIGHT, NUM_PLAYERS = 2, 2
MEMORY_BYTES = 4 << 30
LEASE_S, WAIT_S, CALL_S = 60.0, 1.0, 30.0
START_S, END_S = 60.0, 5.0
POLL_S = 0.05
MIN_STEPS = 20
"""Of a window: a step more or less is 5 % of it."""


@dataclass(frozen=True)
class Load:
    """Offered load of a fleet: `groups_per_s` of all replicas together, 0 for as much as the buffer takes."""

    num_replicas: int
    groups_per_s: float = 0.0
    journal: str = "none"


@dataclass(frozen=True)
class Mark:
    """Counters at the end of a learner step.

    Attributes:
        time_s: Of the monotonic clock, which all processes share.
        cpu_s: Of the buffer's process since it began.
    """

    step: int
    trajectories: int
    time_s: float
    cpu_s: float


@dataclass(frozen=True)
class Taken:
    """Trajectories that the buffer took in `seconds`, with `cpu_s` of its process."""

    seconds: float
    cpu_s: float
    trajectories: int

    @classmethod
    def between(cls, first: Mark, last: Mark) -> Taken:
        """Return what was taken from one mark to another."""
        count = last.trajectories - first.trajectories
        return cls(last.time_s - first.time_s, last.cpu_s - first.cpu_s, count)

    @property
    def per_s(self) -> float:
        return self.trajectories / self.seconds

    @property
    def us_per_trajectory(self) -> float:
        return 1e6 * self.cpu_s / max(1, self.trajectories)


def measure(load: Load, warm_s: float, seconds: float, min_steps: int = MIN_STEPS) -> Taken:
    """Let a fleet run and return what the buffer took after `warm_s`: for `seconds`, and `min_steps`.

    Raises:
        ServiceFailed: One of the processes has ended, or does not begin.
    """
    with contextlib.ExitStack() as opened, tempfile.TemporaryDirectory(prefix="asyncrl-bench-") as folder:
        buffer, address = _start(opened, run_buffer, load, folder)
        learner, _ = _start(opened, run_learner, address, buffer.pid)
        share = -(-load.num_replicas // NUM_PLAYERS)
        for first in range(0, load.num_replicas, share):
            count = min(share, load.num_replicas - first)
            _start(opened, run_players, address, first, count, load.groups_per_s / load.num_replicas)
        time.sleep(warm_s)
        began = _await_step(learner, 1)
        time.sleep(seconds)
        return Taken.between(began, _await_step(learner, began.step + min_steps))


@dataclass
class Peer:
    """A process and the pipe that ends it by closing."""

    process: Any
    pipe: Connection

    @property
    def pid(self) -> int:
        return int(self.process.pid)

    def close(self) -> None:
        self.pipe.close()
        self.process.join(END_S)
        self.process.kill()
        self.process.join()


def _start(opened: contextlib.ExitStack, entry: Any, *args: Any) -> tuple[Peer, Any]:
    """Start a process that ends with `opened`; return it and the first thing that it says."""
    ours, theirs = multiprocessing.Pipe()
    process = FORKS.Process(target=entry, args=(theirs, *args))
    process.start()
    theirs.close()
    peer = Peer(process, ours)
    opened.callback(peer.close)
    return peer, _hear(peer)


def _hear(peer: Peer) -> Any:
    try:
        if not peer.pipe.poll(START_S):
            raise ServiceFailed(f"a process of the fleet said nothing within {START_S:g} s")
        return peer.pipe.recv()
    except (EOFError, OSError) as error:
        raise ServiceFailed("a process of the fleet has ended") from error


def _await_step(learner: Peer, step: int) -> Mark:
    """Return where the learner's newest step ended, once it has done `step` of them."""
    end_s = time.monotonic() + START_S
    while time.monotonic() < end_s:
        try:
            learner.pipe.send("mark")
        except OSError as error:
            raise ServiceFailed("the learner of the fleet has ended") from error
        mark: Mark = _hear(learner)
        if mark.step >= step:
            return mark
        time.sleep(POLL_S)
    raise ServiceFailed(f"the fleet did not come to step {step} within {START_S:g} s")


def read_cpu_s(pid: int) -> float:
    """Return the processor seconds of all threads of a process, as the scheduler has them: in nanoseconds."""
    threads = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(thread.read_text().split()[0]) for thread in threads) / 1e9


def run_buffer(pipe: Connection, load: Load, folder: str) -> None:
    """Entry of the buffer's process: say the address, serve until `pipe` closes."""
    keep_freed_memory()
    group_bytes = GROUP_BYTES + 256 * GROUP_SIZE + 4096
    settings = LedgerSettings(
        run_seed=0,
        groups_per_step=GROUPS_PER_STEP,
        max_lag=1 << 30,
        ready_batches=4,
        memory_bytes=max(MEMORY_BYTES, 2 * IN_FLIGHT * load.num_replicas * group_bytes),
        max_group_bytes=group_bytes,
        lease_s=LEASE_S,
        max_attempts=3,
    )
    journal, runtime = open_journal(BufferSection(journal=load.journal), Path(folder)), ThreadRuntime()
    store = ExperienceStore(settings, journal, GROUP_SIZE, drops_constant_groups=False, now=runtime.now())
    service, stop = BufferService(store, runtime), ThreadEvent()
    thread = threading.Thread(target=service.run, args=(stop,), daemon=True)
    thread.start()
    pipe.send(service.address)
    _await_end(pipe)
    stop.set()
    thread.join(END_S)


def _await_end(pipe: Connection) -> None:
    with contextlib.suppress(EOFError, OSError):
        pipe.recv()


def run_learner(pipe: Connection, address: str, buffer_pid: int) -> None:
    """Entry of the learner's process: train what is complete at once; say where its last step ended."""
    keep_freed_memory()
    with contextlib.closing(LearnerClient(address)) as client:
        client.open("bench")
        client.register_version(0)
        pipe.send("ready")
        step = 0
        mark = Mark(0, 0, time.monotonic(), read_cpu_s(buffer_pid))
        while True:
            batch = None
            with contextlib.suppress(DeadlineExceeded):
                batch = client.reserve(step, 0.2)
            if batch is not None:
                groups = client.fetch([ticket.ticket for ticket in batch.tickets], prefetch=GROUPS_PER_STEP)
                num_trained = mark.trajectories + sum(len(group.trajectories) for group in groups)
                mark = Mark(step + 1, num_trained, time.monotonic(), read_cpu_s(buffer_pid))
                client.trained(step)
                step += 1
                if step % STEPS_PER_CHECKPOINT == 0:
                    client.checkpointed(step, f"digest-{step}", [step])
            try:
                while pipe.poll():
                    pipe.recv()
                    pipe.send(mark)
            except (EOFError, OSError):
                return


def run_players(pipe: Connection, address: str, first: int, count: int, groups_per_s: float) -> None:
    """Entry of a process that plays `count` replicas until `pipe` closes."""
    threading.Thread(target=_end_with, args=(pipe,), daemon=True).start()
    asyncio.run(_play(pipe, address, first, count, groups_per_s))


def _end_with(pipe: Connection) -> None:
    _await_end(pipe)
    os._exit(0)


async def _play(pipe: Connection, address: str, first: int, count: int, groups_per_s: float) -> None:
    trajectories = _make_trajectories()
    players = [Player(address, first + index, trajectories, groups_per_s) for index in range(count)]
    await players[0].client.describe_data(1 << 20, "bench")
    pipe.send("ready")
    async with asyncio.TaskGroup() as tasks:
        for player in players:
            tasks.create_task(player.lease_on())
            tasks.create_task(player.renew_on())


class Player:
    """One replica, whose groups take as long as its rate says."""

    def __init__(
        self, address: str, index: int, trajectories: tuple[Trajectory, ...], groups_per_s: float
    ) -> None:
        self.client = ReplicaClient(address, f"rollout.{index}", CALL_S)
        self._trajectories = trajectories
        self._group_s = IN_FLIGHT / groups_per_s if groups_per_s else 0.0
        self._dice = random.Random(index)
        self._num_begun = 0
        self._held: set[tuple[int, int]] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._has_room = asyncio.Event()

    async def lease_on(self) -> None:
        """Lease whenever there is room."""
        while True:
            self._has_room.clear()
            want = IN_FLIGHT - len(self._held)
            if not want:
                await self._has_room.wait()
                continue
            for grant in (await self.client.lease(1, want, WAIT_S)).grants:
                self._held.add(grant.key)
                task = asyncio.create_task(self._generate(grant))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def renew_on(self) -> None:
        """Keep the leases."""
        await asyncio.sleep(self._dice.random() * LEASE_S / 3)
        while True:
            await self.client.renew(self._held)
            await asyncio.sleep(LEASE_S / 3)

    async def _generate(self, grant: LeaseGrant) -> None:
        self._num_begun += 1
        is_first = self._num_begun <= IN_FLIGHT
        await asyncio.sleep(draw_s(self._dice.random(), self._group_s, is_first=is_first))
        prompt = self._trajectories[0].response_ids[:PROMPT_TOKENS]
        await self.client.push(Group(grant.ticket, grant.attempt, prompt, self._trajectories))
        self._held.discard(grant.key)
        self._has_room.set()


def draw_s(share: float, mean_s: float, *, is_first: bool) -> float:
    """Return how long a group takes, from a number in [0, 1): uniform from 0 to twice the mean.

    The first of a slot is what is left of one that had begun before; else a fleet whose groups take longer
    than the window would offer more or less than its rate in it (residual life of a renewal process).

    >>> draw_s(0.75, 10.0, is_first=False), draw_s(0.75, 10.0, is_first=True)
    (15.0, 10.0)
    """
    return 2 * mean_s * (1 - math.sqrt(1 - share) if is_first else share)


def _make_trajectories() -> tuple[Trajectory, ...]:
    return tuple(_draw_trajectories())


def _draw_trajectories() -> Iterator[Trajectory]:
    source = np.random.default_rng(0)
    for sample in range(GROUP_SIZE):
        yield Trajectory(
            response_ids=source.integers(0, 150_000, NUM_TOKENS, dtype=np.int32),
            loss_mask=np.ones(NUM_TOKENS, np.uint8),
            logprobs=-source.random(NUM_TOKENS, dtype=np.float32),
            spans=(Span(1, 0, NUM_TOKENS),),
            reward=float(sample % 2),
            finish_reason="stop",
        )
