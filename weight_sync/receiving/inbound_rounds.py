"""Rounds that a receiver takes part in: memory for an offer, the transfer into it, its digests, its end; or a
copy of its node that it maps and checks.

Owns the transfers into the copies of open rounds (`assembly`). Invariant: only a copy whose digests all
matched is put into the staging area as verified.
"""

from __future__ import annotations

import errno
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import xxhash

from asyncrl.core.errors import AsyncrlError, SegmentGone, SyncError, WireError
from asyncrl.core.runtime.clock import Clock
from asyncrl.core.runtime.faults import fault_point
from asyncrl.core.runtime.interface import Runtime
from asyncrl.core.staleness import UNLOADED
from weight_sync.backends.contract import DigestMismatch
from weight_sync.direct.desk import Desk
from weight_sync.encoding.delta_codec import CarryBucket, DeltaNames, DeltaReceiver, carry_whole
from weight_sync.memory.manifest import Manifest, VersionBounds
from weight_sync.memory.staging_area import Copy, StagingArea
from weight_sync.protocol import messages as told
from weight_sync.protocol.copies.sharing import UNMAPPABLE
from weight_sync.protocol.lanes.stripes import WHOLE, Stripe
from weight_sync.protocol.peer import RoundTracker, Stage
from weight_sync.protocol.rounds import ABORTED, SUPERSEDED, TRANSPORT
from weight_sync.publisher import cut
from weight_sync.receiving.assembly import Assemblies
from weight_sync.transfer_executor import AfterBucket, Check, MakeTransport, TransferExecutor, TransferOrder

log = logging.getLogger(__name__)

PASSING = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN)
"""Errors that say nothing of whether a segment can be mapped: this process has no room for it now."""
PROGRESS_EVERY_S = 0.5
"""Between two reports of one round's progress: a version that arrives in less is not told of."""
OnBucket = Callable[[int, int, torch.Tensor], None]
"""Called with version number, bucket index and the received bytes, before they are verified."""


@dataclass
class _Incoming:
    """A round that this receiver takes part in.

    Attributes:
        num_steps: Pieces of memory that were reserved, and buckets. told_at: When they were told last.
    """

    round: int
    copy: Copy
    stripe: Stripe = WHOLE
    order: TransferOrder | None = None
    num_buckets: int = 0
    is_reserved: bool = False
    num_steps: int = 0
    told_at: float | None = None


