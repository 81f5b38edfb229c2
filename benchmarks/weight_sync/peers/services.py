"""Our services as processes of their own, a learner that publishes, replicas that copy what they get.

Owns the processes and the segments of one fleet. The services are the project's; the coordinator also
notes when what passes it, which is how a transfer is timed: from the order to transfer, or to map, to the
last report of a verified copy.
"""

from __future__ import annotations

import os
import shutil
import threading
import time
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import xxhash

from asyncrl.core.config.tree import Config
from asyncrl.core.errors import ServiceFailed
from asyncrl.core.rpc import Client
from asyncrl.core.runtime.faults import VARIABLE
from asyncrl.core.runtime.threads import ThreadEvent, ThreadRuntime
from asyncrl.core.service import ServiceContext
from asyncrl.core.sockets.keys import make_run_keys
from asyncrl.core.staleness import PolicyVersion
from benchmarks.weight_sync.peers.peers import WAIT_S, Entry, Peer, now_s, obey
from benchmarks.weight_sync.peers.weights import count_bytes, make_weights, read_weights
from learner.ranks import Ranks
from learner.striped import StripedPublish
from weight_sync import composition
from weight_sync.coordination.coordinator import CoordinatorService
from weight_sync.memory import segments
from weight_sync.memory.manifest import Manifest
from weight_sync.memory.staging import Staged, open_tensors
from weight_sync.protocol.lanes.stripes import Stripe
from weight_sync.protocol.messages import ReceiverHello
from weight_sync.protocol.protocol import PUBLISHER, Coordination
from weight_sync.protocol.rounds import Order, Timing
from weight_sync.publisher_client import PublisherClient

COORDINATOR_NAME, PUBLISHER_NAME = "weight_sync.0", "publisher.0"
DEADLINE_S = 60.0
LEARNER_ACTS = ("publish", "parts", "digest", "copy", "call", "steps", "num_bytes")
STEP_WIDTH = 1024
"""Of the matrix that a step multiplies: some 20 ms."""


class TimedCoordination(Coordination):
    """Says over a pipe when which member joined, verified and loaded, and when a transfer was ordered."""

    pipe: Connection

    def hello(self, info: ReceiverHello, now: float) -> bool:
        self.pipe.send(("hello", info.name, 0, now_s()))
        return super().hello(info, now)

    def take_orders(self) -> list[Order]:
        orders = super().take_orders()
        for order in orders:
            if order.kind == "map" or (order.to == PUBLISHER and order.kind == "transfer"):
                self.pipe.send(("transfer", "", order.fields["number"], now_s()))
        return orders

    def verified(
        self, name: str, round_id: int, number: int, now: float, path: str = "", is_complete: bool = True
    ) -> None:
        super().verified(name, round_id, number, now, path, is_complete)
        if is_complete:
            self.pipe.send(("verified", name, number, now_s()))

    def loaded(self, name: str, number: int, is_ok: bool, error: str, now: float) -> None:
        super().loaded(name, number, is_ok, error, now)
        self.pipe.send(("loaded", name, number, now_s()))


def run_service(pipe: Connection, context: ServiceContext, node: str | None = None) -> None:
    """Entry of a service's process: send the address, serve until the pipe closes; what it says are faults.

    Args:
        node: Its mark.
    """
    service: Any
    if context.kind == "weight_sync":
        section = context.config.weight_sync
        coordination = TimedCoordination(
            Timing.of(DEADLINE_S), section.parallelism, uses_direct=section.is_direct
        )
        coordination.pipe = pipe
        service = CoordinatorService(coordination, ThreadRuntime(), context.bind, context.server_keys)
    elif context.kind == "publisher":
        service = composition.build_publisher(context, node=node)
    else:
        service = composition.build_receiver(context, node=node)
    stop = ThreadEvent()
    threading.Thread(target=_stop_at_the_end, args=(pipe, stop), daemon=True).start()
    pipe.send(service.status().address)
    service.run(stop)


def _stop_at_the_end(pipe: Connection, stop: threading.Event) -> None:
    try:
        while True:
            os.environ[VARIABLE] = pipe.recv()
    except (EOFError, OSError):
        stop.set()


