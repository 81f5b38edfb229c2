"""The publisher's segments: which may be written, which must stay.

Owns a fixed number of slots. A slot that is current (late joiners need it), in transfer, or being
written is never given away; with no other left, the learner's publish is deferred.
Invariant: names carry the fencing token and a serial number, so no two writers ever share a file.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from asyncrl.errors import FencedError, SyncError
from asyncrl.versions import UNLOADED
from weight_sync.memory import segments
from weight_sync.memory.manifest import Manifest

NO_TOKEN = -1


@dataclass
class Slot:
    """One segment.

    Attributes:
        token: Of the learner that made it.
        num_bytes: Size of the file; 0 while a first version of unknown size is written.
        manifest: Of the version it holds; None while it is empty or being written.
        num_transfers: Transfers that read it.
        bytes_B: The mapped file, once committed.
    """

    path: str = ""
    token: int = NO_TOKEN
    num_bytes: int = 0
    is_writing: bool = False
    manifest: Manifest | None = None
    num_transfers: int = 0
    bytes_B: torch.Tensor | None = None

    @property
    def number(self) -> int:
        return self.manifest.version.number if self.manifest else UNLOADED


class SegmentPool:
    """See the module.

    Args:
        prefix: Start of all its segments' names.
        num_slots: At least 2; with 3 a publish is deferred only if two old transfers hang.
    """

    def __init__(self, prefix: str, num_slots: int = 3) -> None:
        assert num_slots >= 2, "one slot is always current"
        self._prefix = prefix
        self._slots = [Slot() for _ in range(num_slots)]
        self._serial = 0
        self.token = NO_TOKEN
        self.current: Slot | None = None

    def open(self, token: int) -> None:
        """Let the learner with `token` write; an older one is refused from now on.

        Raises:
            FencedError: A newer token was seen.
        """
        if token < self.token:
            raise FencedError(
                f"the fencing token {token} is older than {self.token}",
                hint="Another learner has taken over; this one must stop",
            )
        if token > self.token:
            self.token = token
            for slot in self._slots:
                slot.is_writing = False  # its writer is fenced: whatever it wrote is not committed

    def acquire(self, token: int, num_bytes: int) -> str | None:
        """Return the path of a segment to write, or None if all are in use.

        Args:
            num_bytes: Its size, or 0 if the writer will set it.

        Raises:
            FencedError: The token is old.
            SyncError: There is no room in shared memory.
        """
        self.open(token)
        slot = next((slot for slot in self._slots if slot.is_writing), None) or self._free_slot()
        if slot is None:
            return None
        slot.manifest = None
        if slot.num_bytes != num_bytes or slot.token != token or num_bytes == 0:
            self._renew(slot, token, num_bytes)
        slot.is_writing = True
        return slot.path

    def commit(self, token: int, path: str, manifest: Manifest) -> None:
        """Make what was written to `path` the current version.

        Raises:
            FencedError: The token is old.
            SyncError: The segment is not the one acquired, has another size than the manifest, or the
                number does not rise.
        """
        self.open(token)
        slot = next((slot for slot in self._slots if slot.path == path), None)
        if slot is not None and slot is self.current and slot.manifest == manifest:
            return  # the same commit again
        if slot is None or not slot.is_writing:
            raise SyncError(f"the segment {path} was not acquired for writing")
        newest = self.current.number if self.current else UNLOADED
        if manifest.version.number <= newest:
            raise SyncError(f"version {manifest.version.number} does not rise over {newest}")
        if slot.bytes_B is None:
            slot.bytes_B = torch.frombuffer(segments.attach(path, manifest.total_bytes), dtype=torch.uint8)
        elif slot.num_bytes != manifest.total_bytes:
            raise SyncError(f"the segment {path} has {slot.num_bytes} bytes, wanted {manifest.total_bytes}")
        slot.num_bytes, slot.manifest, slot.is_writing = manifest.total_bytes, manifest, False
        self.current = slot

    def hold(self, number: int) -> Slot | None:
        """Return the slot of version `number` and keep it as it is until `release`."""
        for slot in self._slots:
            if slot.number == number and number != UNLOADED:
                slot.num_transfers += 1
                return slot
        return None

    def release(self, slot: Slot) -> None:
        """One transfer of the slot has ended."""
        assert slot.num_transfers > 0, "released more often than held"
        slot.num_transfers -= 1

    def close(self) -> None:
        """Unlink everything."""
        for slot in self._slots:
            if slot.path:
                segments.unlink(slot.path)

    def describe(self) -> list[str]:
        """Return one word per slot, for the status."""
        return [self._state_of(slot) for slot in self._slots]

    def _state_of(self, slot: Slot) -> str:
        if slot.num_transfers:
            return "in transfer"
        if slot is self.current:
            return "current"
        return "writing" if slot.is_writing else "free"

    def _free_slot(self) -> Slot | None:
        # The oldest: one that was just replaced may still be asked for.
        free = [slot for slot in self._slots if slot is not self.current and not slot.num_transfers]
        return min(free, key=lambda slot: slot.number, default=None)

    def _renew(self, slot: Slot, token: int, num_bytes: int) -> None:
        if slot.path:
            segments.unlink(slot.path)
        self._serial += 1
        slot.path, slot.bytes_B, slot.num_bytes = "", None, 0
        name = f"{self._prefix}t{token}-{os.getpid()}-{self._serial}"
        slot.path = segments.create(name, num_bytes)
        slot.token, slot.num_bytes = token, num_bytes