class InboundRounds:
    """See the module. All methods but `longest_transfer_s` are called by one thread, the server's.

    Args:
        report: Tells the coordinator of an event.
        call_soon: Has the server's thread make a call; any thread may ask.
        on_bucket: See `OnBucket`.
        on_end: Called after a transfer has ended: there may be a copy for the engine.
        desk: Of the engine's workers, if they receive themselves where they can.
    """

    def __init__(
        self,
        staging: StagingArea,
        make_transport: MakeTransport,
        report: Callable[[told.Event], None],
        call_soon: Callable[[Callable[[], object]], None],
        on_bucket: OnBucket,
        on_end: Callable[[], None],
        bounds: VersionBounds,
        counters: Counter[str],
        runtime: Runtime,
        desk: Desk | None = None,
    ) -> None:
        self._staging, self._desk = staging, desk
        self._assemblies = Assemblies(staging)
        self._transfers = TransferExecutor(runtime, make_transport)
        self._report = report
        self._call_soon = call_soon
        self._on_bucket = on_bucket
        self._on_end = on_end
        self._bounds = bounds
        self._counters = counters
        self._clock: Clock = runtime
        self._rounds = RoundTracker()
        self._incoming: dict[int, _Incoming] = {}
        self._transfer_starts: dict[int, float] = {}  # by round, while its thread runs, also after an abort
        self._longest_transfer_s = 0.0

    @property
    def num_transfers(self) -> int:
        """Transfers whose threads run."""
        return len(self._transfer_starts)

    def longest_transfer_s(self) -> float:
        """Return how long the longest transfer took, those included that run."""
        now, starts = self._clock.now(), list(self._transfer_starts.values())  # at once: any thread may ask
        return max([self._longest_transfer_s, *(now - start for start in starts)])

    def accept(self, order: told.Offer, manifest: bytes) -> None:
        """Take part in an offered round once there is memory for it, or refuse it."""
        round_id = order.round
        is_new = self._rounds.offer(round_id)
        if is_new:
            try:
                version = Manifest.from_bytes(manifest, bounds=self._bounds)
                stripe = Stripe(order.stripe, order.num_stripes)
                found = self._assemblies.join(round_id, version, stripe.count, is_direct=order.direct)
            except (SyncError, WireError) as error:
                self._rounds.abort(round_id)
                self._refuse(round_id, error)
                return
            if stripe.index in found.stripes:
                self._rounds.begin(round_id)
                self._rounds.end(round_id)
                self._report_verified(round_id, order.number, stripe)
                return
            self._incoming[round_id] = _Incoming(round_id, found.copy, stripe)
        incoming = self._incoming.get(round_id)
        if incoming is not None and (is_new or incoming.is_reserved):  # else it is over, or being reserved
            self._reserve(round_id)

    def receive(self, order: TransferOrder) -> None:
        """Begin the transfer of a round that was accepted."""
        if not self._rounds.begin(order.round):
            return  # aborted meanwhile, or the same order again
        incoming = self._incoming[order.round]
        incoming.order = order
        fault_point("receiver.transfer", order.number)
        self._transfer_starts[order.round] = self._clock.now()
        copy, after_bucket = incoming.copy, self._counting(incoming)
        if order.sources:
            self._receive_directly(order, incoming)
            return
        buckets, carry_bucket = _cut(incoming), self._carry_bucket(order, copy, incoming.stripe)

        def done(order: TransferOrder, cause: str, message: str) -> None:
            self._put_end(order.round, order.number, cause, message)

        self._transfers.carry(order, buckets, after_bucket, done, carry_bucket)

    def _receive_directly(self, order: TransferOrder, incoming: _Incoming) -> None:
        """Have the engine's workers receive, who keep what the engine may still load."""
        staging = self._staging
        keep = {staging.newest_verified, staging.committed_number, staging.taken_number} - {UNLOADED}

        def done(cause: str, message: str, _: int) -> None:
            self._end(order.round, order.number, cause, message)

        if self._desk is None:
            done(TRANSPORT, "weight_sync.backend is not direct here", 0)
        else:
            self._desk.carry(order, keep, partial(self._step, incoming), done)

    def map_copy(self, order: told.MapCopy, manifest: bytes) -> None:
        """Map what another process of the node shares, and check it; no byte is moved."""
        if not (self._rounds.offer(order.round) and self._rounds.begin(order.round)):
            return  # the same order again, or its abort has come before
        fault_point("receiver.map", order.number)
        try:
            copy = self._staging.map_shared(Manifest.from_bytes(manifest, bounds=self._bounds), order.path)
        except (SyncError, WireError) as error:
            self._rounds.abort(order.round)
            if isinstance(error, SegmentGone):
                self._report(told.Failed(order.round, SUPERSEDED))
            else:
                self._refuse(order.round, error, "refused" if _passes(error) else UNMAPPABLE)
            return
        self._assemblies.add(order.round, copy)
        incoming = self._incoming[order.round] = _Incoming(order.round, copy)
        self._transfer_starts[order.round] = self._clock.now()
        done = partial(self._put_end, order.round, order.number)
        self._transfers.check(order.round, _cut(incoming), self._counting(incoming), done)

    def abort(self, round_id: int) -> None:
        """Give a round up."""
        stage = self._rounds.abort(round_id)
        if stage is None:
            return
        incoming = self._incoming.pop(round_id)
        self._counters["aborted"] += 1
        if stage is Stage.OFFERED or incoming.copy.is_direct:
            self._assemblies.leave(round_id)
        else:
            self._assemblies.abandon(round_id)
        if incoming.order is not None and incoming.order.sources and self._desk is not None:
            self._desk.abort(round_id)
            self._transfer_starts.pop(round_id)
        elif incoming.order is not None:
            self._transfers.abort(incoming.order.group.membership)
        self._report(told.Failed(round_id, ABORTED, incoming.num_buckets))

    def abort_all(self) -> None:
        """Give up every round that is not over."""
        for round_id in self._rounds.open_rounds:
            self.abort(round_id)

    def close(self) -> None:
        """Give up the transfers, and free their groups."""
        self._transfers.close()

    def _reserve(self, round_id: int) -> None:
        """Reserve the next piece of an offer's memory, and accept the offer once it has all.

        Others are answered between two pieces: the coordinator would take a long silence for a death.
        """
        incoming = self._incoming.get(round_id)
        if incoming is None:
            return  # aborted meanwhile
        try:
            incoming.is_reserved = self._staging.reserve(incoming.copy)
        except SyncError as error:
            del self._incoming[round_id]
            self._assemblies.leave(round_id)
            self._rounds.abort(round_id)
            self._refuse(round_id, error)
            return
        self._step(incoming)
        if not incoming.is_reserved:
            self._call_soon(partial(self._reserve, round_id))
            return
        fault_point("receiver.offer", incoming.copy.number)
        self._report(told.Accepted(round_id))

    def _refuse(self, round_id: int, error: AsyncrlError, cause: str = "refused") -> None:
        self._counters["refused_orders"] += 1
        log.warning("cannot take part in round %d: %s", round_id, error)
        self._report(told.Failed(round_id, f"{cause}: {error.message}"[: told.MAX_TEXT]))

    def _step(self, incoming: _Incoming, num_steps: int | None = None) -> None:
        """Count a step of a round, and tell the coordinator now and then: who goes on is alive."""
        incoming.num_steps = incoming.num_steps + 1 if num_steps is None else num_steps
        now = self._clock.now()
        if incoming.told_at is None:
            incoming.told_at = now
        elif now - incoming.told_at >= PROGRESS_EVERY_S:
            incoming.told_at = now
            self._report(told.Progress(incoming.round, incoming.num_steps))

    def _carry_bucket(self, order: TransferOrder, copy: Copy, stripe: Stripe) -> CarryBucket:
        own = stripe.buckets(len(copy.manifest.buckets))
        digests = copy.manifest.digests[own.start : own.stop]
        if order.base == UNLOADED:
            return partial(carry_whole, digests=digests)
        base = self._staging.find_base(order.base, copy.manifest.layout)
        if base is None:
            self._counters["missing_bases"] += 1
        buckets = cut(base.bytes_B, base.manifest, stripe) if base is not None else None
        return DeltaReceiver(buckets, DeltaNames(digests, order.base)).carry

    def _counting(self, incoming: _Incoming) -> AfterBucket:
        """Return what counts the buckets of a round, and returns their checks."""
        manifest = incoming.copy.manifest
        verify, first = self._verifier(manifest), incoming.stripe.buckets(len(manifest.buckets)).start

        def after_bucket(index: int, bucket: torch.Tensor) -> Check | None:
            check = verify(first + index, bucket)
            incoming.num_buckets = index + 1
            self._step(incoming)
            return check

        return after_bucket

    def _verifier(self, manifest: Manifest) -> AfterBucket:
        number = manifest.version.number

        def verify(index: int, bucket: torch.Tensor) -> None:
            if xxhash.xxh3_128(bucket.numpy().data).hexdigest() != manifest.buckets[index].digest:
                raise DigestMismatch(f"bucket {index} of version {number} is not what the learner wrote")

        def after_bucket(index: int, bucket: torch.Tensor) -> Check:
            fault_point("receiver.bucket", number, index)
            self._on_bucket(number, index, bucket)
            return partial(verify, index, bucket)

        return after_bucket

    def _put_end(self, round_id: int, number: int, cause: str, message: str) -> None:
        self._call_soon(partial(self._end, round_id, number, cause, message))

    def _end(self, round_id: int, number: int, cause: str, message: str) -> None:
        took_s = self._clock.now() - self._transfer_starts.pop(round_id)
        self._longest_transfer_s = max(self._longest_transfer_s, took_s)
        if not self._rounds.end(round_id):  # aborted; only now is nobody writing into its segment
            self._assemblies.end_abandoned(round_id)
            self._on_end()
            return
        incoming = self._incoming.pop(round_id)
        if cause:
            self._counters[f"failed/{cause}"] += 1
            log.warning("round %d with version %d failed: %s", round_id, number, message)
            self._assemblies.leave(round_id)
            self._report(told.Failed(round_id, cause, incoming.num_buckets))
        else:
            self._report_verified(round_id, number, incoming.stripe)
        self._on_end()

    def _report_verified(self, round_id: int, number: int, stripe: Stripe) -> None:
        """The round's stripe is here; with the last one the version is the newest that is verified."""
        path, copy = "", self._assemblies.verify(round_id, stripe.index)
        if copy is not None:
            self._staging.put_verified(copy)
            self._counters["maps"] += copy.is_mapped
            shared, shared_path = self._staging.shared
            path = shared_path if shared == number else ""
        fault_point("receiver.verified", number)
        self._report(told.Verified(round_id, number, path, copy is not None))


def _cut(incoming: _Incoming) -> list[torch.Tensor]:
    """Return the buckets that the round brings."""
    return cut(incoming.copy.bytes_B, incoming.copy.manifest, incoming.stripe)


def _passes(error: Exception) -> bool:
    return isinstance(error.__cause__, OSError) and error.__cause__.errno in PASSING
