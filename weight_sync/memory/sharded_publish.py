"""Sharded publish: several learner ranks write one version into one segment, each its own parts.

Owns the agreement on whether they can, the collectives once all have written, and who digests what.
Every function that takes `collectives` is one: all ranks call it in the same order, and all come to the
same outcome. Every wait ends with the process group's timeout. Invariant: nothing is committed unless every
rank has written all it holds, and together they hold all there is.
"""

from __future__ import annotations

import json
import logging
import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from asyncrl.core.errors import AsyncrlError, SegmentGone, SyncError
from asyncrl.core.runtime.faults import fault_point
from weight_sync.memory.manifest import Bucket, Layout, TensorSpec, plan
from weight_sync.memory.parts import Part, PartWriter, merge_digests
from weight_sync.memory.writer import Bytes, Mappings, WriteTimes

log = logging.getLogger(__name__)

DIGEST_BYTES = 16
MARK_BYTES = 16
"""Of the random mark by which ranks know that they have mapped one and the same memory."""
WRITTEN, GONE, FAILED = range(3)
"""Outcomes of a rank's part of a version; the worst of all ranks counts."""


class Collectives(Protocol):
    """Collectives over the ranks that publish together; with one rank they send nothing."""

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    def largest(self, values: Sequence[int]) -> list[int]:
        """Return the largest of each value over all ranks."""

    def add(self, values: Sequence[int]) -> list[int]:
        """Return the sum of each value over all ranks."""

    def share_bytes(self, data: bytes | None) -> bytes:
        """Return what rank 0 hands in."""

    def merge_bytes(self, data: bytes) -> bytes:
        """Return all ranks' bytes in one; at each place one rank at most has another byte than zero."""


@dataclass(frozen=True)
class Written:
    """Commit of rank 0: the buckets, and its own seconds, those of waiting for the others too."""

    buckets: tuple[Bucket, ...]
    times: WriteTimes
    waited_s: float


@dataclass
class _Plan:
    """Agreement of the ranks; `shared` buckets are digested by this rank after the collectives."""

    layout: Layout
    parts: tuple[Part, ...]
    writer: PartWriter
    shared: list[int] = field(default_factory=list)


