"""A sender that is killed in the middle of a version: how soon all receivers hold it nevertheless.

On the staged path that is the publisher, which is started anew as the supervisor would; on the direct path a
learner's rank, whose version the receivers get staged from the publisher then.
"""

from __future__ import annotations

import statistics
from contextlib import closing
from typing import Any

from benchmarks.weight_sync.peers.services import Fleet

NUM_RECEIVERS, NUM_SYNCS = 2, 3
PLACE = 1
"""Of the pack, or bucket, at which the sender dies."""


def measure_death(fleet: Fleet) -> dict[str, Any]:
    """Return the seconds from the death until all have loaded, and those of whole syncs before."""
    with closing(fleet):
        fleet.attend()
        syncs = [fleet.sync() for _ in range(NUM_SYNCS)]
        return {
            "num_bytes": fleet.num_bytes,
            "sync_s": statistics.median(sync.ready_s for sync in syncs),
            "hold_s": fleet.lose_sender(PLACE),
        }
