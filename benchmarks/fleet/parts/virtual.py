"""A fleet of any size in virtual time against the real desk, store and ledger of the buffer.

Owns the replicas and the learner of one run as events of a queue: leases, pushes, renewals, reservations,
versions and checkpoints, made of requests as they come off the wire. What they ask is the real code's to
answer, and only that is timed, in processor time of this thread. The ticks of the service are timed apart:
they come with the time that passes, not with the work.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
import struct
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import FrameType
from typing import Any

import numpy as np

from asyncrl.buffer.journals.kinds.none import MemoryJournal
from asyncrl.buffer.ledger.census import take_census
from asyncrl.buffer.ledger.tickets import LedgerSettings
from asyncrl.buffer.rules.learner import RESERVE_WAIT_S, is_checkpoint_due
from asyncrl.buffer.rules.replica import LeaseCall, Leasing, count_free_groups, renewal_interval_s
from asyncrl.buffer.service import Desk
from asyncrl.buffer.store import ExperienceStore
from asyncrl.core import wire
from asyncrl.core.errors import AsyncrlError
from asyncrl.core.experience import Group, Trajectory, encode_group
from asyncrl.core.rpc import Request
from asyncrl.core.runtime.clock import ManualClock
from asyncrl.core.staleness import Span
from asyncrl.core.wire import Frame

GROUP_SIZE, NUM_TOKENS, PROMPT_TOKENS = 16, 4096, 64
GPU_TOKENS_PER_S = 2_500.0
"""Of one replica: an 8B model with long answers on one GPU, as an order of magnitude."""
GROUP_S = GROUP_SIZE * NUM_TOKENS / GPU_TOKENS_PER_S
"""A replica finishes a group so often: 26 s."""
IN_FLIGHT = 2
"""Groups of one replica: with those that are stored and reserved fewer than `max_lag` admits."""
SIGMA = 0.5
"""Of how long a group takes."""
LEASE_S, TICK_S = 60.0, 0.05
CALL_S = 30.0
SWAP_SPREAD_S = 2.0
"""Replicas take up a version within so long."""
STEPS_PER_CHECKPOINT = 5
MAX_LAG = 4


@dataclass
class Call(Request):
    """A request whose answer is kept for `answered`."""

    answered: Callable[[dict[str, Any]], None] | None = None
    outbox: deque[tuple[Call, dict[str, Any]]] = field(default_factory=deque)

    def reply(self, frames: Sequence[Frame] = (), **args: Any) -> None:
        self.is_answered = True
        self.outbox.append((self, args))

    def fail(self, error: AsyncrlError) -> None:
        raise error


@dataclass
class Replica:
    """What the fleet knows of one replica."""

    name: str
    client: bytes
    version: int = 0
    held: set[tuple[int, int]] = field(default_factory=set)
    leasing: Leasing = field(default_factory=Leasing)


@dataclass(frozen=True)
class Cost:
    """What a number of trajectories cost.

    Attributes:
        us_per_trajectory: Processor time of all requests of replicas and learner.
        tick_share: Of a core, for the ticks of the service, in the fleet's own time.
        core_share: Of a core, for requests and ticks, in the fleet's own time.
    """

    trajectories: int
    virtual_s: float
    us_per_trajectory: float
    tick_share: float
    core_share: float


class Fleet:
    """A run of `num_replicas`.

    Args:
        load: What the learner takes for a step over what the fleet takes to generate it: above 1 replicas
            wait for leases.
    """

    def __init__(self, num_replicas: int, load: float) -> None:
        self.clock = ManualClock()
        self.groups_per_step = num_replicas
        self.step_s = load * self.groups_per_step * GROUP_S / num_replicas
        self._dice = random.Random(0)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._waits: list[tuple[float, int, Call]] = []
        self._outbox: deque[tuple[Call, dict[str, Any]]] = deque()
        self._frames = make_frames()
        self._seconds = {"requests": 0.0, "ticks": 0.0}
        self._num_calls: int | None = None
        self._calls = itertools.count(1)
        self.num_trained = 0
        self._version, self._step = 0, 0
        self.desk = Desk(self._make_store(), self.clock)
        self._replicas = [Replica(f"rollout.{i}", f"c{i}".encode()) for i in range(num_replicas)]
        self._call("describe_data", None, num_prompts=1 << 20, digest="scale")
        self._call("open", self._opened, holder="scale")
        for replica in self._replicas:
            self._after(self._dice.random() * SWAP_SPREAD_S, partial(self._swap_to_newest, replica))
            self._after(self._dice.random() * renewal_interval_s(LEASE_S), partial(self._renew, replica))
        self._after(TICK_S, self._tick)

    def _make_store(self) -> ExperienceStore:
        group_bytes = sum(map(len, self._frames)) + 4096
        settings = LedgerSettings(
            run_seed=0,
            groups_per_step=self.groups_per_step,
            max_lag=MAX_LAG,
            ready_batches=1,
            memory_bytes=1 << 50,
            max_group_bytes=group_bytes,
            lease_s=LEASE_S,
            max_attempts=3,
        )
        return ExperienceStore(settings, MemoryJournal(), GROUP_SIZE, drops_constant_groups=False, now=0.0)

    def run(self, num_trajectories: int) -> Cost:
        """Go on until so many more trajectories were trained."""
        before, trained, began_s = dict(self._seconds), self.num_trained, self.clock.now()
        while self.num_trained - trained < num_trajectories:
            at_s, _, act = heapq.heappop(self._events)
            self.clock.advance(at_s - self.clock.now())
            act()
        count, virtual_s = self.num_trained - trained, self.clock.now() - began_s
        requests_s, ticks_s = (self._seconds[name] - before[name] for name in ("requests", "ticks"))
        return Cost(
            count,
            virtual_s,
            1e6 * requests_s / count,
            ticks_s / virtual_s,
            (requests_s + ticks_s) / virtual_s,
        )

    def count_calls(self, num_trajectories: int) -> float:
        """Go on likewise, slowly; return how many calls of functions the requests took per trajectory.

        They are the same on every machine: where time grows and they do not, memory is what is slow.
        """
        self._num_calls, trained = 0, self.num_trained
        self.run(num_trajectories)
        calls, self._num_calls = self._num_calls, None
        return calls / (self.num_trained - trained)

    @property
    def residue(self) -> int:
        """What the ledger's laws leave unexplained."""
        return take_census(self.desk.store.ledger.state).residue

    @property
    def num_waiting(self) -> int:
        """Replicas that hold fewer groups than they could."""
        return sum(len(replica.held) < IN_FLIGHT for replica in self._replicas)

    def _after(self, delay_s: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.clock.now() + delay_s, next(self._order), act))

    def _call(
        self,
        op: str,
        answered: Callable[[dict[str, Any]], None] | None,
        frames: Sequence[Frame] = (),
        client: bytes = b"learner",
        **args: Any,
    ) -> None:
        call = Call(op, args, list(frames), client, next(self._calls), None, answered=answered)  # type: ignore[arg-type]
        call.within_s, call.outbox = CALL_S, self._outbox
        self._timed("requests", partial(self._handle, call))
        if not call.is_answered and "wait_s" in args:
            heapq.heappush(self._waits, (self.clock.now() + args["wait_s"], next(self._order), call))

    def _handle(self, call: Call) -> None:
        self.desk.handle(call)
        self.desk.end_turn()

    def _tick(self) -> None:
        if (
            self._has_wait_ended()
        ):  # which costs its request, whether it is a tick that ends it or another request
            self._timed("requests", self.desk.end_turn)
        self._timed("ticks", partial(self.desk.tick, self.clock.now()))
        self._after(TICK_S, self._tick)

    def _has_wait_ended(self) -> bool:
        has_ended = False
        while self._waits and self._waits[0][0] <= self.clock.now():
            has_ended |= not heapq.heappop(self._waits)[2].is_answered
        return has_ended

    def _timed(self, what: str, act: Callable[[], Any]) -> None:
        began_s = time.thread_time()
        if self._num_calls is not None and what == "requests":
            self._count(act)
        else:
            act()
        self._seconds[what] += time.thread_time() - began_s
        while self._outbox:
            call, args = self._outbox.popleft()
            if call.answered is not None:
                call.answered(args)

    def _count(self, act: Callable[[], Any]) -> None:
        num_calls = 0

        def note(frame: FrameType, event: str, argument: object) -> None:
            nonlocal num_calls
            num_calls += event in ("call", "c_call")

        before = sys.getprofile()
        sys.setprofile(note)
        try:
            act()
        finally:
            sys.setprofile(before)
        assert self._num_calls is not None, "it is counting"
        self._num_calls += num_calls

    # Replicas

    def _swap(self, replica: Replica, version: int) -> None:
        if version > replica.version:
            replica.version = version
            self._lease(replica)

    def _swap_to_newest(self, replica: Replica) -> None:
        self._swap(replica, self._version)

    def _lease(self, replica: Replica) -> None:
        if not replica.version:
            return
        want = count_free_groups(IN_FLIGHT, 1, len(replica.held))
        call = replica.leasing.next_call(replica.version, want, replica.held)
        if call is None:
            return
        self._call(
            "lease",
            partial(self._granted, replica, call),
            client=replica.client,
            replica=replica.name,
            version=call.version,
            want=call.want,
            evaluating=None,
            wait_s=call.wait_s,
        )

    def _granted(self, replica: Replica, call: LeaseCall, args: dict[str, Any]) -> None:
        replica.leasing.end(call, is_answered=True)
        for grant in args["grants"]:
            key = grant["ticket"], grant["attempt"]
            replica.held.add(key)
            # Those of one replica are generated side by side.
            duration_s = IN_FLIGHT * GROUP_S * math.exp(self._dice.gauss(-(SIGMA**2) / 2, SIGMA))
            self._after(duration_s, partial(self._push, replica, *key))
        self._after(0.0, partial(self._lease, replica))

    def _push(self, replica: Replica, ticket: int, attempt: int) -> None:
        frames = readdress(self._frames, ticket, attempt, replica.version)
        self._call(
            "push",
            partial(self._pushed, replica, ticket, attempt),
            frames,
            client=replica.client,
            replica=replica.name,
            ticket=ticket,
            attempt=attempt,
        )

    def _pushed(self, replica: Replica, ticket: int, attempt: int, args: dict[str, Any]) -> None:
        assert args["result"] == "stored", args
        replica.held.discard((ticket, attempt))
        self._lease(replica)

    def _renew(self, replica: Replica) -> None:
        held = [list(key) for key in replica.held]
        self._call("renew", None, client=replica.client, replica=replica.name, tickets=held)
        self._after(renewal_interval_s(LEASE_S), partial(self._renew, replica))

    # The learner

    def _opened(self, args: dict[str, Any]) -> None:
        self._token = args["token"]
        self._publish()
        self._after(0.0, self._reserve)

    def _publish(self) -> None:
        self._call("register_version", self._registered, token=self._token, step=self._step)

    def _registered(self, args: dict[str, Any]) -> None:
        self._version = args["number"]
        for replica in getattr(self, "_replicas", ()):
            delay_s = self._dice.random() * SWAP_SPREAD_S
            self._after(delay_s, partial(self._swap, replica, self._version))

    def _reserve(self) -> None:
        self._call("reserve", self._reserved, token=self._token, step=self._step, wait_s=RESERVE_WAIT_S)

    def _reserved(self, args: dict[str, Any]) -> None:
        if not args["ready"]:
            self._after(0.0, self._reserve)
            return
        tickets = [row["ticket"] for row in args["tickets"]]
        for start in range(0, len(tickets), 4):
            self._call("fetch", None, token=self._token, tickets=tickets[start : start + 4])
        self._after(self.step_s, partial(self._trained, len(tickets)))

    def _trained(self, num_groups: int) -> None:
        self._call("trained", None, token=self._token, step=self._step, dropped=[], lag_max=0)
        self._step += 1
        self.num_trained += num_groups * GROUP_SIZE
        if is_checkpoint_due(self._step, STEPS_PER_CHECKPOINT):
            self._call(
                "checkpointed", None, token=self._token, step=self._step, digest="scale", kept=[self._step]
            )
        self._publish()
        self._reserve()


