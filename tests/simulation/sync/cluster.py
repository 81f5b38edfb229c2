"""The processes of weight sync: production services on simulated runtimes, a played learner and engines.

learner.0 (played, with `PublisherClient`) -> publisher.0 -> receiver.n -> rollout.n (`Replica`)
weight_sync.0 tells publisher and receivers what to do; with stripes there is a publisher of each, and the
learner is the one rank of a `StripedPublish`
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from asyncrl.buffer.messages import EvaluationOrder, LeaseReply
from asyncrl.core.errors import SyncError
from asyncrl.core.service import Service
from asyncrl.core.service_command import Drain
from asyncrl.core.staleness import PolicyVersion
from learner.striped import Connect, StripedPublish
from rollout_service.engine.metered import MeteredEngine
from rollout_service.replica.parts import ReplicaParts, ReplicaSettings
from rollout_service.replica.service import Replica
from tests.simulation.kernel.network import Wires
from tests.simulation.kernel.runtime import SimRuntime
from tests.simulation.kernel.world import Process, World
from tests.simulation.parts.carriage import Carriage
from tests.simulation.parts.crew import Crew, Main
from tests.simulation.parts.engine import PlayedEngine
from tests.simulation.sync.content import BUCKET_BYTES, Truth, zeros
from tests.simulation.sync.judge import Judge
from tests.simulation.sync.scenario import Scenario
from weight_sync.coordination.coordinator import CoordinatorService
from weight_sync.coordination.journal import read_fences, take_token
from weight_sync.link import ReceiverLink
from weight_sync.memory.manifest import Manifest
from weight_sync.memory.parts import Part
from weight_sync.memory.pool import SegmentPool
from weight_sync.memory.staging_area import Copy, StagingArea
from weight_sync.protocol.lanes.stripes import Stripe
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
Tensors = list[tuple[str, torch.Tensor]]
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
        further = tuple(f"publisher.{index}" for index in range(1, scenario.stripes))
        self.singles = (*self.singles, *further)
        self.crew = Crew(world, wires, self.mains(), HOSTS, address_of)

    def mains(self) -> dict[str, Callable[[str], Main]]:
        """Return, by kind of service, what a process of a name does."""
        return {
            "weight_sync": lambda name: self._coordinate,
            "publisher": lambda name: partial(self._publish, name),
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

    def _publish(self, name: str, runtime: SimRuntime) -> None:
        uses_delta, stripe = self.scenario.uses_delta, self._stripe(int(name.rpartition(".")[2]))
        prefix = f"{self.prefix}{stripe.publisher}-"
        service = PublisherService(
            address_of("weight_sync.0"),
            f"{runtime.pid}-{runtime.wall_ns()}",
            SegmentPool(prefix, str(runtime.pid), 3 + uses_delta, uses_delta, stripe),
            Endpoint("127.0.0.1", runtime.pid),
            self.carriage.transports(runtime),
            runtime,
            address_of(name),
            node=self.scenario.node_of(name),
        )
        self.serve(name, runtime, service)

    def _stripe(self, index: int) -> Stripe:
        return Stripe(index, self.scenario.stripes)

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

        def connect(token: int, stripe: Stripe) -> PublisherClient:
            where = (runtime, address_of(f"publisher.{stripe.index}"), self.prefix)
            return PublisherClient(*where, BUCKET_BYTES, token, stripe=stripe)

        publisher_client = connect(token, self._stripe(0))
        self.judge.hear_open(runtime.process, token)
        way = _OneWay(publisher_client)
        if self.scenario.stripes > 1:
            way = _StripedWay(publisher_client, connect, token)
        is_due = True  # what was restored is published under a new number
        while True:
            is_last = self.judge.num_published >= self.scenario.versions
            runtime.sleep(LOST_LOOK_S if is_last else self.scenario.every_s)
            is_due = (not is_last) or is_due or way.has_lost()
            while is_due and not self._publish_one(runtime, way, token):
                publisher_client.await_room()
            is_due = False

    def _publish_one(self, runtime: SimRuntime, way: _OneWay, token: int) -> bool:
        if not way.has_room():
            return False
        number, tensors = self.truth.draw(token)
        self.judge.begin_publish(runtime.process, token, number)
        if not way.publish(PolicyVersion(number, number), tensors):
            return False
        self.judge.hear_publish(runtime.process, token, number)
        return True


class _OneWay:
    """The learner's way to its publisher."""

    def __init__(self, client: PublisherClient) -> None:
        self.client = client

    def has_room(self) -> bool:
        return self.client.has_room()

    def publish(self, version: PolicyVersion, tensors: Tensors) -> bool:
        return self.client.publish(version, tensors)

    def has_lost(self) -> bool:
        return self.client.has_lost()


class _StripedWay(_OneWay):
    """The way to a publisher of each stripe, of a learner of one rank that writes all of them."""

    def __init__(self, client: PublisherClient, connect: Connect, token: int) -> None:
        super().__init__(client)
        stripes = [Stripe(index, client.stripe.count) for index in range(client.stripe.count)]
        self._striped, self._token = StripedPublish(connect, stripes, _Alone(), BUCKET_BYTES), token

    def has_room(self) -> bool:
        return self._striped.has_room(self._token, self.client, _Weights(zeros()))

    def publish(self, version: PolicyVersion, tensors: Tensors) -> bool:
        return self._striped.publish(version, _Weights(tensors))

    def has_lost(self) -> bool:
        return self._striped.has_lost()


class _Weights:
    """Weights that are exported whole."""

    def __init__(self, tensors: Tensors) -> None:
        self._tensors = tensors

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield each tensor."""
        return iter(self._tensors)

    def named_parts(self) -> tuple[Part, ...]:
        """Nothing is written in parts."""
        return ()


class _Alone:
    """Collectives of one rank."""

    rank, world_size = 0, 1

    def largest(self, values: Sequence[int]) -> list[int]:
        """Return the values."""
        return list(values)

    add = largest

    def share_bytes(self, data: bytes | None) -> bytes:
        """Return the bytes."""
        return data or b""

    merge_bytes = share_bytes


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
