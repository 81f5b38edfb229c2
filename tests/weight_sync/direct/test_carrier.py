"""Direct transfers between learner ranks and sinks of any regions: what arrives, and how a transfer ends."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
import torch

from asyncrl.core.errors import DeadlineExceeded, SyncError
from asyncrl.core.runtime.faults import set_hook
from tests.weight_sync.direct.members import (
    MAX_BYTES,
    RUNTIME,
    Members,
    ScriptedSink,
    make_source,
    random_regions,
)
from weight_sync.backends.contract import DigestMismatch
from weight_sync.direct.carrier import make_steps
from weight_sync.direct.party import UNDER_WAY, Superseded
from weight_sync.rectangles.parcels import NobodyHolds
from weight_sync.rectangles.rectangle import Rectangle


@pytest.fixture
def meet() -> Iterator[Callable[..., Members]]:
    met: list[Members] = []

    def make(*args: object, **kwargs: object) -> Members:
        met.append(Members(*args, **kwargs))
        return met[-1]

    yield make
    set_hook(None)
    for members in met:
        members.close()


def make_parties(seeds: list[int], numbers: tuple[int, ...] = (1,), dtype: str = "float32"):
    sinks = [ScriptedSink(random_regions(seed)) for seed in seeds]
    return [*(make_source(rank, numbers, dtype) for rank in range(4)), *sinks], sinks


@pytest.mark.parametrize("seeds", [[1], [2, 3], [4, 4, 5], [6, 6, 6, 7]], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("is_tagged", [False, True])
def test_every_sink_gets_what_it_wants_right_to_the_bit(meet, seeds, dtype, is_tagged):
    parties, sinks = make_parties(seeds, dtype=dtype)
    members = meet(parties, 4, is_tagged=is_tagged)
    assert members.run(1) == [None] * len(parties)
    for sink in sinks:
        assert sink.has_all(1, getattr(torch, dtype))
        assert sink.stages[1].is_whole
    assert len(sinks[0].stages[1].packs) > 2 * UNDER_WAY
