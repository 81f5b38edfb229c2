"""Conditions that must hold after any fault."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from tests.weight_sync.faults.stage import SLACK_S, Stage
from tests.weight_sync.faults.traces import state_of
from weight_sync.memory import segments


def bound_s(stage: Stage) -> float:
    """Return how long a version may need when each wait on its way ends at its deadline."""
    timing = stage.timing
    return timing.offer_s + timing.deadline_s + timing.settle_s + timing.silence_s + SLACK_S


def check_transfers(stage: Stage, victims: Sequence[str] = ()) -> None:
    """No transfer lasted longer than its deadline, by the services' own clocks, but of what was stopped."""
    for name in stage.names():
        if name != "publisher" and not name.startswith("receiver"):
            continue
        longest_s = stage.status(name).longest_transfer_s
        assert name in victims or longest_s <= stage.timing.deadline_s + SLACK_S, name


def check_loads(stage: Stage) -> None:
    """No replica served a mix, and the numbers of each engine only rose."""
    for index in stage.replicas:
        loads = stage.loads(index)
        assert all(load.held == load.number for load in loads if load.ok), loads
        for before, after in pairwise(loads):
            assert after.started_s != before.started_s or after.number > before.number or not before.ok, loads


def check_nothing_is_left(stage: Stage) -> None:
    """All have ended: with the processes their sockets and descriptors are gone, the segments must be too."""
    assert segments.find_names(stage.cluster.shm_prefix) == []
    assert all(state_of(stage.party(name).pid) == "X" for name in stage.names())


def finish(stage: Stage) -> None:
    """Look at all loads once more, let everybody end, and see that nothing is left."""
    check_loads(stage)
    stage.end()
    check_nothing_is_left(stage)
