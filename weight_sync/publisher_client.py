"""The learner's side: copies a version into shared memory and hands it to the publisher.

Owns the copy and the digests made while copying. Never waits for a replica; every call is bounded.
The first version, whose layout nobody knows, is gathered to rank 0. From then on every rank on this host
writes its own parts (`publish_sharded`); if one cannot, versions go on being gathered.
Invariant: all versions of one `PublisherClient` have the same names, dtypes and shapes in the same order.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Protocol

import torch

from asyncrl.core.errors import (
    AsyncrlError,
    ConnectionLost,
    DeadlineExceeded,
    SegmentGone,
    SyncError,
    WireError,
)
from asyncrl.core.rpc import Client
from asyncrl.core.rpc.client import PendingCall
from asyncrl.core.runtime.faults import fault_point
from asyncrl.core.runtime.interface import Runtime
from asyncrl.core.sockets.keys import ClientKeys
from asyncrl.core.staleness import PolicyVersion
from weight_sync import messages as wire
from weight_sync.memory.manifest import Bucket, Layout, Manifest, Planner, Probe, TensorSpec, plan
from weight_sync.memory.parts import Part
from weight_sync.memory.segments import SHM_DIR
from weight_sync.memory.sharded_publish import TogetherWriter, Written
from weight_sync.memory.writer import (
    GrowingPlace,
    MappedPlace,
    Mappings,
    SegmentWriter,
    WriteTimes,
    digest_of,
)
from weight_sync.protocol.lanes.stripes import WHOLE, Stripe

log = logging.getLogger(__name__)

CALL_DEADLINE_S = 10.0
ACQUIRE_DEADLINE_S = 3.0
ROOM_WAIT_S = 3.0
"""From a look that found no segment to the next one, if the publisher says nothing."""
AWAY_PAUSE_S = 0.5
"""From the last look, if it found no publisher."""
ASK_DEADLINE_S = 1.0
START_DEADLINE_S = 120.0
"""For the first call: the publisher may still be starting."""


@dataclass(frozen=True)
class PublishTimes:
    """Seconds of a publish, by part; the learner stood still for their sum.

    Attributes:
        gather_s: Asking for the tensors, and waiting for the other ranks: collectives, and reordering.
        copy_s: Copying into the segment, on rank 0.
        digest_s: Digests of the buckets, on rank 0.
        call_s: Calls of the publisher: for a segment, and to commit.
        other_s: The rest.
    """

    gather_s: float = 0.0
    copy_s: float = 0.0
    digest_s: float = 0.0
    call_s: float = 0.0
    other_s: float = 0.0

    def metrics(self) -> dict[str, float]:
        """Return the parts by their metrics' names."""
        return {f"weights/publish_{name}": seconds for name, seconds in asdict(self).items()}


