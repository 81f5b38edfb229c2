"""Throughput of honest replicas while others attack the buffer's socket.

`python -m benchmarks.buffer.hostile --check` runs the buffer, one honest replica with its learner, and an
attacker, each in a process. Windows come in blocks of four, calm, attacked, attacked, calm or the other
way round, so that a machine that gets slower or faster harms both alike; a block's ratio is that of its
two sums, and the figure is the median of the blocks, with the interval that holds it in nine of ten runs.
A full run takes five minutes. A stranger attacks at `RATES`; a holder of a service's key asks, over one
connection, as fast as its requests are read, and others may be slower by `MAX_SLOWDOWN`. Attackers are nice:
an attacker elsewhere would take no share of this processor, only of the buffer's attention.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import multiprocessing
import os
import random
import socket
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event
from typing import Any

import numpy as np
import psutil
import zmq

from asyncrl.buffer.client import LearnerClient, ReplicaClient
from asyncrl.buffer.journals.kinds.none import MemoryJournal
from asyncrl.buffer.ledger.tickets import LedgerSettings
from asyncrl.buffer.service import BufferService
from asyncrl.buffer.store import ExperienceStore
from asyncrl.core import wire
from asyncrl.core.experience import Group, Trajectory, encode_group
from asyncrl.core.runtime.threads import ThreadEvent, ThreadRuntime
from asyncrl.core.sockets.keys import ClientKeys, RunKeys, ServerKeys, make_run_keys
from asyncrl.core.sockets.options import prepare_client
from asyncrl.core.staleness import Span
from benchmarks.harness import options

TARGET_SHARE = 0.95
MAX_SLOWDOWN = 2.0
GROUP_SIZE, NUM_TOKENS, GROUPS_PER_STEP = 4, 1024, 16
RATES = {"malformed": 100, "late_push": 20, "deep": 10, "oversized": 1, "half_handshake": 50}
"""Attacks per second."""
MAX_HELD = 1000
"""Connections that the attacker holds without ever finishing a handshake."""
TICK_S = 0.02
WINDOW_S = 0.5
SETTLE_S = 0.1
"""Left out at the start of a window: what the one before left behind."""
START_S = 60.0
BLOCKS, QUICK_BLOCKS = 80, 14
FLOOD_BLOCKS = 18

processes = multiprocessing.get_context("spawn")


def main(arguments: Sequence[str]) -> int:
    """Measure, print, judge; return the exit code."""
    parser = options.make_parser("hostile", __doc__, f"{QUICK_BLOCKS} blocks of windows instead of {BLOCKS}")
    given = parser.parse_args(arguments)
    return options.report(given, measure(QUICK_BLOCKS if given.quick else BLOCKS), describe, judge)


def measure(num_blocks: int) -> dict[str, Any]:
    """Return the goodput of calm and attacked windows, in groups per second, and what was refused."""
    flood = measure_under(flood_with_keys, min(num_blocks // 3, FLOOD_BLOCKS), make_run_keys())
    results = measure_under(attack, num_blocks, None)
    names = ("groups_per_s_calm", "groups_per_s_attacked", "share_per_cpu_s", "refused")
    return {
        **results,
        "attacks_per_s": RATES,
        "slowdown_by_key_holder": 1 / flood["share"],
        "key_holder": {name: flood[name] for name in names},
    }


def measure_under(attacker_of: Callable[..., None], num_blocks: int, keys: RunKeys | None) -> dict[str, Any]:
    """Return the figures of calm windows and of those in which `attacker_of` is at work."""
    ours, theirs = processes.Pipe()
    service = processes.Process(target=serve, args=(theirs, keys and keys.server), daemon=True)
    service.start()
    if not ours.poll(START_S):
        raise RuntimeError("the buffer did not start")
    address, client = ours.recv(), None if keys is None else keys.client
    is_on = processes.Event()
    attacker = processes.Process(target=attacker_of, args=(address, is_on, client), daemon=True)
    attacker.start()
    try:
        with contextlib.closing(HonestPair(address, client)) as pair:
            for is_attacked in (False, True):  # warm
                _switch(is_on, is_attacked)
                pair.run_for(2 * WINDOW_S)
            meter = CpuMeter(psutil.Process(service.pid))
            blocks = [_measure_block(pair, is_on, number, meter) for number in range(num_blocks)]
            counters = pair.learner.status().counters
    finally:
        for process in (attacker, service):
            process.kill()
            process.join()
    calm, attacked = zip(*blocks, strict=True)
    shares = [one / other for one, other in zip(attacked, calm, strict=True)]
    return {
        "share_per_cpu_s": meter.groups_per_s(True) / meter.groups_per_s(False),
        "groups_per_s_calm": statistics.median(calm),
        "groups_per_s_attacked": statistics.median(attacked),
        "share": statistics.median(shares),
        "share_interval": interval_of_median(shares),
        "shares": shares,
        "refused": {name: count for name, count in counters.items() if name != "wire/requests"},
    }


class CpuMeter:
    """Groups per processor second of the buffer and the honest pair: no other program's load is in it."""

    def __init__(self, service: psutil.Process) -> None:
        self._service = service
        self._groups: Counter[bool] = Counter()
        self._spent_s = {False: 0.0, True: 0.0}

    def read_s(self) -> float:
        """Return what both have spent so far."""
        times = self._service.cpu_times()
        return float(times.user + times.system) + time.process_time()

    def add(self, is_attacked: bool, num_groups: float, spent_s: float) -> None:
        self._groups[is_attacked] += round(num_groups)
        self._spent_s[is_attacked] += spent_s

    def groups_per_s(self, is_attacked: bool) -> float:
        return self._groups[is_attacked] / self._spent_s[is_attacked]


