"""The processes of weight sync: production services on simulated runtimes, a played learner and engines.

learner.0 (played, with `PublisherClient`) -> publisher.0 -> receiver.n -> rollout.n (`Replica`)
weight_sync.0 tells publisher and receivers what to do
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

from asyncrl.buffer.messages import EvaluationOrder, LeaseReply
from asyncrl.core.errors import SyncError
from asyncrl.core.service import Service
from asyncrl.core.service_command import Drain
from asyncrl.core.staleness import PolicyVersion
from rollout_service.engine.metered import MeteredEngine
from rollout_service.replica.parts import ReplicaParts, ReplicaSettings
from rollout_service.replica.service import Replica
from tests.simulation.kernel.network import Wires
from tests.simulation.kernel.runtime import SimRuntime
from tests.simulation.kernel.world import Process, World
from tests.simulation.parts.carriage import Carriage
from tests.simulation.parts.crew import Crew, Main
from tests.simulation.parts.engine import PlayedEngine
from tests.simulation.sync.content import BUCKET_BYTES, Truth
from tests.simulation.sync.judge import Judge
from tests.simulation.sync.scenario import Scenario
from weight_sync.coordination.coordinator import CoordinatorService
from weight_sync.coordination.journal import read_fences, take_token
from weight_sync.link import ReceiverLink
from weight_sync.memory.manifest import Manifest
from weight_sync.memory.pool import SegmentPool
from weight_sync.memory.staging_area import Copy, StagingArea
from weight_sync.protocol.protocol import Coordination
from weight_sync.protocol.rounds import Timing
from weight_sync.publisher import Endpoint, PublisherService
from weight_sync.publisher_client import PublisherClient
from weight_sync.receiving.receiver import ReceiverService

HOSTS = {
    "buffer": "head",
    "weight_sync": "head",
    "publisher": "node",
    "learner": "node",
    "receiver": "host.*",
    "rollout": "host.*",
}
EOS = 10
LOST_LOOK_S, STATUS_S = 1.0, 1.0


def address_of(name: str) -> str:
    """Return where a service listens: a file, which a successor may bind while its forerunner lives."""
    return f"ipc:///simulated/{name}"


class SyncCluster:
    """See the module.

    Args:
        prefix: Start of the names of segments, in /dev/shm.
        folder: Of the run: the coordinator's token and journal.
    """

    singles: tuple[str, ...] = ("weight_sync.0", "publisher.0", "learner.0")

    def __init__(
        self,
        world: World,
        wires: Wires,
        scenario: Scenario,
        truth: Truth,
        judge: Judge,
        prefix: str,
        folder: Path,
    ) -> None:
        self.world, self.scenario, self.truth, self.judge = world, scenario, truth, judge
        self.prefix, self.folder = prefix, folder
        self.timing = Timing.of(scenario.deadline_s)
        self.carriage = Carriage(world, wires, scenario.bytes_per_s)
        self.refusals: Counter[str] = Counter()
        self.pins: dict[str, float] = {}
        self.replicas: list[str] = []
        self.engines: dict[str, PlayedEngine] = {}
        self.services: dict[str, Any] = {}
        self._owners: dict[str, Process] = {}
        self.crew = Crew(world, wires, self.mains(), HOSTS, address_of)

    def mains(self) -> dict[str, Callable[[str], Main]]:
        """Return, by kind of service, what a process of a name does."""
        return {
            "weight_sync": lambda name: self._coordinate,
            "publisher": lambda name: self._publish,
            "learner": lambda name: self._learn,
            "receiver": lambda name: partial(self._receive, name),
            "rollout": lambda name: partial(self._roll_out, name),
        }

    def begin(self) -> None:
        """Start every process."""
        for name in self.singles:
            self.crew.start(name)
        for _ in range(self.scenario.replicas):
            self.join()

        self.world.after(STATUS_S, self._ask_statuses)

    def serve(self, name: str, runtime: SimRuntime, service: Service) -> None:
        """Let a service work until its process ends."""
        self.services[name], self._owners[name] = service, runtime.process
        service.run(runtime.event())

    def living(self, name: str) -> Any:
        """Return the service of a name if its process lives and can be reached, else None."""
        owner = self._owners.get(name)
        is_there = owner is not None and owner.is_alive and not owner.is_frozen
        return self.services[name] if is_there and self.crew.processes[name] is owner else None

    def _ask_statuses(self) -> None:
        """Ask every service how it is, as a supervisor does."""
        for name in self.services:
            service = self.living(name)
            if service is not None and not service.status().state:
                self.judge.say(f"bug: the status of {name} has no state")
        self.world.after(STATUS_S, self._ask_statuses)

    def join(self) -> None:
        """Start another replica, and its receiver."""
        index = len(self.replicas)
        self.replicas.append(f"rollout.{index}")
        self.crew.start(f"receiver.{index}")
        self.crew.start(f"rollout.{index}")

    def leave(self, name: str) -> None:
        """Drain a replica; its receiver is stopped a moment later."""
        if name not in self.replicas or len(self.replicas) - len(self.crew.gone) // 2 <= 1:
            return
        receiver = name.replace("rollout", "receiver")
        self.crew.retire(name)
        self.crew.retire(receiver)
        service = self.services.get(name)
        if service is not None:
            service.command(Drain(0.0))
        for retired, after_s in ((receiver, 2.0), (name, 4.0)):
            self.world.after(after_s, self.crew.processes[retired].kill)

    @property
    def staying(self) -> list[str]:
        """The replicas that were not told to leave."""
        return [name for name in self.replicas if name not in self.crew.gone]

    # --- what processes do ------------------------------------------------------------------------

    def _coordinate(self, runtime: SimRuntime) -> None:
        token = take_token(self.folder, runtime.wall_ns)
        coordination = Coordination(
            self.timing,
            self.scenario.parallelism,
            token=token,
            uses_delta=self.scenario.uses_delta,
            fences=read_fences(self.folder),
        )
        service = CoordinatorService(coordination, runtime, address_of("weight_sync.0"), None, self.folder)
        self.judge.watch_coordinator(runtime.process, coordination)
        self.serve("weight_sync.0", runtime, service)

    def _publish(self, runtime: SimRuntime) -> None:
        uses_delta = self.scenario.uses_delta
        service = PublisherService(
            address_of("weight_sync.0"),
            f"{runtime.pid}-{runtime.wall_ns()}",
            SegmentPool(f"{self.prefix}publisher-", str(runtime.pid), 3 + uses_delta, uses_delta),
            Endpoint("127.0.0.1", runtime.pid),
            self.carriage.transports(runtime),
            runtime,
            address_of("publisher.0"),
            node=self.scenario.node_of("publisher.0"),
        )
        self.serve("publisher.0", runtime, service)

    def _receive(self, name: str, runtime: SimRuntime) -> None:
        keeps_base = self.scenario.uses_delta
        service = ReceiverService(
            address_of("weight_sync.0"),
            name,
            f"{runtime.pid}-{runtime.wall_ns()}",
            (_Blind if name in self.scenario.blind else StagingArea)(
                f"{self.prefix}{name}-", runtime.new_id()[:8], keeps_base=keeps_base
            ),
            self.carriage.transports(runtime),
            runtime,
            lost_s=self.timing.silence_s + self.timing.poll_s,
            bind=address_of(name),
            node=self.scenario.node_of(name),
        )
        self.judge.watch_copies(runtime.process, service._staging)
        self.serve(name, runtime, service)

    def _roll_out(self, name: str, runtime: SimRuntime) -> None:
        receiver = name.replace("rollout", "receiver")

        async def build() -> ReplicaParts:
            process = runtime.process
            engine = PlayedEngine(
                EOS, 20.0, partial(self.judge.hear_load, process), partial(self._refuses, name)
            )
            self.engines[name] = engine
            buffer: Any = _NoBuffer(runtime, lambda: self.pins.pop(name, 0.0))
            return ReplicaParts(
                engine=MeteredEngine(engine, runtime),
                buffer=buffer,
                weights=ReceiverLink(runtime, address_of(receiver)),
                runner=_NO_RUNNER,
                evaluator=_Pinned(buffer),  # type: ignore[arg-type]
                prompts=_NoPrompts(),  # type: ignore[arg-type]
            )

        service = Replica(runtime, name, ReplicaSettings(2, 3.0, 10.0), build)
        self.serve(name, runtime, service)

    def _refuses(self, name: str) -> bool:
        is_refused = self.refusals[name] > 0
        self.refusals[name] -= is_refused
        return is_refused

    def _learn(self, runtime: SimRuntime) -> None:
        """Publish versions until there are enough, then see to it that the last one is not lost."""
        token = self.truth.open()
        publisher_client = PublisherClient(
            runtime, address_of("publisher.0"), self.prefix, BUCKET_BYTES, token
        )
        self.judge.hear_open(runtime.process, token)
        is_due = True  # what was restored is published under a new number
        while True:
            is_last = self.judge.num_published >= self.scenario.versions
            runtime.sleep(LOST_LOOK_S if is_last else self.scenario.every_s)
            is_due = (not is_last) or is_due or publisher_client.has_lost()
            while is_due and not self._publish_one(runtime, publisher_client, token):
                publisher_client.await_room()
            is_due = False

    def _publish_one(self, runtime: SimRuntime, publisher_client: PublisherClient, token: int) -> bool:
        if not publisher_client.has_room():
            return False
        number, tensors = self.truth.draw(token)
        self.judge.begin_publish(runtime.process, token, number)
        if not publisher_client.publish(PolicyVersion(number, number), tensors):
            return False
        self.judge.hear_publish(runtime.process, token, number)
        return True


class _Blind(StagingArea):
    """One that cannot map what others share."""

    def map_shared(self, manifest: Manifest, shared: str) -> Copy:
        raise SyncError("there is no such file here")


class _NoRunner:
    """Generates nothing: there are no leases."""


_NO_RUNNER: Any = _NoRunner()


class _NoPrompts:
    num_prompts, digest, sources = 0, "", ()


class _NoBuffer:
    """A buffer without groups, which orders an evaluation of so many seconds now and then."""

    def __init__(self, runtime: SimRuntime, take_pin: Callable[[], float]) -> None:
        self._runtime, self._take_pin = runtime, take_pin
        self.seconds = 0.0
        self._num_orders = 0

    async def deregister(self) -> None:
        """Nothing is held here."""

    async def describe_data(self, *_: object) -> None:
        """There is none."""

    async def lease(self, version: int, want: int, wait_s: float, held: Any = None) -> LeaseReply:
        """Wait, then order an evaluation if one is due."""

        await asyncio.sleep(min(wait_s, 0.5))
        self.seconds = self._take_pin()
        if not self.seconds:
            return LeaseReply()
        self._num_orders += 1
        return LeaseReply((), EvaluationOrder(self._num_orders, 0))

    def forget_evaluation(self) -> None:
        """The order is forgotten by its asker."""

    async def evaluated(self, *_: object) -> None:
        """No more parts."""

    async def renew(self, held: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
        """Nothing is lost."""
        return ()

    def close(self) -> None:
        """Nothing is open."""


class _Pinned:
    """An evaluation that takes time and asks nothing."""

    def __init__(self, buffer: Any) -> None:
        self._buffer = buffer

    async def run(self, order: EvaluationOrder) -> list[Any]:
        """Hold the engine."""

        await asyncio.sleep(self._buffer.seconds)
        return []