def make_frames() -> list[Frame]:
    """Return the frames of a group of `GROUP_SIZE` trajectories; header and spans are made per group."""
    ids = np.random.default_rng(0).integers(0, 150_000, NUM_TOKENS, dtype=np.int32)
    trajectories = tuple(
        Trajectory(
            response_ids=ids,
            loss_mask=np.ones(NUM_TOKENS, np.uint8),
            logprobs=np.full(NUM_TOKENS, -0.5, np.float32),
            spans=(Span(1, 0, NUM_TOKENS),),
            reward=float(sample % 2),
            finish_reason="stop",
        )
        for sample in range(GROUP_SIZE)
    )
    return encode_group(Group(1, 1, ids[:PROMPT_TOKENS], trajectories))


def readdress(frames: Sequence[Frame], ticket: int, attempt: int, version: int) -> list[Frame]:
    """Return the frames of `make_frames` as another ticket's, sampled by `version`; arrays are shared."""
    header = wire.unpack_header(frames[0]) | {"ticket": ticket, "attempt": attempt}
    spans = [number for sample in range(GROUP_SIZE) for number in (sample, version, 0, NUM_TOKENS)]
    return [wire.pack_header(header), *frames[1:5], struct.pack(f"<{len(spans)}q", *spans), *frames[6:]]