def interval_of_median(values: Sequence[float]) -> tuple[float, float]:
    """Return the order statistics between which the true median lies in nine of ten runs (sign test)."""
    ordered = sorted(values)
    reach = 0.82 * math.sqrt(len(ordered))  # half of 1.645 standard deviations of a fair coin's count
    low = max(0, math.floor(len(ordered) / 2 - reach))
    return ordered[low], ordered[len(ordered) - 1 - low]


def _switch(is_on: Event, is_attacked: bool) -> None:
    if is_attacked:
        is_on.set()
    else:
        is_on.clear()


def _measure_block(pair: HonestPair, is_on: Event, number: int, meter: CpuMeter) -> tuple[float, float]:
    """Return the mean goodput of two calm and of two attacked windows."""
    rates = {False: 0.0, True: 0.0}
    for is_attacked in (False, True, True, False) if number % 2 else (True, False, False, True):
        _switch(is_on, is_attacked)
        pair.run_for(SETTLE_S)
        began, spent_s = time.perf_counter(), meter.read_s()
        rate = pair.run_for(WINDOW_S)
        meter.add(is_attacked, rate * (time.perf_counter() - began), meter.read_s() - spent_s)
        rates[is_attacked] += rate / 2
    return rates[False], rates[True]


class HonestPair:
    """A replica and a learner that pass groups as fast as they can, batch by batch."""

    def __init__(self, address: str, keys: ClientKeys | None) -> None:
        self._address, self._keys = address, keys
        self._step = 0
        self.learner = LearnerClient(address, keys=keys)
        self.learner.open("honest")
        self._version = self.learner.register_version(0)
        self._loop = asyncio.new_event_loop()
        self._replica = self._loop.run_until_complete(self._connect())

    async def _connect(self) -> ReplicaClient:
        replica = ReplicaClient(self._address, "honest", keys=self._keys)
        await replica.describe_data(1 << 40, "digest")
        return replica

    def run_for(self, seconds: float) -> float:
        """Pass groups for about so long; return how many were stored and trained per second."""
        began, num_groups = time.perf_counter(), 0
        while time.perf_counter() - began < seconds:
            self._loop.run_until_complete(self._generate())
            reservation = self.learner.reserve(self._step, wait_s=10.0)
            assert reservation is not None, "the batch was not complete"
            self.learner.fetch([one.ticket for one in reservation.tickets])
            self.learner.trained(self._step, lag_max=0)
            self._step += 1
            self._version = self.learner.register_version(self._step)
            num_groups += GROUPS_PER_STEP
        return num_groups / (time.perf_counter() - began)

    async def _generate(self) -> None:
        left = GROUPS_PER_STEP
        while left:
            grants = (await self._replica.lease(self._version, left, 10.0)).grants
            groups = [make_group(grant.ticket, grant.attempt, self._version) for grant in grants]
            verdicts = await asyncio.gather(*(self._replica.push(group) for group in groups))
            assert set(verdicts) <= {"stored"}, verdicts
            left -= len(grants)

    def close(self) -> None:
        self._replica.close()
        self.learner.close()
        self._loop.close()


