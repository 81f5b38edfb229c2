"""The learner's side: copies a version into shared memory and hands it to the publisher.

Owns the copy and the digests made while copying. Never waits for a replica; every call is bounded.
Invariant: all versions of one `Handoff` have the same names, dtypes and shapes in the same order.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
import xxhash

from asyncrl.errors import AsyncrlError, SyncError, WireError
from asyncrl.faults import fault_point
from asyncrl.keys import ClientKeys
from asyncrl.rpc import Client
from asyncrl.versions import PolicyVersion
from asyncrl.wire import field
from weight_sync.memory.manifest import Bucket, Layout, Manifest, Planner, Probe, TensorSpec, align, plan
from weight_sync.memory.segments import SHM_DIR

CALL_DEADLINE_S = 10.0
START_DEADLINE_S = 120.0
"""For the first call: the publisher may still be starting."""


class Handoff:
    """Publishes versions to the publisher on this host.

    >>> # handoff = Handoff("tcp://127.0.0.1:5555", "asyncrl-run-", 64 << 20, token=3)
    >>> # handoff.publish(PolicyVersion(1, 0), model.named_parameters())

    Args:
        address: RPC address of the publisher.
        shm_prefix: Start of the run's segment names; other paths are refused.
        bucket_bytes: Bytes per bucket, `weight_sync.bucket_bytes`.
        token: The learner's fencing token.
        specs: Names, dtypes and shapes in order. Without them the first publish learns them as it
            copies, into a file that grows; no extra pass is made.
        keys: Of the run, if the publisher's socket has any.

    Raises:
        FencedError: A newer token is in use.
        DeadlineExceeded: The publisher does not answer.
    """

    def __init__(
        self,
        address: str,
        shm_prefix: str,
        bucket_bytes: int,
        token: int,
        specs: Sequence[TensorSpec] | None = None,
        keys: ClientKeys | None = None,
    ) -> None:
        self._prefix = str(SHM_DIR / shm_prefix)
        self._bucket_bytes = bucket_bytes
        self._token = token
        self._layout: Layout | None = plan(specs, bucket_bytes) if specs is not None else None
        self._client = Client(address, keys)
        try:
            self._client.call("open", deadline_s=START_DEADLINE_S, token=token)
        except AsyncrlError:
            self._client.close()  # nobody else can: the caller gets no Handoff
            raise

    def has_room(self) -> bool:
        """Tell whether a `publish` now would find a free segment, before the tensors are gathered.

        The segment stays reserved for this learner, so the answer holds until the publish.
        """
        return bool(self._acquire())

    def publish(
        self,
        version: PolicyVersion,
        tensors: Iterable[tuple[str, torch.Tensor]],
        probe: Probe | None = None,
    ) -> bool:
        """Copy `tensors`, on any device, and make them the newest version.

        Returns:
            False if no segment was free: nothing was read from `tensors`, publish a newer version later.

        Raises:
            SyncError: The tensors are not those of the versions before, or there is no room.
            FencedError: A newer token is in use.
            DeadlineExceeded: The publisher does not answer.
        """
        path = self._acquire()
        if not path:
            return False
        layout, buckets = self._copy(path, tensors)
        fault_point("handoff.copied", version.number)
        manifest = Manifest(version, layout, buckets, probe)
        self._client.call(
            "commit", [manifest.to_bytes()], deadline_s=CALL_DEADLINE_S, token=self._token, path=path
        )
        self._layout = layout
        return True

    def close(self) -> None:
        """Hang up; the publisher keeps what was published."""
        self._client.close()

    def _acquire(self) -> str:
        num_bytes = self._layout.total_bytes if self._layout else 0
        reply = self._client.call(
            "acquire", deadline_s=CALL_DEADLINE_S, token=self._token, num_bytes=num_bytes
        )
        path: str = field(reply.args, "path", str)
        if path and not path.startswith(self._prefix):
            raise WireError(f"the publisher named {Path(path).name}, which is no segment of this run")
        return path

    def _copy(
        self, path: str, tensors: Iterable[tuple[str, torch.Tensor]]
    ) -> tuple[Layout, tuple[Bucket, ...]]:
        planner = Planner()
        with _SegmentWriter(path, self._bucket_bytes) as writer:
            for index, (name, tensor) in enumerate(tensors):
                spec = TensorSpec(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
                self._check(index, spec)
                planner.place(spec)
                writer.write(_bytes_of(tensor))
            layout = planner.finish(self._bucket_bytes)
            if self._layout is not None and len(layout.tensors) != len(self._layout.tensors):
                missing = self._layout.tensors[len(layout.tensors)].name
                raise SyncError(f"the version ends before the tensor '{missing}'")
            return layout, writer.finish()

    def _check(self, index: int, spec: TensorSpec) -> None:
        if self._layout is None:
            return
        wanted = self._layout.tensors[index].spec if index < len(self._layout.tensors) else None
        if spec != wanted:
            raise SyncError(
                f"tensor {index} is {spec}, but the versions before had {wanted}",
                hint="A run publishes the same names, dtypes and shapes in the same order",
            )


class _SegmentWriter:
    """Writes bytes one after another, aligned, and digests each bucket on the way."""

    def __init__(self, path: str, bucket_bytes: int) -> None:
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise SyncError(f"cannot open the segment {path}: {error.strerror}") from error
        self._path = path
        self._bucket_bytes = bucket_bytes
        self._end = 0
        self._digest = xxhash.xxh3_128()
        self._buckets: list[Bucket] = []

    def __enter__(self) -> _SegmentWriter:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    def write(self, data: memoryview) -> None:
        """Append `data` and zeros up to the next aligned byte."""
        self._append(data)
        padding = align(self._end) - self._end
        if padding:
            self._append(memoryview(bytes(padding)))

    def finish(self) -> tuple[Bucket, ...]:
        """Return the buckets."""
        if self._end % self._bucket_bytes:
            self._end_bucket(self._end % self._bucket_bytes)
        return tuple(self._buckets)

    def _append(self, data: memoryview) -> None:
        position = 0
        while position < len(data):
            room = self._bucket_bytes - self._end % self._bucket_bytes
            piece = data[position : position + room]
            self._pwrite(piece)
            self._digest.update(piece)
            position, self._end = position + len(piece), self._end + len(piece)
            if self._end % self._bucket_bytes == 0:
                self._end_bucket(self._bucket_bytes)

    def _pwrite(self, piece: memoryview) -> None:
        done = 0
        while done < len(piece):
            try:
                done += os.pwrite(self._fd, piece[done:], self._end + done)
            except OSError as error:
                raise SyncError(
                    f"cannot write to the segment {self._path}: {error.strerror}",
                    hint="Give the host or the container a larger /dev/shm",
                ) from error

    def _end_bucket(self, num_bytes: int) -> None:
        self._buckets.append(Bucket(num_bytes, self._digest.hexdigest()))
        self._digest = xxhash.xxh3_128()


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")
