"""Tagged broadcasts: a receiver takes bytes only from who holds the secret of the run's start.

gloo's connections are plain: who stands between two members could change bytes, and make others of the
digest that the manifest has. So a tag goes with each bucket: an AES-GMAC of its bytes and of its place in the
order of broadcasts, under a key of the membership. A tag hides nothing, and each member could make it.
Invariant: a bucket whose tag is wrong breaks the transport, as a connection that was cut does.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from asyncrl.core.errors import SyncError
from asyncrl.core.files.private import derive_name
from weight_sync.backends.contract import Broadcast, Group, Transport

NONCE_BYTES, PLACE_BYTES, MAC_BYTES = 12, 8, 16
TAG_BYTES = NONCE_BYTES + PLACE_BYTES + MAC_BYTES


class Tags:
    """The tags of one membership. Nonces are random: 2^32 broadcasts of a membership are safe."""

    def __init__(self, secret: str, membership: int) -> None:
        self._cipher = AESGCM(bytes.fromhex(derive_name(secret, f"tags/{membership}")))

    def make(self, place: int, bucket: torch.Tensor) -> torch.Tensor:
        """Return the tag of the bucket that is broadcast as number `place`."""
        nonce = os.urandom(NONCE_BYTES)
        sealed = self._cipher.encrypt(nonce, place.to_bytes(PLACE_BYTES, "big"), bucket.numpy().data)
        return torch.frombuffer(bytearray(nonce + sealed), dtype=torch.uint8)

    def check(self, place: int, bucket: torch.Tensor, tag: torch.Tensor) -> None:
        """Raise SyncError if `tag` is not one of this bucket in this place."""
        nonce, sealed = tag[:NONCE_BYTES].numpy().tobytes(), tag[NONCE_BYTES:].numpy().tobytes()
        try:
            found = self._cipher.decrypt(nonce, sealed, bucket.numpy().data)
        except InvalidTag:
            found = b""
        if found != place.to_bytes(PLACE_BYTES, "big"):
            raise SyncError(
                f"broadcast {place} brought what the publisher has not sent",
                hint="Somebody may change bytes on their way: use a private interface as launcher.host",
            )


class TaggedTransport:
    """A `contract.Transport` over another one, whose members all tag; who has another `secret` is refused."""

    def __init__(self, transport: Transport, secret: str) -> None:
        self._transport = transport
        self._secret = secret
        self._makes: Tags | None = None  # of the sender
        self._checks: Tags | None = None  # of the others
        self._num_started = 0

    def form(self, group: Group, until: float) -> None:
        tags = Tags(self._secret, group.membership)
        self._makes, self._checks = (tags, None) if group.rank == 0 else (None, tags)
        self._transport.form(group, until)

    def broadcast(self, bucket: torch.Tensor, until: float, name: str = "") -> None:
        self.start(bucket, until, name).wait()

    def start(self, bucket: torch.Tensor, until: float, name: str = "") -> _Broadcast:
        place, self._num_started = self._num_started, self._num_started + 1
        tag = self._makes.make(place, bucket) if self._makes else torch.empty(TAG_BYTES, dtype=torch.uint8)
        tag_way = self._transport.start(tag, until)  # first: if it fails, nothing writes into the bucket
        bucket_way = self._transport.start(bucket, until)
        check = partial(self._checks.check, place, bucket, tag) if self._checks else None
        return _Broadcast(bucket_way, tag_way, check)

    def abort(self) -> None:
        self._transport.abort()

    def close(self) -> None:
        self._transport.close()


@dataclass(frozen=True)
class _Broadcast:
    """The bucket is waited for first: nothing writes into one that was given up."""

    bucket_way: Broadcast
    tag_way: Broadcast
    check: Callable[[], None] | None

    def wait(self) -> None:
        self.bucket_way.wait()
        self.tag_way.wait()
        if self.check is not None:
            self.check()