class TogetherWriter:
    """One rank's side; see the module.

    >>> # together = TogetherWriter(collectives)
    >>> # if together.agrees(path, layout, parts): written = together.write(path, parts)
    """

    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives
        self._mappings = Mappings()
        self._plan: _Plan | None = None
        self._is_refusal_known = False

    def agrees(self, path: str, layout: Layout | None, parts: tuple[Part, ...]) -> bool:
        """Whether all ranks can write to the segment at `path`; asked until they can.

        Args:
            layout: Of the versions before; rank 0 alone knows it.

        Raises:
            SyncError: The parts of all ranks are not the tensors of the layout.
        """
        if self._plan is not None:
            return True
        shared, is_mapped = self._try_mapping(path, layout)
        if not self._all(is_mapped):
            if not self._is_refusal_known and self._collectives.rank == 0:
                log.warning("not every rank can map the publisher's segments: shards are gathered to rank 0")
            self._is_refusal_known = True
            return False
        self._plan = self._make_plan(shared, parts)
        if self._collectives.rank == 0:
            log.info(
                "each of %d learner ranks writes its own part of a version", self._collectives.world_size
            )
        return True

    def write(self, path: str, parts: tuple[Part, ...]) -> Written | None:
        """Write this rank's parts into the segment at `path`, which holds a version once all have.

        Returns:
            None if the segment was gone on any rank: the ranks agree anew the next time.

        Raises:
            SyncError: This rank or another one has failed.
        """
        assert self._plan is not None, "the ranks have not agreed"
        times, waits = WriteTimes(), Waits()
        digests: dict[int, bytes] = {}
        error: AsyncrlError | None = None
        try:
            bytes_B = self._mappings.open(path, self._plan.layout.total_bytes)
            digests = self._renewed(parts).write(bytes_B, times)
            fault_point("together.written", self._collectives.rank)
        except AsyncrlError as caught:
            error = caught
        plan, self._plan = self._plan, None
        with waits:
            if not agree(self._collectives, error):
                return None
        self._plan = plan
        digests |= self._plan.writer.digest(bytes_B, self._plan.shared, times)
        layout = self._plan.layout
        with waits:
            merged = self._collectives.merge_bytes(merge_digests([digests], layout.num_buckets))
        return Written(tuple(buckets_of(layout, merged)), times, waits.seconds)

    def _try_mapping(self, path: str, layout: Layout | None) -> tuple[Layout, bool]:
        """Return the layout, and whether this rank sees the mark that rank 0 has left in the segment."""
        mark = secrets.token_bytes(MARK_BYTES)
        leads = self._collectives.rank == 0
        if leads:
            assert layout is not None, "rank 0 knows the layout"
            is_mapped = self._leave_mark(path, layout, mark)
            self._collectives.share_bytes(_to_bytes(layout, mark))
            return layout, is_mapped
        layout, mark = _from_bytes(self._collectives.share_bytes(None))
        bytes_B = self._map(path, layout)
        return layout, bytes_B is not None and bytes_B[: len(mark)].tobytes() == mark

    def _leave_mark(self, path: str, layout: Layout, mark: bytes) -> bool:
        bytes_B = self._map(path, layout)
        if bytes_B is not None:
            bytes_B[: len(mark)] = np.frombuffer(mark, dtype=np.uint8)  # overwritten by the version
        return bytes_B is not None

    def _map(self, path: str, layout: Layout) -> Bytes | None:
        try:
            return self._mappings.open(path, layout.total_bytes)
        except SyncError as error:
            log.info("rank %d cannot map the publisher's segment: %s", self._collectives.rank, error)
            return None

    def _make_plan(self, layout: Layout, parts: tuple[Part, ...]) -> _Plan:
        writer, error = None, None
        try:
            writer = PartWriter(layout, parts)
        except SyncError as caught:
            error = caught
        agree(self._collectives, error)
        assert writer is not None, "no rank has failed"
        (num_bytes,) = self._collectives.add([writer.num_bytes])
        wanted = sum(entry.num_bytes for entry in layout.tensors)
        if num_bytes != wanted:
            raise SyncError(f"the ranks hold {num_bytes} bytes of tensors, the version has {wanted}")
        is_whole = [int(index in writer.whole_buckets) for index in range(layout.num_buckets)]
        open_buckets = [
            i for i, has_writer in enumerate(self._collectives.largest(is_whole)) if not has_writer
        ]
        return _Plan(
            layout, parts, writer, open_buckets[self._collectives.rank :: self._collectives.world_size]
        )

    def _renewed(self, parts: tuple[Part, ...]) -> PartWriter:
        """Return a writer of `parts`: the one that there is if they are those of the version before."""
        assert self._plan is not None
        if parts is not self._plan.parts:
            writer = PartWriter(self._plan.layout, parts)
            before = self._plan.writer
            if (writer.num_bytes, writer.whole_buckets) != (before.num_bytes, before.whole_buckets):
                raise SyncError("a rank holds other parts than for the versions before")
            self._plan.parts, self._plan.writer = parts, writer
        return self._plan.writer

    def _all(self, is_true: bool) -> bool:
        return self._collectives.add([int(is_true)]) == [self._collectives.world_size]


class Waits:
    """Adds up the seconds spent in `with` blocks."""

    def __init__(self) -> None:
        self.seconds = self._began = 0.0

    def __enter__(self) -> None:
        self._began = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.seconds += time.perf_counter() - self._began


def _outcome_of(error: AsyncrlError | None) -> int:
    if error is None:
        return WRITTEN
    return GONE if isinstance(error, SegmentGone) else FAILED


def agree(collectives: Collectives, error: AsyncrlError | None) -> bool:
    """Tell whether no rank has an error; collective. With SegmentGone alone, the publish is to be deferred.

    Raises:
        AsyncrlError: A rank has another error, this one or SyncError for one elsewhere.
    """
    (outcome,) = collectives.largest([_outcome_of(error)])
    if outcome == FAILED:
        why = "another learner rank could not write its part of the version"
        raise error or SyncError(why, hint="See its log")
    return outcome == WRITTEN


def buckets_of(layout: Layout, digests: bytes) -> Iterator[Bucket]:
    """Yield the buckets of a layout, with the digests that `merge_digests` returns."""
    for index in range(layout.num_buckets):
        num_bytes = min(layout.bucket_bytes, layout.total_bytes - index * layout.bucket_bytes)
        yield Bucket(num_bytes, digests[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES].hex())


def _to_bytes(layout: Layout, mark: bytes) -> bytes:
    rows = [[entry.name, entry.dtype, entry.shape] for entry in layout.tensors]
    return json.dumps({"tensors": rows, "bucket_bytes": layout.bucket_bytes, "mark": mark.hex()}).encode()


def _from_bytes(data: bytes) -> tuple[Layout, bytes]:
    found = json.loads(data)
    specs = [TensorSpec(name, dtype, tuple(shape)) for name, dtype, shape in found["tensors"]]
    return plan(specs, found["bucket_bytes"]), bytes.fromhex(found["mark"])
