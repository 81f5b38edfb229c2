"""The publisher's segments, one in each of its slots (`protocol.copies.slots`).

Owns their files, and the fencing token of the learner that may write them.
Invariants: names carry the fencing token and a serial number, so no two writers ever share a file; a segment
that a process of the node has mapped is left to it, and its slot takes another one.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import torch

from asyncrl.core.errors import FencedError, SegmentGone, SyncError
from asyncrl.core.staleness import UNLOADED
from weight_sync.memory import segments
from weight_sync.memory.manifest import Manifest
from weight_sync.memory.publisher_state import Legacy, PublisherStateFile
from weight_sync.protocol.copies.slots import NUM_SLOTS, Slots
from weight_sync.protocol.lanes.stripes import WHOLE, Stripe

NO_TOKEN = -1
MAX_TAKEN = 1
"""Of publishers that take one version over: who died a second time may have died of it."""
PREPARE_STEP_BYTES = 64 << 20
"""Reserved at once while requests wait: about 20 ms."""
ACQUIRE_STEP_BYTES = 2 << 30
"""Reserved at once while the learner waits: less than a second."""


@dataclass(eq=False)
class Slot:
    """One segment.

    Attributes:
        token: Of the learner that made it.
        num_bytes: Size of the file; 0 while a first version of unknown size is written.
        manifest: Of the version it holds; None while it is empty or being written.
        num_transfers: Transfers that read it.
        bytes_B: The mapped file, once committed.
        shared: Name under which processes of the node may map the version; empty while there is none.
    """

    path: str = ""
    token: int = NO_TOKEN
    num_bytes: int = 0
    is_writing: bool = False
    manifest: Manifest | None = None
    num_transfers: int = 0
    bytes_B: torch.Tensor | None = None
    shared: str = ""

    @property
    def number(self) -> int:
        return self.manifest.version.number if self.manifest else UNLOADED

    @property
    def is_mapped(self) -> bool:
        """Whether a process of the node has mapped the version."""
        return bool(self.shared) and segments.is_read(self.path, num_names=2)


class SegmentPool(Slots[Slot]):
    """See the module.

    Args:
        prefix: Start of all its segments' names.
        incarnation: Part of the names that tells this process from others.
        num_slots: At least 2. keeps_sent: As of `Slots`; takes a slot more.
        stripe: What a segment holds of a version, from its first byte on.
    """

    def __init__(
        self,
        prefix: str,
        incarnation: str,
        num_slots: int = NUM_SLOTS,
        keeps_sent: bool = False,
        stripe: Stripe = WHOLE,
    ) -> None:
        super().__init__([Slot() for _ in range(num_slots)], keeps_sent=keeps_sent)
        self._prefix, self._incarnation, self.stripe = prefix, incarnation, stripe
        self._serial = self._num_taken = 0
        self.token = NO_TOKEN
        self._state_file = PublisherStateFile(prefix)
        self._take_over()

    def _take_over(self) -> None:
        """Go on where a publisher that was killed has stopped; remove what else it has left."""
        state_file = self._state_file.read()
        kept = {str(self._state_file.path)}
        if state_file is not None:
            self.token = state_file.token
        if (
            state_file is not None
            and state_file.manifest is not None
            and state_file.path.startswith(self._base)
            and state_file.num_taken < MAX_TAKEN
        ):
            with contextlib.suppress(SyncError):  # gone: then nothing is current
                num_bytes = state_file.manifest.layout.segment_bytes(self.stripe)
                bytes_B = torch.frombuffer(segments.attach(state_file.path, num_bytes), dtype=torch.uint8)
                slot = Slot(
                    state_file.path, NO_TOKEN, num_bytes, manifest=state_file.manifest, bytes_B=bytes_B
                )
                self._slots[0] = self.current = slot
                self._num_taken = state_file.num_taken + 1
                kept.add(state_file.path)
        for path in segments.find_names(self._prefix):
            serial = path.rpartition("-")[2]
            if serial.isdigit():  # names are never used twice, even if the process's number is
                self._serial = max(self._serial, int(serial))
            if path not in kept:
                segments.unlink(path)
        if self.current is not None:
            self._share(self.current)
            self._leave()

    @property
    def _base(self) -> str:
        return str(segments.SHM_DIR / self._prefix)

    def _leave(self) -> None:
        current = self.current
        path, manifest = (current.path, current.manifest) if current else ("", None)
        self._state_file.write(Legacy(self.token, path, manifest, self._num_taken))

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
            self._leave()
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
        slot = self.next_to_write()
        if slot is None:
            return None
        self._withdraw(slot)
        slot.manifest = None
        self._fit(slot, num_bytes, ACQUIRE_STEP_BYTES)
        if slot.num_bytes != num_bytes:
            return None  # a large one is reserved in steps: `prepare` goes on, the learner comes again
        slot.is_writing = True
        return slot.path

    def prepare(self) -> bool:
        """Reserve some of the memory that the next versions will need; called while nobody waits.

        Returns:
            Whether it did, so that there may be more to do.
        """
        if self.current is None or self.current.token != self.token:
            return False
        num_bytes = self.current.num_bytes
        for slot in self._unused():
            if not slot.is_writing and (slot.num_bytes != num_bytes or slot.token != self.token):
                slot.manifest = None
                self._fit(slot, num_bytes, PREPARE_STEP_BYTES)
                return True
        return False

    def commit(self, token: int, path: str, manifest: Manifest) -> None:
        """Make what was written to `path` the current version.

        Raises:
            FencedError: The token is old.
            SegmentGone: The segment is not the one acquired, as after the publisher was started anew.
            SyncError: It has another size than the manifest, or the number does not rise.
        """
        self.open(token)
        slot = next((slot for slot in self._slots if slot.path == path), None)
        if slot is not None and slot is self.current and slot.manifest == manifest:
            return  # the same commit again
        if slot is None or not slot.is_writing:
            raise SegmentGone(f"the segment {path} was not acquired for writing")
        newest = self.current.number if self.current else UNLOADED
        if manifest.version.number <= newest:
            raise SyncError(f"version {manifest.version.number} does not rise over {newest}")
        num_bytes = manifest.layout.segment_bytes(self.stripe)
        if slot.bytes_B is None:
            slot.bytes_B = torch.frombuffer(segments.attach(path, num_bytes), dtype=torch.uint8)
        elif slot.num_bytes != num_bytes:
            raise SyncError(f"the segment {path} has {slot.num_bytes} bytes, wanted {num_bytes}")
        slot.num_bytes, slot.manifest, slot.is_writing = num_bytes, manifest, False
        self._share(slot)
        self.current, self._num_taken = slot, 0
        self._leave()

    def close(self) -> None:
        """Unlink everything."""
        segments.unlink(str(self._state_file.path))
        for slot in self._slots:
            self._remove(slot)

    def _share(self, slot: Slot) -> None:
        """Let processes of the node map the slot's version, if it is whole."""
        slot.shared = segments.share(slot.path, slot.number) if self.stripe.is_whole else ""

    def _free_slot(self) -> Slot | None:
        # One that nobody maps, or its memory would have to be reserved anew; the oldest, as for all slots.
        return min(self._unused(), key=lambda slot: (slot.is_mapped, slot.number), default=None)

    def _state_of(self, slot: Slot) -> str:
        found = super()._state_of(slot)
        return "mapped" if found == "free" and slot.is_mapped else found

    def _withdraw(self, slot: Slot) -> None:
        """Share the slot's version no more; a segment that somebody reads is left to the reader."""
        if not slot.shared:
            return
        segments.unlink(slot.shared)
        slot.shared = ""
        if segments.is_read(slot.path):
            slot.token = NO_TOKEN  # it gets another segment

    def _fit(self, slot: Slot, num_bytes: int, step_bytes: int) -> None:
        """Give the slot a segment of the current token that is up to `step_bytes` nearer to `num_bytes`."""
        is_ours = slot.token == self.token and slot.num_bytes > 0
        if is_ours and slot.num_bytes == num_bytes:
            return
        if not is_ours or slot.bytes_B is not None or slot.num_bytes > num_bytes:
            self._renew(slot)
        if slot.num_bytes < num_bytes:
            more = min(step_bytes, num_bytes - slot.num_bytes)
            segments.reserve(slot.path, slot.num_bytes, more)
            slot.num_bytes += more

    def _remove(self, slot: Slot) -> None:
        for path in filter(None, (slot.shared, slot.path)):
            segments.unlink(path)
        slot.shared = ""

    def _renew(self, slot: Slot) -> None:
        self._remove(slot)
        self._serial += 1
        slot.path, slot.bytes_B, slot.num_bytes = "", None, 0
        slot.path = segments.create(f"{self._prefix}t{self.token}-{self._incarnation}-{self._serial}", 0)
        slot.token = self.token
