"""Weights through a folder: the publisher stores each content once, and each member reads it by itself.

Owns the form of an object and its life. Objects are encrypted and signed with the secret of the start
(AES-GCM), under names that tell nothing without it: who can read the folder learns sizes, and nothing that he
writes is taken for weights. What he can do is remove or damage objects: then a transfer fails, with words.
Invariant: an object stays while a round may read it, or its version is the newest of all that were stored.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from asyncrl.core.errors import DeadlineExceeded, SyncError
from asyncrl.core.files.private import derive_name
from asyncrl.core.runtime.interface import Runtime
from weight_sync.backends.contract import Broadcast, DigestMismatch, Group
from weight_sync.backends.store import Call, Store, StoreError

log = logging.getLogger(__name__)

NONCE_BYTES, MAC_BYTES = 12, 16
PATIENCE_S, SLOWEST_BYTES_PER_S = 15.0, 5e6
"""One answer of the store is waited for so long, and for its bytes at this rate."""
END_S = 5.0


class Seal:
    """Encryption and names of the objects of one start of a run."""

    def __init__(self, secret: str) -> None:
        self._secret = derive_name(secret, "folder")
        self._cipher = AESGCM(bytes.fromhex(self._secret))

    def name(self, content: str) -> str:
        """Return the name of the object with this content, in its place."""
        return derive_name(self._secret, content)

    def close(self, name: str, bucket: torch.Tensor) -> bytes:
        """Return the object: a nonce, and the bucket encrypted for this name alone."""
        nonce = os.urandom(NONCE_BYTES)
        return nonce + self._cipher.encrypt(nonce, bucket.numpy().data, name.encode())

    def open(self, name: str, sealed: bytes, bucket: torch.Tensor) -> None:
        """Fill `bucket`.

        Raises:
            DigestMismatch: The object is none of this name that the publisher made, or not whole.
        """
        try:
            plain = self._cipher.decrypt(sealed[:NONCE_BYTES], sealed[NONCE_BYTES:], name.encode())
        except (InvalidTag, ValueError) as error:
            raise DigestMismatch(f"the object {name} is not what the publisher stored") from error
        if len(plain) != len(bucket):
            raise DigestMismatch(f"the object {name} has {len(plain)} bytes, wanted {len(bucket)}")
        if len(plain):
            bucket.copy_(torch.frombuffer(bytearray(plain), dtype=torch.uint8))


class Shelf:
    """The publisher's objects: a place for each version, which goes when nobody needs it.

    Args:
        folder: Of the run, in the store: the same for each publisher of it, and for no other run. What a
            publisher before this one has left there is removed.

    Attributes:
        place: Of this publisher; below it, each version has a place by its number.
    """

    def __init__(self, runtime: Runtime, store: Store, secret: str, folder: str) -> None:
        self._clock, self._store, self._seal = runtime, store, Seal(secret)
        self.place = f"{folder}/{runtime.new_id()[:16]}"
        self._folder, self._claim = folder, store.claim(folder)
        self._lock = runtime.lock()
        self._objects: dict[str, Call] = {}
        self._held: dict[int, int] = {}
        self._stored: set[int] = set()

    def hold(self, round_id: int, number: int, *, is_afresh: bool) -> None:
        """Keep a version that a round reads, until `release`."""
        with self._lock:
            self._held[round_id] = number
            self._stored.add(number)
            if is_afresh:
                self._forget(number)
        self._clean_up()

    def release(self, round_id: int) -> None:
        """The round is over."""
        if self._held.pop(round_id, None) is not None:
            self._clean_up()

    def release_all(self) -> None:
        """Every round is over: the coordinator is another one."""
        for round_id in list(self._held):
            self.release(round_id)

    def put(self, place: str, content: str, bucket: torch.Tensor) -> Call:
        """Store a content, unless that was done or is being done.

        Raises:
            SyncError: No round reads its version any more.
        """
        name, number = f"{place}/{self._seal.name(content)}", int(place.rpartition("/")[2])
        if (known := self._find(name)) is not None:
            return known
        sealed = self._seal.close(name, bucket)  # without the lock: the service's thread would wait
        with self._lock:
            if number not in self._stored and number < max(self._stored, default=0):
                raise SyncError(f"version {number} is needed no more")
            call = self._objects[name] = self._store.put(name, sealed)
            return call

    def _find(self, name: str) -> Call | None:
        with self._lock:
            call = self._objects.get(name)
            return call if call is not None and not call.has_failed else None

    def claim(self) -> Call:
        """Return the call that makes the run's folder, another one if the last has failed."""
        with self._lock:
            if self._claim.has_failed:
                self._claim = self._store.claim(self._folder)
            return self._claim

    def close(self) -> None:
        """Remove all that was stored, if the store answers in time."""
        try:
            self._store.clear(self.place).wait(self._clock.now() + END_S, END_S)
        except (SyncError, DeadlineExceeded) as error:
            log.warning("objects may be left in the folder: %s", error)

    def _clean_up(self) -> None:
        """Remove each version that no round reads, but for the newest: others may join."""
        with self._lock:
            gone = self._stored - set(self._held.values()) - {max(self._stored)}
            self._stored -= gone
            for number in gone:
                self._forget(number)
        for number in gone:
            try:
                self._store.clear(f"{self.place}/{number}")
            except StoreError as error:
                log.warning("objects of version %d may be left in the folder: %s", number, error)

    def _forget(self, number: int) -> None:
        start = f"{self.place}/{number}/"
        self._objects = {name: call for name, call in self._objects.items() if not name.startswith(start)}


