"""A receiver that comes late, while the learner computes: how soon it serves, what the learner notices.

Owns the figures of one joiner after the other. Its process starts beforehand; what counts begins with its
hello. The learner's steps are products of matrices in its own process, timed there one by one.
"""

from __future__ import annotations

import statistics
from contextlib import closing
from typing import Any

from benchmarks.weight_sync.peers.services import Fleet

SPARE_S = 1.0
"""A joiner serves after one transfer, one load and this."""
NUM_STEPS = 60


def measure_joiners(fleet: Fleet, num_joiners: int) -> dict[str, Any]:
    """Return what `num_joiners` late receivers, one after the other, took and cost; then one amid versions.

    Returns:
        `hello_to_ready_s` of each; `sync_s`, one transfer and one load, of as many syncs before;
        `amid_s`, of the one that comes while versions go out one after another;
        `step_alone_s`, `step_s`: the medians of the learner's steps with nothing else to do, and from a
        joiner's hello until it serves.
    """
    with closing(fleet):
        fleet.attend()
        syncs = [fleet.sync() for _ in range(num_joiners + 1)][1:]
        joined = [_join(fleet) for _ in range(num_joiners)]
        amid_s = fleet.join_amid()
    return {
        "num_bytes": fleet.num_bytes,
        "amid_s": amid_s,
        "sync_s": [sync.ready_s - sync.publish_s for sync in syncs],
        **{name: [figures[name] for figures in joined] for name in joined[0]},
    }


def _join(fleet: Fleet) -> dict[str, float]:
    alone = [ended - began for began, ended in fleet.steps(NUM_STEPS)]
    hello_s, ready_s, steps = fleet.join(NUM_STEPS)
    beside = [ended - began for began, ended in steps if began < ready_s and ended > hello_s]
    return {
        "hello_to_ready_s": ready_s - hello_s,
        "step_alone_s": statistics.median(alone),
        "step_s": statistics.median(beside),
        "step_max_s": max(beside),
    }
