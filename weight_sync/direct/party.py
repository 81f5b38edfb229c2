"""Owners of bytes in direct transfers: a learner rank's snapshots, or an engine worker's stages.

`Party` is all that the carrier of transfers knows of them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

import torch

from asyncrl.core.errors import SyncError
from asyncrl.core.staleness import UNLOADED
from weight_sync.direct.transports.choice import HOST
from weight_sync.rectangles.packs import Pack
from weight_sync.rectangles.parcels import Region

UNDER_WAY = 4
"""Packs of one member that travel at once, in either direction."""


class Superseded(SyncError):
    """A source no longer has the version that it was to send, or never had it."""


class PackStore(Protocol):
    """Bytes of one version's packs, in the order that `Party.open` was given."""

    def pack(self, index: int) -> torch.Tensor:
        """Return the bytes of a pack: uint8, on the device that `Party.open` was given.

        Called once for each. A source fills them in order, and they hold until `pack(index + UNDER_WAY)`; a
        sink's are filled later and hold until `close`.
        """

    def base(self, index: int) -> torch.Tensor | None:
        """Return the bytes that a pack has in the base's version, None if that is not here.

        A sink puts them into the pack's own place. A source's lie where its snapshot does, and hold until its
        next call.
        """

    def close(self, is_whole: bool) -> None:
        """End the transfer. A source releases its snapshot; a sink keeps its stage if `is_whole`."""


class Party(Protocol):
    """Owner of weights, or of room for them, in one process; any thread may call it.

    Attributes:
        regions: Rectangles that a source holds, or that a sink wants.
        dtypes: Published dtype by tensor; a sink's may be empty.
        device: Where packs may lie: a GPU where the tensors are, if it has room. Host memory always serves.
    """

    @property
    def regions(self) -> Sequence[Region]: ...

    @property
    def dtypes(self) -> Mapping[str, str]: ...

    @property
    def device(self) -> torch.device: ...

    def open(
        self,
        number: int,
        packs: Sequence[Pack],
        until: float,
        base: int = UNLOADED,
        device: torch.device = HOST,
    ) -> PackStore:
        """Begin the transfer of a version, with packs on `device`; a source waits for it, a sink makes room.

        Args:
            base: Version number that differences are to; 0 for none.

        Raises:
            Superseded: A source will not have this version.
            SyncError: There is no room, or the version did not come until `until`.
        """

    def keep(self, numbers: Collection[int]) -> None:
        """Name the versions that the engine may still load; a sink frees all others when it needs room."""