class Learner:
    """Publishes the same weights again and again, and copies them plainly for comparison."""

    def __init__(self, context: ServiceContext, source: int | Path) -> None:
        self._weights = read_weights(source) if isinstance(source, Path) else make_weights(source)
        self._copies = [tensor.clone() for _, tensor in self._weights]
        self._matrix = torch.full((STEP_WIDTH, STEP_WIDTH), 1 / STEP_WIDTH)
        address, keys = context.addresses[PUBLISHER_NAME], context.client_keys
        bucket_bytes = context.config.weight_sync.bucket_bytes
        self._publisher_client = PublisherClient(
            ThreadRuntime(), address, context.shm_prefix, bucket_bytes, token=1, keys=keys
        )

    def publish(self, number: int) -> tuple[float, float]:
        """Hand over version `number`; return when that began and ended."""
        began = now_s()
        if not self._publisher_client.publish(PolicyVersion(number, number), self._weights):
            raise ServiceFailed("no segment was free, though every version had been loaded")
        return began, now_s()

    def parts(self) -> dict[str, float]:
        """Return the seconds of the last publish, by part."""
        return asdict(self._publisher_client.take_times())

    def digest(self) -> float:
        """Return the seconds of the digests of the weights, in one piece and alone."""
        began, digest = now_s(), xxhash.xxh3_128()
        for _, tensor in self._weights:
            digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
        return now_s() - began

    def copy(self) -> float:
        """Return the seconds of a plain copy of the weights, tensor by tensor."""
        began = now_s()
        for copy, (_, tensor) in zip(self._copies, self._weights, strict=True):
            copy.copy_(tensor)
        return now_s() - began

    def call(self) -> float:
        """Return the seconds of a call of the publisher that has nothing to do."""
        began = now_s()
        self._publisher_client.has_lost()
        return now_s() - began

    def steps(self, number: int) -> list[tuple[float, float]]:
        """Compute for a while; return when each step began and ended."""
        return [self._step() for _ in range(number)]

    def _step(self) -> tuple[float, float]:
        began = now_s()
        torch.mm(self._matrix, self._matrix)
        return began, now_s()

    def num_bytes(self) -> int:
        return count_bytes(self._weights)


def run_learner(pipe: Connection, context: ServiceContext, source: int | Path) -> None:
    """Entry of the learner's process; `source` is a number of made-up bytes, or a checkpoint's folder."""
    learner = Learner(context, source)
    obey(pipe, {name: getattr(learner, name) for name in LEARNER_ACTS})


