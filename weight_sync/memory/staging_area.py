"""A receiver's copies: one verified, one committed, one taken by the engine, and the room for more.

Owns the staging segments and their reuse; `protocol.copies.slots` decides which copy stands where. A copy is
one of its own, which other receivers of the node may map, or one of theirs or of the publisher that it has
mapped.
Invariants: a segment goes back to the free ones only when nobody writes to it and the engine does not read
it; none is written to that a process of the node has mapped.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from asyncrl.core.errors import SyncError
from asyncrl.core.staleness import UNLOADED
from weight_sync.memory import segments
from weight_sync.memory.manifest import Layout, Manifest
from weight_sync.protocol.copies.slots import Copies

MAX_FREE = 2
RESERVE_STEP_BYTES = 64 << 20
"""Reserved at once, in about 30 ms, in which the receiver answers nobody."""


@dataclass(frozen=True, eq=False)
class Copy:
    """One version in one segment; `is_mapped`: of another process, while this copy is referred to.

    Without a path the engine's workers hold the version themselves.
    """

    manifest: Manifest
    path: str
    bytes_B: torch.Tensor
    is_mapped: bool = False

    @property
    def number(self) -> int:
        return self.manifest.version.number

    @property
    def is_direct(self) -> bool:
        """Whether the engine's workers hold it."""
        return not self.path


