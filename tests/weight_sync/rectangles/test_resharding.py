"""Weights from any layout of learner ranks to vLLM's workers of any layout, by parcels alone.

The models are vLLM's own. Each worker's loader is recorded with another checkpoint, and then reads tensors
that are NaN but for what came in packs; what it makes of the whole checkpoint is the measure, to the bit.
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

from asyncrl.core.runtime.threads import ThreadRuntime
from tests.weight_sync.direct.engine.test_stage import poisoned
from tests.weight_sync.rectangles.learner_ranks import Layout, parts_of
from tests.weight_sync.rectangles.models import CLASSES, MOE, Model
from weight_sync.direct.stage import Stages
from weight_sync.memory.manifest import plan
from weight_sync.rectangles.packs import Parameters, make_packs, place_parts
from weight_sync.rectangles.parcels import Parcel, Region, plan_parcels
from weight_sync.rectangles.recorder import ReadRecorder
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
def regions_of(model: Model, tp: int, pp: int, has_ep: bool, number: int) -> list[Region]:
    """Return what a worker's loader reads, recorded with other values than any test loads."""
    worker, other = workers_of(model, tp, pp, has_ep)[number], model.checkpoint(seed=8)
    with ReadRecorder(other.items()) as recorder:
        worker.load(other.items())
    return recorder.regions


@pytest.mark.parametrize(("family", "is_tied", "tp", "pp", "has_ep"), CASES)
def test_parcels_bring_to_each_worker_what_its_own_loader_reads(
    family: str, is_tied: bool, tp: int, pp: int, has_ep: bool
) -> None:
    model = Model(family, is_tied)
    checkpoint, tensors = model.checkpoint(), plan(model.specs(), 1 << 20)
    assert not any(torch.equal(other, checkpoint[name]) for name, other in model.checkpoint(seed=8).items())
    dtypes = dict.fromkeys(checkpoint, torch.bfloat16)
    workers = workers_of(model, tp, pp, has_ep)
    wanted = [regions_of(model, tp, pp, has_ep, number) for number in range(len(workers))]
    assert {name for wishes in wanted for name, _ in wishes} == set(checkpoint)
    measures = [worker.load(checkpoint.items()) for worker in workers]
    assert not any(parameter.isnan().any() for measure in measures for parameter in measure.values())
    for layout in LAYOUTS:
        if layout.ep > 1 and not model.has_experts:
            continue
        held = [place_parts(parts_of(model, checkpoint, layout, rank)) for rank in range(layout.num_ranks)]
        sources = [Parameters(placements, holders, dtypes) for placements, holders in held]
        regions = [[(p.tensor, p.rectangle) for p in placements] for placements, _ in held]
        packs = make_packs(plan_parcels(regions, wanted, dict.fromkeys(checkpoint, 2)), 1 << 16)
        for number, (worker, measure) in enumerate(zip(workers, measures, strict=True)):
            stages, own = (
                Stages(wanted[number], ThreadRuntime(), poisoned),
                [pack for pack in packs if number in pack.sinks],
            )
            store = stages.open(1, own, 0.0)
            for index, pack in enumerate(own):
                sources[pack.source].read(pack, store.pack(index))
            store.close(is_whole=True)
            found = worker.load(stages.tensors(1, tensors))
            for name, parameter in measure.items():
                assert torch.equal(parameter.view(torch.int16), found[name].view(torch.int16)), (name, layout)
            num_wanted = sum(rectangle.num_elements for _, rectangle in dict.fromkeys(wanted[number]))
            assert sum(parcel.num_bytes for pack in own for parcel in pack.parcels) <= 2 * num_wanted


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
        regions_of(model, size, 1, by_ep and model.has_experts, rank)
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