class StripedLearner(Learner):
    """One rank that publishes each version to all publishers, to each its stripe."""

    def __init__(self, context: ServiceContext, source: int | Path) -> None:
        super().__init__(context, source)
        names = sorted(name for name in context.addresses if name.startswith("publisher."))
        stripes = [Stripe(index, len(names)) for index in range(len(names))]
        bucket_bytes = context.config.weight_sync.bucket_bytes

        def connect(token: int, stripe: Stripe) -> PublisherClient:
            address = context.addresses[names[stripe.index]]
            where = (ThreadRuntime(), address, context.shm_prefix, bucket_bytes, token)
            return PublisherClient(*where, keys=context.client_keys, stripe=stripe)

        self._striped = StripedPublish(connect, stripes, Ranks(0, 1, torch.device("cpu")), bucket_bytes)

    def publish(self, number: int) -> tuple[float, float]:
        """As `Learner.publish`."""
        began = now_s()
        is_taken = self._striped.has_room(1, None, self)
        if not (is_taken and self._striped.publish(PolicyVersion(number, number), self)):
            raise ServiceFailed("a publisher had no segment free, or is away")
        return began, now_s()

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield each tensor."""
        yield from self._weights

    def named_parts(self) -> tuple[()]:
        """Return nothing: this learner hands over full tensors."""
        return ()


def run_striped_learner(pipe: Connection, context: ServiceContext, source: int | Path) -> None:
    """Entry of the process of a learner with several publishers."""
    learner = StripedLearner(context, source)
    obey(pipe, {name: getattr(learner, name) for name in LEARNER_ACTS})


class CopyingReplica:
    """Stands for a replica: loads a version by copying its bytes into memory of its own, or not at all."""

    def __init__(self, receiver: str, context: ServiceContext, copies: bool = True) -> None:
        self._does_copy = copies
        self._client = Client(ThreadRuntime(), receiver, context.client_keys)
        self._copies: dict[str, torch.Tensor] = {}
        self._serving = 0
        self._stop = ThreadEvent()
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def _follow(self) -> None:
        while not self._stop.is_set():
            reply = self._client.call("next_staged", deadline_s=30.0, serving=self._serving, wait_s=0.5)
            if reply.frames:
                manifest = Manifest.from_bytes(bytes(reply.frames[0]))
                if self._does_copy:
                    self._load(Staged(manifest.version, reply.args["path"], manifest))
                self._serving = manifest.version.number
                self._client.call("loaded", deadline_s=30.0, number=self._serving, ok=True, error="")

    def _load(self, staged: Staged) -> None:
        self._copy(open_tensors(staged))

    def _copy(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in tensors:
            if name not in self._copies:
                self._copies[name] = torch.empty_like(tensor)
            self._copies[name].copy_(tensor)

    def close(self) -> None:
        self._stop.set()
        self._thread.join(WAIT_S)
        self._client.close()


@dataclass(frozen=True)
class Sync:
    """One version's way, in seconds.

    Attributes:
        publish_s: The learner's call of `publish`.
        transfer_s: From the order to transfer until the last receiver had verified.
        ready_s: From the begin of `publish` until the last replica had loaded.
        times: When the transfer was ordered, and each receiver had verified, and loaded.
    """

    publish_s: float
    transfer_s: float
    ready_s: float
    times: dict[str, list[float]] = field(default_factory=dict)


class Fleet:
    """A coordinator, a publisher, a learner and receivers.

    >>> # fleet = Fleet(2, 100 << 20, 16 << 20)
    >>> # fleet.attend()
    >>> # fleet.sync().transfer_s

    Args:
        source: See `run_learner`.
        has_keys: Sockets have keys, and broadcasts tags.
        maps: Receivers map what the publisher of their node has; else they get its bytes, as on another node.
        num_stripes: Publishers, each of which sends its stripe of every version.
        entries: Of the learner's process and of a replica's, if these are others than here: `peers.direct`.
    """

    def __init__(
        self,
        num_receivers: int,
        source: int | Path,
        bucket_bytes: int,
        has_keys: bool = True,
        maps: bool = False,
        entries: tuple[Entry, Entry] | None = None,
        num_stripes: int = 1,
    ) -> None:
        self._maps, self._entries, self._num_stripes = maps, entries, num_stripes
        self.context = make_context(bucket_bytes, has_keys=has_keys, is_direct=entries is not None)
        self._peers: list[Peer] = []
        self._replicas: list[CopyingReplica] = []
        self.workers: list[Peer] = []
        self.first_times: dict[tuple[str, str], float] = {}
        self._number = 0
        self.coordinator = self._start(COORDINATOR_NAME)
        for index in range(num_stripes):
            self._publisher = self._start(f"publisher.{index}")
        self.receivers = [f"receiver.{index}" for index in range(num_receivers)]
        for name in self.receivers:
            self._start(name)
        self._await_members(set(self.receivers))
        entry = run_learner if num_stripes == 1 else run_striped_learner
        self.learner = Peer("learner", entries[0] if entries else entry, self.context, source)
        self._peers.append(self.learner)
        self.num_bytes = int(self.learner.ask("num_bytes"))

    def attend(self, copies: bool = True) -> None:
        """Put a replica beside each receiver that takes every version."""
        if self._entries is not None:
            entry = self._entries[1]
            peers = [Peer(f"replica of {name}", entry, self.context, name) for name in self.receivers]
            self._peers += peers
            self.workers += peers
            while not all(peer.ask("is_direct") for peer in peers):
                self.sync()
            return
        addresses = [self.context.addresses[name] for name in self.receivers]
        self._replicas += [CopyingReplica(address, self.context, copies) for address in addresses]

    def sync(self) -> Sync:
        """Publish once and return the figures when every replica has loaded."""
        began, ended = self.publish()
        times = self.follow("loaded")
        transfer_s = max(times["verified"]) - min(times["transfer"])
        return Sync(ended - began, transfer_s, max(times["loaded"]) - began, times)

    def publish(self) -> tuple[float, float]:
        """Have the learner publish the next version; return when that began and ended."""
        self._number += 1
        began, ended = self.learner.ask("publish", self._number)
        return began, ended

    def follow(self, until: str) -> dict[str, list[float]]:
        """Return the times of what happens to the newest version, up to all receivers' `until`."""
        times: dict[str, list[float]] = {"transfer": [], "verified": [], "loaded": []}
        while len(times[until]) < len(self.receivers):
            what, who, number, at = self.coordinator.hear(DEADLINE_S)
            self.first_times.setdefault((what, who), at)
            if what in times and number == self._number:
                times[what].append(at)
        return times

    def steps(self, number: int) -> list[tuple[float, float]]:
        """Let the learner compute that many steps; return when each began and ended."""
        steps: list[tuple[float, float]] = self.learner.ask("steps", number)
        return steps

    def join(self, num_steps: int) -> tuple[float, float, list[tuple[float, float]]]:
        """Let a receiver and its replica come while the learner computes.

        Returns:
            When the coordinator took the hello, when the replica had loaded, and the learner's steps.
        """
        self.learner.tell("steps", num_steps)
        name = self._add_receiver()
        hello_s = self._hear("hello", name)
        ready_s = self._hear("loaded", name)
        return hello_s, ready_s, self.learner.hear()

    def join_amid(self) -> float:
        """Let a receiver come while versions go out; return the seconds from its hello to its first load."""
        self.first_times.clear()
        others, name = list(self.receivers), self._add_receiver()
        everyone, self.receivers = self.receivers, others
        while ("loaded", name) not in self.first_times:
            self.sync()
        self.receivers = everyone
        return self.first_times["loaded", name] - self.first_times["hello", name]

    def _add_receiver(self) -> str:
        """Start a receiver with its replica; return its name."""
        name = f"receiver.{len(self.receivers)}"
        self._start(name)
        self.receivers.append(name)
        if self._entries is not None:
            self._peers.append(Peer(f"replica of {name}", self._entries[1], self.context, name))
        else:
            self._replicas.append(CopyingReplica(self.context.addresses[name], self.context))
        return name

    def _hear(self, what: str, name: str) -> float:
        """Return when that happened to `name` first."""
        while True:
            said, who, _, at = self.coordinator.hear(DEADLINE_S)
            if (said, who) == (what, name):
                return float(at)

    def lose_sender(self, place: int) -> float:
        """Publish, and kill who sends at a pack or bucket: the learner, or a publisher that comes again.

        Returns:
            The seconds from there until every replica has loaded the version.
        """
        self._number += 1
        if self._entries is not None:
            self.learner.ask("fail_at", f"direct.source.pack@{self._number}.{place}")
            self.learner.tell("publish", self._number)
            died_s = self.learner.await_end()
        else:
            self._publisher.say(f"publisher.bucket@{self._number}.{place}")
            self.learner.tell("publish", self._number)
            died_s = self._publisher.await_end()
            self.learner.hear()
            self._publisher = self._start(self._publisher.name)
        return max(self.follow("loaded")["loaded"]) - died_s

    def copy_s(self) -> float:
        """Return the seconds that the learner takes to copy the weights plainly."""
        return float(self.learner.ask("copy"))

    def close(self) -> None:
        """End everything, the learner and the receivers first."""
        for replica in self._replicas:
            replica.close()
        for peer in reversed(self._peers):
            peer.close()
        shutil.rmtree(segments.SHM_DIR / self.context.shm_prefix, ignore_errors=True)

    def _start(self, name: str) -> Peer:
        context = replace(self.context, name=name)
        if context.kind == "publisher":
            context = replace(context, rank=context.index, world_size=self._num_stripes)
        peer = Peer(name, run_service, context, None if self._maps else name)
        self._peers.append(peer)
        addresses = {**self.context.addresses, name: peer.hear()}
        self.context = replace(self.context, addresses=addresses)
        return peer

    def _await_members(self, names: set[str]) -> None:
        client = Client(ThreadRuntime(), self.context.addresses[COORDINATOR_NAME], self.context.client_keys)
        end = now_s() + WAIT_S
        while not names <= set(client.call("status", deadline_s=WAIT_S).args["members"]):
            if now_s() > end:
                raise ServiceFailed("the receivers did not join")
            time.sleep(0.01)
        client.close()


def make_context(
    bucket_bytes: int, parallelism: int = 1, *, has_keys: bool = True, is_direct: bool = False
) -> ServiceContext:
    """Return a run's context, with keys of its own unless told otherwise, and addresses of nobody yet."""
    settings = {
        "model": {"path": "builtin:digit_sort"},
        "data": {"train": "builtin:digit_sort"},
        "reward": {"fn": "digit_sort"},
        "weight_sync": {
            "deadline_s": DEADLINE_S,
            "bucket_bytes": bucket_bytes,
            "parallelism": parallelism,
            "backend": "direct" if is_direct else "auto",
        },
    }
    config = Config.model_validate(settings)
    run_id = f"bench{uuid.uuid4().hex[:8]}"
    keys = make_run_keys() if has_keys else None
    return ServiceContext(config, COORDINATOR_NAME, Path("runs/bench"), run_id, keys=keys)
