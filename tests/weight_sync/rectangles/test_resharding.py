"""Weights from any layout of learner ranks to vLLM's workers of any layout, by parcels alone.

The models are vLLM's own, before any weights are loaded; what its own loader makes of the whole checkpoint is
the measure, to the bit.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from tests.weight_sync.rectangles.learner_ranks import Layout, parts_of
from tests.weight_sync.rectangles.models import CLASSES, MOE, Model
from weight_sync.rectangles.holdings import place_parts
from weight_sync.rectangles.packs import Parameters, make_packs
from weight_sync.rectangles.parcels import Parcel, Region, plan_parcels
from weight_sync.rectangles.recorder import Recording, record
from weight_sync.rectangles.rectangle import Rectangle

if TYPE_CHECKING:
    from tests.weight_sync.rectangles.vllm_ranks import Worker

pytestmark = pytest.mark.long

LAYOUTS = (
    Layout(),
    Layout(tp=2, dp=2),
    Layout(tp=2, pp=2),
    Layout(pp=2, dp=2, ep=2),
    Layout(tp=2, dp=2, ep=4),
)
CASES = [
    (family, is_tied, tp, pp, has_ep)
    for family, is_tied, (tp, pp) in itertools.product(
        CLASSES, (True, False), ((1, 1), (2, 1), (4, 1), (2, 2))
    )
    for has_ep in ((False, True) if family == MOE else (False,))
    if not (family == MOE and is_tied and pp > 1)  # vLLM has no such model
]


def workers_of(model: Model, tp: int, pp: int, has_ep: bool) -> list[Worker]:
    from tests.weight_sync.rectangles.vllm_ranks import Worker  # vLLM, which collecting need not import

    places = itertools.product(range(pp), range(tp))
    return [Worker(model, (rank, tp), (stage, pp), has_ep=has_ep) for stage, rank in places]


@cache
def recording_of(model: Model, tp: int, pp: int, has_ep: bool, number: int) -> Recording:
    worker = workers_of(model, tp, pp, has_ep)[number]
    built = worker.build("meta")
    with worker.as_rank():
        return record(built.load_weights, dict(built.named_parameters()), model.specs())


@pytest.mark.parametrize(("family", "is_tied", "tp", "pp", "has_ep"), CASES)
def test_parcels_bring_to_each_worker_what_its_own_loader_reads(
    family: str, is_tied: bool, tp: int, pp: int, has_ep: bool
) -> None:
    model = Model(family, is_tied)
    checkpoint = model.checkpoint()
    dtypes = dict.fromkeys(checkpoint, torch.bfloat16)
    workers = workers_of(model, tp, pp, has_ep)
    recordings = [recording_of(model, tp, pp, has_ep, number) for number in range(len(workers))]
    wanted = [[(p.tensor, p.rectangle) for p in recording.placements] for recording in recordings]
    assert {name for wishes in wanted for name, _ in wishes} == set(checkpoint)
    filled = [dict(worker.build("cpu").named_parameters()) for worker in workers]
    for layout in LAYOUTS:
        if layout.ep > 1 and not model.has_experts:
            continue
        held = [place_parts(parts_of(model, checkpoint, layout, rank)) for rank in range(layout.num_ranks)]
        sources = [Parameters(placements, holders, dtypes) for placements, holders in held]
        regions = [[(p.tensor, p.rectangle) for p in placements] for placements, _ in held]
        for parameter in itertools.chain.from_iterable(one.values() for one in filled):
            parameter.data.fill_(torch.nan)
        sinks = [
            Parameters(recording.placements, {name: p.data for name, p in mine.items()}, dtypes)
            for recording, mine in zip(recordings, filled, strict=True)
        ]
        for pack in make_packs(plan_parcels(regions, wanted, dict.fromkeys(checkpoint, 2)), 1 << 16):
            data_B = torch.zeros(pack.num_bytes, dtype=torch.uint8)
            sources[pack.source].read(pack, data_B)
            for sink in pack.sinks:
                sinks[sink].write(pack, data_B)
        for worker, recording, mine in zip(workers, recordings, filled, strict=True):
            for padding in recording.filled:
                mine[padding.holder].data[padding.local.slices] = padding.value
            theirs = worker.build("cpu")
            with worker.as_rank():
                theirs.load_weights(iter(checkpoint.items()))
            for name, parameter in theirs.named_parameters():
                assert torch.equal(parameter.view(torch.int16), mine[name].view(torch.int16)), (name, layout)


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    family=st.sampled_from(list(CLASSES)),
    is_tied=st.booleans(),
    vocab_size=st.sampled_from([37, 255, 1003]),
    tp=st.sampled_from([1, 2]),
    cp=st.sampled_from([1, 2]),
    dp=st.integers(1, 3),
    pp=st.sampled_from([1, 2]),
    ep=st.sampled_from([1, 2, 4]),
    multiple=st.sampled_from([1, 64, 128]),
    engines=st.lists(st.tuples(st.sampled_from([1, 2, 4]), st.booleans()), min_size=1, max_size=3),
)
def test_every_wanted_byte_comes_once_and_the_sources_send_alike(
    family: str,
    is_tied: bool,
    vocab_size: int,
    tp: int,
    cp: int,
    dp: int,
    pp: int,
    ep: int,
    multiple: int,
    engines: list[tuple[int, bool]],
) -> None:
    model = Model(family, is_tied, vocab_size)
    layout = Layout(tp, cp, dp, pp, ep if model.has_experts and (tp * cp * dp) % ep == 0 else 1)
    checkpoint = {spec.name: torch.empty(spec.shape, device="meta") for spec in model.specs()}
    held = [
        [(p.tensor, p.rectangle) for p in place_parts(parts_of(model, checkpoint, layout, rank, multiple))[0]]
        for rank in range(layout.num_ranks)
    ]
    wanted = [
        [
            (p.tensor, p.rectangle)
            for p in recording_of(model, size, 1, by_ep and model.has_experts, rank).placements
        ]
        for size, by_ep in engines
        for rank in range(size)
    ]
    parcels = plan_parcels(held, wanted, dict.fromkeys(checkpoint, 2), max_bytes=4096)
    got = [{name: torch.zeros(x.shape, dtype=torch.int8) for name, x in checkpoint.items()} for _ in wanted]
    loads = [0] * len(held)
    for parcel in parcels:
        loads[parcel.source] += parcel.num_bytes
        for sink in parcel.sinks:
            got[sink][parcel.tensor][parcel.rectangle.slices] += 1
    for sink, wishes in enumerate(wanted):
        for name, rectangle in wishes:
            got[sink][name][rectangle.slices] -= 1
        assert not any(count.any() for count in got[sink].values())
    assert max(loads) <= 1.1 * least_load(held, parcels) + 4096


def least_load(held: Sequence[Sequence[Region]], parcels: Sequence[Parcel]) -> float:
    """Return the load of the busiest source in the best of all plans: by linear programming."""
    masks: dict[str, list[tuple[int, Rectangle]]] = {}
    for source, regions in enumerate(held):
        for tensor, rectangle in regions:
            masks.setdefault(tensor, []).append((source, rectangle))
    sizes: Counter[tuple[int, ...]] = Counter()
    for parcel in parcels:
        holders = [source for source, r in masks[parcel.tensor] if r.meet(parcel.rectangle)]
        sizes[tuple(sorted(set(holders)))] += parcel.num_bytes
    pairs = [(row, source) for row, holders in enumerate(sizes) for source in holders]
    sums, limits = np.zeros((len(sizes), len(pairs) + 1)), np.zeros((len(held), len(pairs) + 1))
    for column, (row, source) in enumerate(pairs):
        sums[row, column] = limits[source, column] = 1
    limits[:, -1] = -1
    found = linprog(
        [0.0] * len(pairs) + [1.0], limits, np.zeros(len(held)), sums, np.array(list(sizes.values()), float)
    )
    return float(found.fun)
