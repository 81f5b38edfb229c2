"""Delta codec: sends each bucket in the shorter of two forms, after a head that names the form.

Owns what goes over a transport in a round with a base, on both sides. Never decides whether a bucket is
right: its digest does, after the difference has been applied. A receiver whose base or whose bytes are not
what they should be stays in step with the others and fails at the digest.
Invariant: a head is of fixed size, and nothing in it makes a receiver take more than the bucket's bytes.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from asyncrl.core.errors import SyncError, WireError
from weight_sync.backends.contract import Broadcast, Transport
from weight_sync.encoding.choice import choose
from weight_sync.encoding.sparse import Code, Sparse, decode

HEAD = struct.Struct("<BBxxxxxxQQ")
"""Code (0: the bucket as it is), bytes per element, changed elements, bytes that follow."""
WHOLE = 0

CarryBucket = Callable[[Transport, int, torch.Tensor, float], Broadcast]
"""Starts to send or to fill one bucket: over this transport, of this index, until then."""


class _Done:
    """Nothing is left to be waited for."""

    def wait(self) -> None:
        return


def carry_whole(
    transport: Transport, index: int, bucket: torch.Tensor, until: float, digests: Sequence[str] = ()
) -> Broadcast:
    """Carry the bucket as it is, under its digest's name."""
    return transport.start(bucket, until, digests[index] if digests else "")


@dataclass(frozen=True)
class DeltaNames:
    """Names of contents in a round with a base: both sides know them.

    Attributes:
        digests: Of the buckets. base: The base's version number.
    """

    digests: Sequence[str]
    base: int

    def whole(self, index: int) -> str:
        """Return the name of a bucket as it is."""
        return self.digests[index]

    def part(self, index: int, what: str) -> str:
        """Return the name of the head or the body of a difference."""
        return f"{self.digests[index]}/{self.base}.{what}"


class DeltaSender:
    """Sends each bucket as its bytes or as the difference to the base's.

    Args:
        base: The base's buckets; None if it is gone, and every bucket goes as it is.
        widths: Bytes per element, bucket by bucket.
        names: Of what is sent.

    Attributes:
        num_bytes: Sent so far, heads included.
    """

    def __init__(self, base: Sequence[torch.Tensor] | None, widths: Sequence[int], names: DeltaNames) -> None:
        self._base = base
        self._widths = widths
        self._names = names
        self.num_bytes = 0
        self.num_deltas = 0

    def carry(self, transport: Transport, index: int, bucket: torch.Tensor, until: float) -> Broadcast:
        """See `CarryBucket`."""
        old = self._base[index].numpy() if self._base is not None else None
        sparse = choose(old, bucket.numpy(), self._widths[index])
        body = bucket if sparse is None else torch.from_numpy(sparse.data)
        if sparse is None:
            head = HEAD.pack(WHOLE, 1, 0, len(body))
        else:
            head = HEAD.pack(sparse.code, sparse.width, sparse.num_changed, len(body))
            self.num_deltas += 1
        names = self._names
        head_B = torch.frombuffer(bytearray(head), dtype=torch.uint8)
        transport.broadcast(head_B, until, names.part(index, "head"))
        self.num_bytes += len(head) + len(body)
        name = names.whole(index) if sparse is None else names.part(index, "body")
        return transport.start(body, until, name) if len(body) else _Done()


class DeltaReceiver:
    """Fills each bucket with the bytes that come, or with the base's and the difference that comes.

    Args:
        base: The base's buckets; None if this receiver does not hold it.
        names: Of what comes.
    """

    def __init__(self, base: Sequence[torch.Tensor] | None, names: DeltaNames) -> None:
        self._base = base
        self._names = names

    def carry(self, transport: Transport, index: int, bucket: torch.Tensor, until: float) -> Broadcast:
        """See `CarryBucket`; raises SyncError if the others can no longer be followed."""
        head = torch.empty(HEAD.size, dtype=torch.uint8)
        transport.broadcast(head, until, self._names.part(index, "head"))
        code, width, num_changed, num_bytes = HEAD.unpack(head.numpy().tobytes())
        if code == WHOLE and num_bytes == len(bucket):
            return transport.start(bucket, until, self._names.whole(index))
        if code not in tuple(Code) or num_bytes > len(bucket):
            raise SyncError(f"bucket {index} has a head of code {code} and {num_bytes} bytes")
        body = torch.empty(num_bytes, dtype=torch.uint8)
        if num_bytes:
            transport.broadcast(body, until, self._names.part(index, "body"))
        self._apply(index, bucket, Sparse(Code(code), width, num_changed, body.numpy()))
        return _Done()

    def _apply(self, index: int, bucket: torch.Tensor, sparse: Sparse) -> None:
        if self._base is None:
            return  # what the bucket holds is of an older version, and its digest will say so
        bucket.copy_(self._base[index])
        with contextlib.suppress(WireError):  # the bucket holds the base's bytes, and its digest will say so
            decode(bucket.numpy(), sparse)