def make_group(ticket: int, attempt: int, version: int) -> Group:
    """Return a group of `GROUP_SIZE` trajectories of `NUM_TOKENS` tokens."""
    trajectories = tuple(
        Trajectory(
            response_ids=np.zeros(NUM_TOKENS, dtype=np.int32),
            loss_mask=np.ones(NUM_TOKENS, dtype=np.uint8),
            logprobs=np.full(NUM_TOKENS, -0.5, dtype=np.float32),
            spans=(Span(version, 0, NUM_TOKENS),),
            reward=float(sample % 2),
            finish_reason="stop",
        )
        for sample in range(GROUP_SIZE)
    )
    return Group(ticket, attempt, np.arange(16, dtype=np.int32), trajectories)


def serve(address: Connection, keys: ServerKeys | None) -> None:
    """Serve a buffer without a journal; the entry of its process."""
    logging.disable(logging.WARNING)  # a line for each of the first that are refused
    max_group_bytes = GROUP_SIZE * (NUM_TOKENS * 9 + 1024) + 4096
    settings = LedgerSettings(
        run_seed=0,
        groups_per_step=GROUPS_PER_STEP,
        max_lag=4,
        ready_batches=2,
        memory_bytes=1 << 28,
        max_group_bytes=max_group_bytes,
        lease_s=60.0,
        max_attempts=3,
    )
    store = ExperienceStore(settings, MemoryJournal(), GROUP_SIZE, False, now=0.0)
    service = BufferService(store, ThreadRuntime(), keys=keys)
    address.send(service.address)
    service.run(ThreadEvent())


def attack(address: str, is_on: Event, keys: None) -> None:
    """Attack at `RATES` while `is_on`; the entry of its process."""
    os.nice(19)
    attacker = Attacker(address)
    while True:
        is_on.wait()
        began = time.perf_counter()
        attacker.strike(TICK_S)
        time.sleep(max(0.0, TICK_S - (time.perf_counter() - began)))


def flood_with_keys(address: str, is_on: Event, keys: ClientKeys) -> None:
    """Ask for what is refused, and for the status, as fast as it is read; the entry of its process."""
    os.nice(19)
    messages = itertools.cycle(flood_messages())
    end: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    prepare_client(end, address, keys)
    end.connect(address)
    while True:
        is_on.wait()
        end.send_multipart(next(messages))
        while end.poll(0):
            end.recv_multipart()


def flood_messages() -> list[list[wire.Frame]]:
    """Return one message of each kind; none changes anything."""
    twice = [7] * GROUPS_PER_STEP
    asked: list[dict[str, Any]] = [
        {"op": "status", "args": {}},
        {"op": "fetch", "args": {"token": 1, "tickets": twice, "have": twice}},
        {"op": "renew", "args": {"replica": "evil", "leases": [[1, 1]]}},
        {"op": "no_such_operation", "args": {}},
    ]
    late = _header({"op": "push", "args": {"replica": "evil", "ticket": 1, "attempt": 1}})
    malformed: list[wire.Frame] = [random.Random(0).randbytes(1000), b"\x91" * 100_000]
    whole = [_header(one) for one in asked]
    return [[late, *encode_group(make_group(1, 1, 1))], *([one] for one in (*malformed, *whole))]