class FolderTransport:
    """The folder's side of `contract.Transport`; an order to read comes when all is stored.

    Args:
        shelf: The publisher's; members have none.
    """

    def __init__(self, runtime: Runtime, store: Store, secret: str, shelf: Shelf | None = None) -> None:
        self._clock, self._store, self._shelf = runtime, store, shelf
        self._seal = Seal(secret)
        self._place = ""
        self._has_ended = runtime.event()

    def form(self, group: Group, until: float) -> None:
        self._check_time(until)
        assert (group.rank == 0) == (self._shelf is not None), "the publisher stores, the others read"
        if self._shelf is not None:
            self._wait(self._shelf.claim(), 0, until)
        self._place = group.folder

    def broadcast(self, bucket: torch.Tensor, until: float, name: str = "") -> None:
        self.start(bucket, until, name).wait()

    def start(self, bucket: torch.Tensor, until: float, name: str = "") -> Broadcast:
        if not self._place or self._has_ended.is_set():
            raise SyncError("the folder is not usable: its place is not known, or it was given up")
        self._check_time(until)
        assert name, "what is stored has a name"
        if self._shelf is not None:
            call = self._shelf.put(self._place, name, bucket)
            return _Waiting(partial(self._wait, call, len(bucket), until))
        path = f"{self._place}/{self._seal.name(name)}"
        call = self._store.get(path, len(bucket) + NONCE_BYTES + MAC_BYTES + 1)  # a stranger's is of any size
        return _Waiting(partial(self._read, call, path, bucket, until))

    def abort(self) -> None:
        self._has_ended.set()

    def close(self) -> None:
        self._has_ended.set()

    def _read(self, call: Call, path: str, bucket: torch.Tensor, until: float) -> None:
        sealed = self._wait(call, len(bucket), until)
        if sealed is None:
            raise StoreError(f"{self._store.url}: the object {path} is gone")
        self._seal.open(path, sealed, bucket)

    def _wait(self, call: Call, num_bytes: int, until: float) -> bytes | None:
        left_s = until - self._clock.now()
        patience_s = min(PATIENCE_S + num_bytes / SLOWEST_BYTES_PER_S, left_s / 2)
        return call.wait(until, patience_s, self._has_ended)

    def _check_time(self, until: float) -> None:
        if until <= self._clock.now():
            raise DeadlineExceeded("no time is left for the folder")


@dataclass(frozen=True)
class _Waiting:
    """The folder's side of `contract.Broadcast`."""

    end: Callable[[], object]

    def wait(self) -> None:
        self.end()


@dataclass(frozen=True)
class Folder:
    """The folder of a run as one service has it."""

    runtime: Runtime
    store: Store
    secret: str
    shelf: Shelf | None = None

    def make_transport(self) -> FolderTransport:
        """Return the transport of a round."""
        return FolderTransport(self.runtime, self.store, self.secret, self.shelf)
