"""Copies that versions are brought into, by one round or by one of each stripe.

Owns the copies of rounds that are not over, and the version of which some stripes are here. Rounds of several
stripes write to one copy. It goes on with the next offer of that version; an offer of another one ends it.
Invariants: a copy is given back when nobody writes to it; one that an aborted round may still write to takes
part in no other round.
"""

from __future__ import annotations

import torch

from weight_sync.memory.manifest import Manifest
from weight_sync.memory.staging_area import Copy, StagingArea

NO_BYTES = torch.empty(0, dtype=torch.uint8)


class Assembly:
    """One version on its way. `stripes`: that are here, verified, of `num_stripes`."""

    def __init__(self, copy: Copy, num_stripes: int) -> None:
        self.copy = copy
        self.num_stripes = num_stripes
        self.stripes: set[int] = set()
        self.rounds: set[int] = set()
        self.writers: set[int] = set()

    @property
    def is_complete(self) -> bool:
        return len(self.stripes) == self.num_stripes


class Assemblies:
    """See the module.

    >>> # assemblies = Assemblies(staging)
    >>> # assembly = assemblies.join(round_id, manifest, num_stripes=2)   # of the round for stripe 1
    >>> # copy = assemblies.verify(round_id, stripe=1)   # a Copy, if the version is complete
    """

    def __init__(self, staging: StagingArea) -> None:
        self._staging = staging
        self._by_round: dict[int, Assembly] = {}
        self._partial: Assembly | None = None

    def join(
        self, round_id: int, manifest: Manifest, num_stripes: int, *, is_direct: bool = False
    ) -> Assembly:
        """Return the copy that the round is to write to.

        Raises:
            SyncError: There can be no such segment.
        """
        found = self._partial
        is_it = found is not None and found.copy.manifest == manifest and found.num_stripes == num_stripes
        if found is None or not is_it or found.writers:
            self._partial = None
            if found is not None:
                self._settle(found)
            copy = Copy(manifest, "", NO_BYTES) if is_direct else self._staging.make_room(manifest)
            found = self.add(round_id, copy, num_stripes)
            self._partial = found if num_stripes > 1 else None
        found.rounds.add(round_id)
        self._by_round[round_id] = found
        return found

    def add(self, round_id: int, copy: Copy, num_stripes: int = 1) -> Assembly:
        """Take part in a round with a copy that is there already."""
        found = self._by_round[round_id] = Assembly(copy, num_stripes)
        found.rounds.add(round_id)
        return found

    def verify(self, round_id: int, stripe: int) -> Copy | None:
        """The round has brought its stripe; return the copy once the version is complete."""
        found = self._by_round.pop(round_id)
        found.stripes.add(stripe)
        found.rounds.discard(round_id)
        if not found.is_complete:
            self._settle(found)
            return None
        if found is self._partial:
            self._partial = None
        return found.copy

    def leave(self, round_id: int) -> None:
        """The round brings nothing more."""
        found = self._by_round.pop(round_id)
        found.rounds.discard(round_id)
        self._settle(found)

    def abandon(self, round_id: int) -> None:
        """The round was aborted, but a thread may still write for it; `end_abandoned` follows."""
        found = self._by_round[round_id]
        found.rounds.discard(round_id)
        found.writers.add(round_id)

    def end_abandoned(self, round_id: int) -> None:
        """That thread has ended."""
        found = self._by_round.pop(round_id)
        found.writers.discard(round_id)
        self._settle(found)

    def _settle(self, found: Assembly) -> None:
        """Give the copy back if nobody writes to it, and no other stripe of it is to come."""
        if found.rounds or found.writers or (found is self._partial and found.stripes):
            return
        self._partial = None if found is self._partial else self._partial
        self._staging.give_back(found.copy)