class Attacker:
    """Sends what is malformed, late, deep, too long, or never finished."""

    def __init__(self, address: str) -> None:
        self._address = address
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        self._host_port = (host, int(port))
        self._random = random.Random(0)
        self._due: Counter[str] = Counter()
        self._held: list[socket.socket] = []
        self._context = zmq.Context()
        self._socket = self._dealer()
        push = {"replica": "evil", "ticket": 1, "attempt": 1}
        group = encode_group(make_group(1, 1, 1))
        self.messages: dict[str, list[wire.Frame]] = {
            "malformed": [self._random.randbytes(1000)],
            "late_push": [_header({"op": "push", "args": push}), *group],
            "deep": [b"\x91" * 100_000],
        }

    def close(self) -> None:
        for one in self._held:
            one.close()
        self._socket.close(linger=0)
        self._context.term()

    def _dealer(self) -> zmq.Socket[bytes]:
        end = self._context.socket(zmq.DEALER)
        end.setsockopt(zmq.LINGER, 0)
        end.setsockopt(zmq.SNDHWM, 100)
        end.connect(self._address)
        return end

    def strike(self, seconds: float) -> None:
        """Make the attacks that are due for so many seconds."""
        for name, rate in RATES.items():
            self._due[name] += rate * seconds  # type: ignore[assignment]
            while self._due[name] >= 1:
                self._due[name] -= 1
                self._strike_once(name)
        while self._socket.poll(0):
            self._socket.recv_multipart()

    def _strike_once(self, name: str) -> None:
        if name == "half_handshake":
            self._hold_connection()
        elif name == "oversized":
            with contextlib.closing(self._dealer()) as end:
                end.send(bytes(1 << 20), zmq.NOBLOCK)
        else:
            with contextlib.suppress(zmq.Again):
                self._socket.send_multipart(self.messages[name], zmq.NOBLOCK)

    def _hold_connection(self) -> None:
        if len(self._held) >= MAX_HELD:
            self._held.pop(0).close()
        with contextlib.suppress(OSError):
            end = socket.create_connection(self._host_port, timeout=1.0)
            end.sendall(b"\xff" + bytes(self._random.randrange(11)))
            self._held.append(end)


def describe(results: dict[str, Any]) -> str:
    """Return the figures as text."""
    refused = ", ".join(f"{name} {count}" for name, count in sorted(results["refused"].items()))
    low, high = results["share_interval"]
    return (
        f"honest groups/s, calm      {results['groups_per_s_calm']:8.0f}\n"
        f"honest groups/s, attacked  {results['groups_per_s_attacked']:8.0f}\n"
        f"share kept (median of {len(results['shares'])} blocks) {results['share']:.3f}, "
        f"nine in ten: {low:.3f} to {high:.3f}\n"
        f"the same per processor second {results['share_per_cpu_s']:.3f}\n"
        f"refused: {refused}\n"
        f"others beside a key holder's flood: {results['slowdown_by_key_holder']:.2f} times as slow"
    )


def judge(results: dict[str, Any]) -> options.Verdict:
    """Return whether the honest keep `TARGET_SHARE`, and are no slower beside a flood than `MAX_SLOWDOWN`."""
    ratios = {
        "share of goodput under attack": results["share"] / TARGET_SHARE,
        "slowdown by a key holder": MAX_SLOWDOWN / results["slowdown_by_key_holder"],
    }
    return options.judge(ratios)


def _header(fields: dict[str, Any]) -> bytes:
    return wire.pack_header({"id": 1, **fields}, wire.RPC_VERSION)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