class Exporter(Protocol):
    """Owner of weights to publish on several ranks. Both methods are collective."""

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield each full tensor, on every rank."""

    def named_parts(self) -> tuple[Part, ...]:
        """Return what this rank is to write; the ranks' parts cover every element once.

        The same object as before means the same views.
        """


class PublisherClient:
    """Publishes versions to the publisher on this host.

    >>> # client = PublisherClient(runtime, "tcp://127.0.0.1:5555", "asyncrl-run/", 64 << 20, token=3)
    >>> # client.publish(PolicyVersion(1, 0), model.named_parameters())

    Args:
        address: RPC address of the publisher.
        shm_prefix: Start of the run's segment names; other paths are refused.
        bucket_bytes: Bytes per bucket, `weight_sync.bucket_bytes`.
        token: The learner's fencing token.
        specs: Names, dtypes and shapes in order. Without them the first publish learns them as it
            copies, into a file that grows; no extra pass is made.
        keys: Of the run, if the publisher's socket has any.
        stripe: That the publisher keeps; with others the layout is set before the first publish.

    Attributes:
        layout: Of all versions; None before the first.
        published: The newest version that the publisher has taken.
        digest: Of its bytes: xxh3-128 of the digests of its buckets, in hex.
        num_absences: Publishes deferred because the publisher was away.
        room: A call that is over once `has_room` may find more than it did last; None if it found room, or no
            publisher.

    Raises:
        FencedError: A newer token is in use.
        DeadlineExceeded: The publisher does not answer at the start.
    """

    def __init__(
        self,
        runtime: Runtime,
        address: str,
        shm_prefix: str,
        bucket_bytes: int,
        token: int,
        specs: Sequence[TensorSpec] | None = None,
        keys: ClientKeys | None = None,
        stripe: Stripe = WHOLE,
    ) -> None:
        self.stripe = stripe
        self._prefix = f"{SHM_DIR}/{shm_prefix}"
        self._bucket_bytes = bucket_bytes
        self.token = token
        self.layout: Layout | None = plan(specs, bucket_bytes) if specs is not None else None
        self._mappings = Mappings()
        self._reserved = ""
        self._times = PublishTimes()
        self.published: PolicyVersion | None = None
        self.digest = ""
        self.num_absences = 0
        self.room: PendingCall | None = None
        self._runtime = runtime
        self._client = Client(runtime, address, keys)
        try:
            self._open()
        except AsyncrlError:
            self._client.close()  # nobody else can: the caller gets no PublisherClient
            raise

    def _open(self) -> None:
        """Say who publishes from now on; again, to a publisher that took the place of one that died.

        A call without time left ends with `DeadlineExceeded`, and so does the loop.
        """
        end = self._runtime.now() + START_DEADLINE_S
        while True:
            try:
                asked, left_s = wire.Open(self.token), max(0.0, end - self._runtime.now())
                self._client.ask(wire.OPEN, asked, deadline_s=left_s)
                return
            except ConnectionLost as error:
                self._note_absence(error)

    def has_room(self) -> bool:
        """Tell whether a `publish` now would find a free segment, before the tensors are gathered.

        The segment stays reserved for this learner, so the answer holds until the publish. If there is none,
        nobody is asked again before `room` is over.
        """
        if self.room is not None:
            if not self.room.is_over():
                return False
            self._client.forget(self.room)
            self.room = None
        try:
            self._reserved = self._acquire()
            if not self._reserved:
                asked = wire.AwaitRoom(self.token)
                self.room = self._client.begin_asking(wire.AWAIT_ROOM, asked, ROOM_WAIT_S)
        except DeadlineExceeded as error:  # it is being started anew: as with no free segment
            self._note_absence(error)
            self._reserved = ""
        return bool(self._reserved)

    def await_room(self) -> None:
        """Wait until `has_room` may find more than it did last; a little if it found no publisher."""
        if self.room is None:
            self._runtime.sleep(AWAY_PAUSE_S)
            return
        with contextlib.suppress(DeadlineExceeded):  # the next look finds out
            self.room.end()
        self.room = None

    def has_lost(self) -> bool:
        """Tell whether the publisher lacks the newest version that it has taken: one that took the place of
        another, on a host that was started anew say, may have found nothing of it. Then nobody waits for that
        version in vain if the same weights are published once more, under a new number.
        """
        if self.published is None:
            return False
        try:
            current = self._client.ask(wire.CURRENT, wire.AskCurrent(), deadline_s=ASK_DEADLINE_S)
        except DeadlineExceeded:  # it is being started anew, and will be asked again
            return False
        return current.message.number < self.published.number

    @property
    def shared_path(self) -> str:
        """The reserved segment, if ranks may write their parts of the next version to it; else empty."""
        return self._reserved if self.layout is not None else ""

    def publish(
        self,
        version: PolicyVersion,
        tensors: Iterable[tuple[str, torch.Tensor]],
        probe: Probe | None = None,
    ) -> bool:
        """Copy `tensors`, on any device, and make them the newest version.

        Returns:
            False if no segment was free: nothing was read from `tensors`, publish a newer version later.
            Also False if the publisher has died meanwhile; `tensors` was read to its end then.

        Raises:
            SyncError: The tensors are not those of the versions before, or there is no room.
            FencedError: A newer token is in use.
            DeadlineExceeded: The publisher does not answer.
        """
        began = time.perf_counter()
        path, self._reserved = self._reserved or self._acquire(), ""
        if not path:
            return False
        acquired = time.perf_counter()
        source = Timed(tensors)
        try:
            layout, buckets, written = self._copy(path, source)
        except SegmentGone as error:
            self._note_absence(error)
            for _ in source:  # other ranks take part in the gathers
                pass
            return False
        taken = Written(buckets, written, source.seconds)
        return self._hand_over(path, Manifest(version, layout, buckets, probe), taken, began, acquired)

    def commit_parts(
        self,
        version: PolicyVersion,
        written: Written | None,
        began: float,
        probe: Probe | None = None,
    ) -> bool:
        """Make what all ranks have written to `shared_path` the newest version; `began` is when they did.

        Returns:
            False if the segment was gone, or the publisher has died since.
        """
        path, self._reserved = self._reserved, ""
        if written is None:
            self._note_absence(SegmentGone(f"the segment {path} is gone"))
            return False
        assert self.layout is not None, "the first version is not written in parts"
        manifest = Manifest(version, self.layout, written.buckets, probe)
        return self._hand_over(path, manifest, written, began, began)

    def _hand_over(
        self, path: str, manifest: Manifest, written: Written, began: float, acquired: float
    ) -> bool:
        fault_point("handoff.copied", manifest.version.number)
        copied = time.perf_counter()
        if not self._commit(path, manifest):
            return False
        self.layout, self.published = manifest.layout, manifest.version
        self.digest = digest_of(manifest.buckets)
        call_s = acquired - began + time.perf_counter() - copied
        gather_s, copy_s, digest_s = written.waited_s, written.times.copy_s, written.times.digest_s
        other_s = copied - acquired - gather_s - copy_s - digest_s
        self._times = PublishTimes(gather_s, copy_s, digest_s, call_s, other_s)
        return True

    def _commit(self, path: str, manifest: Manifest) -> bool:
        asked, frames = wire.Commit(self.token, path), [manifest.to_bytes()]
        deadline_s = CALL_DEADLINE_S / 2
        try:
            try:
                self._client.ask(wire.COMMIT, asked, frames, deadline_s)
            except DeadlineExceeded:  # what was sent to a publisher that has just died is lost
                self._client.ask(wire.COMMIT, asked, frames, deadline_s)
        except (DeadlineExceeded, SegmentGone) as error:
            self._note_absence(error)
            return False
        return True

    def _note_absence(self, error: AsyncrlError) -> None:
        self.num_absences += 1
        log.warning("the publisher is away, the publish is deferred: %s", error)

    def take_times(self) -> PublishTimes:
        """Return the times of the last publish since the last call; zeros if there was none."""
        times, self._times = self._times, PublishTimes()
        return times

    def close(self) -> None:
        """Hang up; the publisher keeps what was published."""
        self._client.close()

    def _acquire(self) -> str:
        num_bytes = self.layout.segment_bytes(self.stripe) if self.layout else 0
        # Once, not twice: without an answer the publish is deferred, and the learner goes on.
        asked = wire.Acquire(self.token, num_bytes)
        path = self._client.ask(wire.ACQUIRE, asked, deadline_s=ACQUIRE_DEADLINE_S).message.path
        if path and not path.startswith(self._prefix):
            raise WireError(f"the publisher named {Path(path).name}, which is not a segment of this run")
        return path

    def _copy(
        self, path: str, tensors: Iterable[tuple[str, torch.Tensor]]
    ) -> tuple[Layout, tuple[Bucket, ...], WriteTimes]:
        if self.layout is None:
            with GrowingPlace(path) as growing:
                return self._copy_first(SegmentWriter(growing, self._bucket_bytes), tensors)
        writer = self._make_writer(path, self.layout)
        for tensor in in_layout(self.layout, tensors):
            writer.write(tensor)
        return self.layout, writer.finish(), writer.times

    def _copy_first(
        self, writer: SegmentWriter, tensors: Iterable[tuple[str, torch.Tensor]]
    ) -> tuple[Layout, tuple[Bucket, ...], WriteTimes]:
        planner = Planner()
        for name, tensor in tensors:
            planner.place(TensorSpec(name, name_of(tensor.dtype), tuple(tensor.shape)))
            writer.write(tensor)
        return planner.finish(self._bucket_bytes), writer.finish(), writer.times

    def open_writer(self) -> SegmentWriter:
        """Return the writer of the stripe's bytes to the segment that `has_room` has found.

        Raises:
            SegmentGone: The publisher has died since.
        """
        assert self.layout is not None, "a stripe is of a known layout"
        return self._make_writer(self._reserved, self.layout)

    def _make_writer(self, path: str, layout: Layout) -> SegmentWriter:
        place = MappedPlace(self._mappings.open(path, layout.segment_bytes(self.stripe)))
        return SegmentWriter(place, self._bucket_bytes, layout.span(self.stripe))


def in_layout(layout: Layout, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[torch.Tensor]:
    """Yield the tensors; raises SyncError once one is not what the layout has."""
    wanted = iter(layout.tensors)
    for name, tensor in tensors:
        entry = next(wanted, None)
        spec = (name, name_of(tensor.dtype), tensor.shape)
        if entry is None or spec != (entry.name, entry.dtype, entry.shape):
            raise SyncError(
                f"the tensor {spec} came where the versions before had {entry.spec if entry else None}",
                hint="A run publishes the same names, dtypes and shapes in the same order",
            )
        yield tensor
    missing = next(wanted, None)
    if missing is not None:
        raise SyncError(f"the version ends before the tensor '{missing.name}'")


def publish_sharded(
    publisher_client: PublisherClient | None,
    together: TogetherWriter,
    path: str,
    version: PolicyVersion,
    model: Exporter,
    probe: Probe | None = None,
) -> bool:
    """Publish `model` from every rank of it; collective. Each rank writes its own parts, if all can.

    Args:
        publisher_client: Rank 0's; the other ranks have none. It has found room.
        path: Its `shared_path`, on every rank.

    Returns:
        As `PublisherClient.publish` on rank 0; True on the others.

    Raises:
        SyncError: As `PublisherClient.publish`, on every rank if any has failed in writing.
    """
    began = time.perf_counter()
    layout = publisher_client.layout if publisher_client is not None else None
    parts = model.named_parts() if path else ()
    if path and together.agrees(path, layout, parts):
        prepared_s = time.perf_counter() - began
        written = together.write(path, parts)
        if written is not None:
            written = replace(written, waited_s=written.waited_s + prepared_s)
        return publisher_client is None or publisher_client.commit_parts(version, written, began, probe)
    tensors = model.named_tensors()
    if publisher_client is not None:
        return publisher_client.publish(version, tensors, probe)
    for _ in tensors:  # the export is collective
        pass
    return True


class Timed:
    """Iterates over tensors and adds up how long each was waited for."""

    def __init__(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._tensors = iter(tensors)
        self.seconds = 0.0

    def __iter__(self) -> Timed:
        return self

    def __next__(self) -> tuple[str, torch.Tensor]:
        start = time.perf_counter()
        try:
            return next(self._tensors)
        finally:
            self.seconds += time.perf_counter() - start


@cache
def name_of(dtype: torch.dtype) -> str:
    """Return torch's name of the dtype."""
    return str(dtype).removeprefix("torch.")