class StagingArea:
    """See the module. `prefix` starts the names of all its segments; leftovers of it are removed.

    Args:
        incarnation: Part of the names that no other staging of this prefix has, before or after.
        keeps_base: The newest verified copy stays, loaded or not, for differences to it: one segment more.

    Attributes:
        direct_base: Version number whose bytes the engine's workers keep for differences; 0 for none.
    """

    def __init__(self, prefix: str, incarnation: str, keeps_base: bool = False) -> None:
        self._prefix, self._incarnation, self._serial = prefix, incarnation, 0
        self._free: list[tuple[str, torch.Tensor]] = []
        self._copies: Copies[Copy] = Copies(self.give_back)
        self._keeps_base = keeps_base
        self._base: Copy | None = None
        self.direct_base = UNLOADED
        self._disowned: set[str] = set()
        self._num_reserved: dict[str, int] = {}
        self._shared: dict[str, tuple[int, str]] = {}
        segments.unlink_all(prefix)

    @property
    def newest_verified(self) -> int:
        """Newest version number that is here, verified and not taken."""
        return self._copies.newest_verified

    @property
    def committed_number(self) -> int:
        """The version number that the engine may take next; 0 for none."""
        return self._copies.committed_number

    @property
    def taken_number(self) -> int:
        """The version number that the engine is loading; 0 for none."""
        return self._copies.taken_number

    @property
    def base_number(self) -> int:
        """The version number that differences can be applied to; 0 for none."""
        return self._base.number if self._base else UNLOADED

    @property
    def shared(self) -> tuple[int, str]:
        """The newest version that others of the node may map, and its segment's name for that; 0 for none."""
        return max(self._shared.values(), default=(UNLOADED, ""))

    def find_base(self, number: int, layout: Layout) -> Copy | None:
        """Return the copy of version `number` if it is here and laid out like that."""
        base = self._base
        is_it = base is not None and base.number == number and base.manifest.layout == layout
        return base if is_it else None

    def make_room(self, manifest: Manifest) -> Copy:
        """Return an empty copy for `manifest`, whose memory is to be reserved before it is written to.

        Raises:
            SyncError: There can be no such segment.
        """
        for free in [one for one in self._free if one[1].numel() == manifest.total_bytes]:
            self._free.remove(free)
            if self._withdraw(free[0]):
                return Copy(manifest, *free)
        path = segments.create(self._new_name(), manifest.total_bytes, is_reserved=False)
        self._num_reserved[path] = 0
        mapping = segments.attach(path, manifest.total_bytes)
        return Copy(manifest, path, torch.frombuffer(mapping, dtype=torch.uint8))

    def map_shared(self, manifest: Manifest, shared: str) -> Copy:
        """Return the copy that another process of the node shares as `shared`, to be verified where it is.

        Raises:
            SegmentGone: It is shared no more.
            SyncError: It cannot be mapped, or is no segment of this run.
        """
        if os.path.dirname(shared) != os.path.dirname(segments.SHM_DIR / self._prefix):
            raise SyncError(f"{os.path.basename(shared)} is not a segment of this run")
        path = str(segments.SHM_DIR / self._new_name())
        mapping = segments.map_shared(shared, path, manifest.total_bytes)
        return Copy(manifest, path, torch.frombuffer(mapping, dtype=torch.uint8), is_mapped=True)

    def _new_name(self) -> str:
        self._serial += 1
        # No name twice, whoever has it: an engine that was told of a copy may come for it much later.
        return f"{self._prefix}{self._incarnation}-{self._serial}"

    def _withdraw(self, path: str) -> bool:
        """Share a free segment no more; return whether it may be written to. One that is read is removed."""
        _, shared = self._shared.pop(path, (UNLOADED, ""))
        if shared:
            segments.unlink(shared)
        if segments.is_read(path):
            segments.unlink(path)
            return False
        return True

    def _remove(self, path: str) -> None:
        _, shared = self._shared.pop(path, (UNLOADED, ""))
        for name in filter(None, (shared, path)):
            segments.unlink(name)

    def reserve(self, copy: Copy) -> bool:
        """Reserve the next piece of a copy's memory; return whether it has all.

        Raises:
            SyncError: There is no room for it.
        """
        num_reserved, total = self._num_reserved.get(copy.path), copy.manifest.total_bytes
        if num_reserved is None:
            return True
        more = min(RESERVE_STEP_BYTES, total - num_reserved)
        segments.reserve(copy.path, num_reserved, more)
        self._num_reserved[copy.path] = num_reserved + more
        if num_reserved + more < total:
            return False
        del self._num_reserved[copy.path]
        return True

    def give_back(self, copy: Copy | None) -> None:
        """Nobody writes or reads the copy any more."""
        if copy is None or copy is self._base or copy.is_direct:
            return
        if copy.is_mapped or copy.path in self._disowned or copy.path in self._num_reserved:
            self._disowned.discard(copy.path)
            self._num_reserved.pop(copy.path, None)
            self._remove(copy.path)
            return
        self._free.append((copy.path, copy.bytes_B))
        while len(self._free) > MAX_FREE:
            self._remove(self._free.pop(0)[0])

    def put_verified(self, copy: Copy) -> None:
        """Keep a verified copy until its commit.

        A mapped copy is no base of differences, which would keep another process's segment for long; with it
        the area's own free segments are removed.
        """
        if self._keeps_base:
            base, self._base = self._base, None if copy.is_mapped or copy.is_direct else copy
            self.direct_base = copy.number if copy.is_direct else UNLOADED
            if not self._copies.has(base):
                self.give_back(base)
        if copy.is_mapped:
            while self._free:
                self._remove(self._free.pop()[0])
        elif not copy.is_direct and (shared := segments.share(copy.path, copy.number)):
            self._shared[copy.path] = copy.number, shared
        self._copies.put_verified(copy)

    def commit(self, number: int) -> None:
        """Let the engine have version `number`, or the newer one that has replaced it."""
        self._copies.commit(number)

    def commit_verified(self) -> bool:
        """Let the engine have the verified copy, if there is one."""
        return self._copies.commit_verified()

    def withdraw(self) -> None:
        """Take back what was committed and not taken; it waits for another commit."""
        self._copies.withdraw()

    def take(self, serving: int) -> Copy | None:
        """Return the copy that an engine serving `serving` should load; the same one if asked again."""
        return self._copies.take(serving)

    def drop_direct(self) -> list[int]:
        """The engine's workers have lost what they held; return the numbers of those versions."""
        self.direct_base = UNLOADED
        return [copy.number for copy in self._copies.drop(lambda copy: copy.is_direct)]

    def release_copies(self) -> None:
        """The engine that had taken a copy is gone; another one may have it."""
        self._copies.release_copies()

    def quarantine(self) -> None:
        """Another process asks for copies: one that is thought dead may still read what it has taken.

        That segment is given to whoever may load it, and never written to again.
        """
        if (taken := self._copies.taken) is not None and not taken.is_direct:
            self._disowned.add(taken.path)

    def finish_load(self, number: int, is_ok: bool) -> None:
        """The engine has loaded version `number`, or failed and must load again."""
        self._copies.finish_load(number, is_ok)

    def close(self) -> None:
        """Unlink everything; mappings of an engine stay valid."""
        segments.unlink_all(self._prefix)
