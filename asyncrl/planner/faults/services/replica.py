"""A replica's process: leases, samples, pushes and swaps, as `rollout_service.replica` does.

lease loop    consumes: grants, orders to evaluate    waits for: READY, a free slot, the buffer
              produces: group tasks, evaluations (`evaluation`)
group task    consumes: one grant    waits for: tokens    produces: one push, or a carry
sync loop     consumes: staged versions    waits for: the receiver, a running evaluation
              produces: swaps and their reports
renew loop    waits for: a third of the lease    produces: renewed leases, cancelled groups
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from asyncrl.buffer.ledger.orders import sample_seed
from asyncrl.core.errors import AsyncrlError, DeadlineExceeded, SyncError
from asyncrl.core.experience import decode_group, encode_group
from asyncrl.core.rpc import Reply
from asyncrl.core.staleness import UNLOADED
from asyncrl.planner.faults.checks.observer import Observer
from asyncrl.planner.faults.kernel.process import Connection, Process, Switchboard
from asyncrl.planner.faults.kernel.tasks import Bell, Ready, Task
from asyncrl.planner.faults.services.engine import Engine, Writing
from asyncrl.planner.faults.services.evaluation import Evaluations, HeldOut
from asyncrl.planner.faults.sync.content import NUM_BUCKETS, TOTAL_BYTES, nodes_in
from weight_sync.memory import segments
from weight_sync.memory.manifest import Manifest

CALL_S, LEASE_WAIT_S, STAGED_WAIT_S, MARGIN_S = 10.0, 1.0, 1.0, 5.0
ERROR_PAUSE_S, CALL_ATTEMPTS, FAREWELL_S = 0.5, 6, 2.0
QUANTUM_S, TOKENS_PER_QUANTUM = 0.2, 2
LOAD_S = 0.1


@dataclass(frozen=True)
class ReplicaPlan:
    """What a replica is like.

    Attributes:
        max_groups: At once. mean_tokens: Of a trajectory.
        held_out: What evaluations ask. failing_loads: Which loads of this process fail, counted from 1.
    """

    run_seed: int
    num_prompts: int
    group_size: int
    max_groups: int
    mean_tokens: int
    lease_s: float
    start_s: float
    held_out: HeldOut
    failing_loads: frozenset[int] = frozenset()


class ReplicaProcess(Process):
    """See the module.

    Attributes:
        num_done: Answers that it has finished.
    """

    def __init__(self, board: Switchboard, index: int, plan: ReplicaPlan, observer: Observer) -> None:
        super().__init__(board, f"rollout.{index}")
        self._plan, self._observer = plan, observer
        self._buffer = Connection(self, "buffer.0")
        self._link = Connection(self, f"receiver.{index}")
        self._engine = Engine()
        self._writing: dict[tuple[int, int], Writing] = {}
        self._cancelled: set[tuple[int, int]] = set()
        self._leases: dict[Ready, Task] = {}
        self._bell = Bell()
        self._is_fenced = self._is_draining = self._may_miss_grants = False
        self.num_done = self._num_asking = self._num_loads = self._num_told = 0
        asked = (plan.run_seed, plan.held_out)
        self._evaluations = Evaluations(
            self, self.who, self._engine, asked, self._link, self._call, self._repeat, self._move, observer
        )

    @property
    def serving(self) -> int:
        """The version number that its engine has loaded, `UNLOADED` for none."""
        return self._engine.label if self._engine.is_loaded else UNLOADED

    def begin(self) -> None:
        """Start the engine, then work."""
        self.spawn(self._live())

    async def _live(self) -> None:
        await self.sleep(self._plan.start_s)
        while True:
            try:
                await self._call("retire", CALL_S)
                described = {"num_prompts": self._plan.num_prompts, "digest": "d"}
                await self._buffer.call("describe_data", (), CALL_S, **described)
                break
            except DeadlineExceeded:
                continue
        self.state = "SYNCING"
        for loop in (self._sync_loop(), self._lease_loop(), self._renew_loop()):
            self.spawn(loop)

    async def _call(self, op: str, deadline_s: float, **args: Any) -> Reply:
        frames = args.pop("frames", ())
        return await self._buffer.call(op, frames, deadline_s, replica=self.service, **args)

    async def _repeat(self, call: Callable[[], Awaitable[Reply]]) -> Reply:
        for _ in range(CALL_ATTEMPTS - 1):
            try:
                return await call()
            except DeadlineExceeded:
                await self.sleep(ERROR_PAUSE_S)
        return await call()

    # --- leases -----------------------------------------------------------------------------------

    async def _lease_loop(self) -> None:
        asked, call = 0, Ready()
        call.set()
        while not self._is_draining:
            want = self._plan.max_groups - len(self._writing)
            may_ask = self.state == "READY" and not self._is_fenced and want > 0
            label = self._engine.label
            if may_ask and (call.is_done or label != asked):
                asked, call = label, Ready()
                self._leases[call] = self._lease(label, want, call)
                self.spawn(self._leases[call])
            await self._bell.next_ring()

    async def _lease(self, label: int, want: int, call: Ready) -> None:
        try:
            await self._ask_for_work(label, want)
        finally:
            self._leases.pop(call, None)
            call.set()
            self._bell.ring()

    async def _ask_for_work(self, label: int, want: int) -> None:
        held = list(self._writing) if self._may_miss_grants and not self._num_asking else None
        extra = {} if held is None else {"held": [list(key) for key in held]}
        wanted = {"version": label, "want": want, "wait_s": LEASE_WAIT_S, **extra}
        self._num_asking += 1
        try:
            evaluating = self._evaluations.current
            reply = await self._call("lease", LEASE_WAIT_S + MARGIN_S, evaluating=evaluating, **wanted)
        except AsyncrlError:
            self._may_miss_grants = True
            await self.sleep(ERROR_PAUSE_S)
            return
        finally:
            self._num_asking -= 1
        if held is not None:
            self._may_miss_grants = False
        for grant in reply.args["grants"]:
            self.spawn(self._sample(grant))
        if (order := self._evaluations.take(reply.args)) is not None:
            await self._evaluations.run(order, label)

    async def _renew_loop(self) -> None:
        while True:
            await self.sleep(self._plan.lease_s / 3)
            try:
                reply = await self._call("renew", CALL_S, tickets=[list(key) for key in self._writing])
            except AsyncrlError:
                await self.sleep(ERROR_PAUSE_S)
                continue
            for ticket, attempt in reply.args["lost"]:
                if self._writing.pop((ticket, attempt), None) is not None:
                    self._cancelled.add((ticket, attempt))
                    self._bell.ring()

    # --- groups -----------------------------------------------------------------------------------

    async def _sample(self, grant: dict[str, Any]) -> None:
        key = (grant["ticket"], grant["attempt"])
        if key in self._writing or self._is_draining:
            return
        writing = self._writing[key] = Writing(*key, self._lengths(grant["ticket"]))
        if grant["carry_attempt"]:
            writing = await self._go_on(key, writing)
        while not writing.is_done:
            await self.sleep(QUANTUM_S)
            if key in self._cancelled or self._is_draining:
                return
            if not self._engine.is_paused:
                writing.grow(TOKENS_PER_QUANTUM, self._engine.label, self._engine.node)
        self.num_done += self._plan.group_size
        await self._push(key, writing)
        self._writing.pop(key, None)
        self._bell.ring()

    def _lengths(self, ticket: int) -> tuple[int, ...]:
        plan, dice = self._plan, random.Random()
        lengths = []
        for sample in range(plan.group_size):
            dice.seed(sample_seed(plan.run_seed, ticket, sample))
            lengths.append(
                max(1, min(8 * plan.mean_tokens, round(dice.lognormvariate(0, 0.8) * plan.mean_tokens)))
            )
        return tuple(lengths)

    async def _go_on(self, key: tuple[int, int], writing: Writing) -> Writing:
        ticket, attempt = key
        try:
            reply = await self._repeat(
                lambda: self._call("fetch_carry", CALL_S, ticket=ticket, attempt=attempt)
            )
        except AsyncrlError:
            return writing
        if reply.args["found"]:
            writing = Writing.resume(decode_group(reply.frames), attempt, writing.lengths)
            if key in self._writing:
                self._writing[key] = writing
        return writing

    async def _push(self, key: tuple[int, int], writing: Writing) -> None:
        frames = encode_group(writing.as_group())
        ticket, attempt = key
        try:
            await self._repeat(
                lambda: self._call("push", CALL_S, frames=frames, ticket=ticket, attempt=attempt)
            )
        except AsyncrlError:
            await self.sleep(ERROR_PAUSE_S)

    # --- weights ----------------------------------------------------------------------------------

    async def _sync_loop(self) -> None:
        while True:
            try:
                reply = await self._next_staged(self.serving)
                self._is_fenced = reply.args["fenced"]
                self._bell.ring()
                if reply.args["path"]:
                    async with self._evaluations.weights_lock:
                        await self._swap(Manifest.from_bytes(bytes(reply.frames[0])), reply.args["path"])
            except AsyncrlError:
                await self.sleep(ERROR_PAUSE_S)

    async def _next_staged(self, serving: int) -> Reply:
        try:
            args = {"serving": serving, "wait_s": STAGED_WAIT_S, **self._number()}
            return await self._link.call("next_staged", (), STAGED_WAIT_S + MARGIN_S, **args)
        except DeadlineExceeded:
            self._is_fenced = True
            raise

    async def _swap(self, manifest: Manifest, path: str) -> None:
        engine, number = self._engine, manifest.version.number
        self._num_loads += 1
        engine.is_paused = True
        try:
            memory = segments.attach(path, TOTAL_BYTES)
        except SyncError as error:
            await self._fail_load(number, error.message)
            return
        for index in range(NUM_BUCKETS):  # in place, one after another
            await self.sleep(LOAD_S / NUM_BUCKETS)
            engine.nodes[index] = nodes_in(memory[:])[index]
            if self._num_loads in self._plan.failing_loads and index == 1:
                await self._fail_load(number, "simulated")
                return
        self._observer.serves(self.name, number, engine.nodes)
        engine.label, engine.is_paused = number, False
        self._move("READY")
        await self._report_loaded(number, True, "")

    async def _fail_load(self, number: int, error: str) -> None:
        self._move("SYNCING")
        await self._report_loaded(number, False, error)

    async def _report_loaded(self, number: int, ok: bool, error: str) -> None:
        await self._link.call("loaded", (), CALL_S, number=number, ok=ok, error=error, **self._number())

    def _number(self) -> dict[str, Any]:
        self._num_told += 1
        return {**self.who, "seq": self._num_told}

    @property
    def who(self) -> dict[str, Any]:
        """How it names itself to its receiver; processes are numbered as they are born."""
        return {"life": self.name, "born": int(self.name.rpartition("/")[2])}

    def _move(self, state: str) -> None:
        if not self._is_draining:
            self.state = state
        self._bell.ring()

    # --- the end ----------------------------------------------------------------------------------

    def drain(self) -> None:
        """Hand back what is unfinished, and end."""
        if not self._is_draining:
            self._is_draining, self.state = True, "DRAINING"
            for task in list(self._leases.values()):  # and evaluations with them
                self.cancel(task)
            self.spawn(self._leave())

    async def _leave(self) -> None:
        unfinished, self._writing = self._writing, {}
        try:
            for (ticket, attempt), writing in unfinished.items():
                if writing.has_begun and not writing.is_done:
                    frames = encode_group(writing.as_group())
                    await self._call("carry", FAREWELL_S, frames=frames, ticket=ticket, attempt=attempt)
            await self._call("release", FAREWELL_S, tickets=[list(key) for key in unfinished])
            await self._call("retire", FAREWELL_S)
            await self._link.call("drain", (), FAREWELL_S, **self.who)
        except AsyncrlError:
            pass  # its leases run out
        self.state = "ENDED"
