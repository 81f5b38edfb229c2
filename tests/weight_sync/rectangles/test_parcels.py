"""The plan of parcels: each wanted element once, from a holder, evenly, over connections that there are."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weight_sync.rectangles.packs import ALIGN_BYTES, make_packs
from weight_sync.rectangles.parcels import NobodyHolds, Parcel, Region, plan_parcels, share_out
from weight_sync.rectangles.rectangle import Rectangle

ITEM_BYTES = 2


def rows(first: int, last: int, columns: int = 8) -> Region:
    return "w", Rectangle((first, 0), (last, columns))


def loads(parcels: Sequence[Parcel]) -> Counter[int]:
    found: Counter[int] = Counter()
    for parcel in parcels:
        found[parcel.source] += parcel.num_bytes
    return found


@st.composite
def regions(draw: st.DrawFn, shape: Sequence[int]) -> list[Region]:
    found = []
    for _ in range(draw(st.integers(0, 4))):
        start = [draw(st.integers(0, size - 1)) for size in shape]
        stop = [draw(st.integers(first + 1, size)) for first, size in zip(start, shape, strict=True)]
        found.append(("w", Rectangle(tuple(start), tuple(stop))))
    return found


def mask(shape: Sequence[int], some: Sequence[Region]) -> np.ndarray:
    found = np.zeros(shape, np.int8)
    for _, rectangle in some:
        found[rectangle.slices] = 1
    return found


@given(data=st.data(), shape=st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple))
def test_each_wanted_element_comes_once_from_one_that_holds_it(
    data: st.DataObject, shape: tuple[int, ...]
) -> None:
    held = [data.draw(regions(shape)) for _ in range(3)]
    wanted = [data.draw(regions(shape)) for _ in range(3)]
    max_bytes = data.draw(st.sampled_from([2, 16, 1 << 20]))
    masks = [mask(shape, some) for some in held]
    if any((mask(shape, some) > sum(masks)).any() for some in wanted):
        with pytest.raises(NobodyHolds, match="of 'w', which nobody holds"):
            plan_parcels(held, wanted, {"w": ITEM_BYTES}, max_bytes=max_bytes)
        return
    parcels = plan_parcels(held, wanted, {"w": ITEM_BYTES}, max_bytes=max_bytes)
    got = [np.zeros(shape, np.int8) for _ in wanted]
    for parcel in parcels:
        assert masks[parcel.source][parcel.rectangle.slices].all()
        assert parcel.num_bytes == parcel.rectangle.num_elements * ITEM_BYTES
        assert parcel.num_bytes <= max_bytes or parcel.rectangle.shape[0] == 1
        for sink in parcel.sinks:
            got[sink][parcel.rectangle.slices] += 1
    for sink, some in enumerate(wanted):
        assert (got[sink] == mask(shape, some)).all()
    packed = [parcel for pack in make_packs(parcels, 64) for parcel in pack.parcels]
    assert Counter(packed) == Counter(parcels)


@given(copies=st.integers(2, 6), workers=st.integers(1, 3), tensors=st.integers(1, 40))
def test_sources_that_hold_the_same_send_the_same(copies: int, workers: int, tensors: int) -> None:
    some = [(f"w{index}", Rectangle((0, 0), (index + 1, 8))) for index in range(tensors)]
    sizes = dict.fromkeys((name for name, _ in some), ITEM_BYTES)
    found = loads(plan_parcels([some] * copies, [some] * workers, sizes, max_bytes=64))
    mean = sum(found.values()) / copies
    assert max(found[source] for source in range(copies)) <= 1.1 * mean + 64


def test_what_one_alone_holds_leaves_the_rest_to_the_others() -> None:
    """Stages of a pipeline: the first alone holds rows 0 to 50, both hold a tied copy of the others."""
    found = loads(plan_parcels([[rows(0, 100)], [rows(50, 100)]], [[rows(0, 100)]], {"w": 2}, max_bytes=16))
    assert found[0] == found[1] == 800


def test_sources_of_one_network_card_share_its_rate() -> None:
    everywhere = [[rows(0, 120)]] * 3
    found = loads(plan_parcels(everywhere, [[rows(0, 120)]], {"w": 2}, cards=(0, 0, 1), max_bytes=16))
    assert found[0] + found[1] == pytest.approx(found[2], rel=0.1)
    assert found[0] == pytest.approx(found[1], rel=0.1)


def test_what_is_rounded_among_some_sources_is_made_good_among_others() -> None:
    """Five pieces for each pair of ten sources: 22.5 for each, and nobody has two more."""
    pairs = list(itertools.combinations(range(10), 2))
    pieces = {pair: [(f"w{pair}{i}", Rectangle((0,), (4,))) for i in range(5)] for pair in pairs}
    held = [[piece for pair in pairs if source in pair for piece in pieces[pair]] for source in range(10)]
    wanted = [piece for some in pieces.values() for piece in some]
    found = loads(plan_parcels(held, [wanted], {name: ITEM_BYTES for name, _ in wanted}))
    assert max(found.values()) < 24.5 * 4 * ITEM_BYTES


def test_what_is_too_small_to_matter_comes_over_a_connection_that_there_is() -> None:
    held = [[("norm", Rectangle((0,), (4,)))] for _ in range(3)]
    held[2].append(rows(0, 1000))
    parcels = plan_parcels(held, [[rows(0, 1000), ("norm", Rectangle((0,), (4,)))]], {"w": 2, "norm": 2})
    assert {parcel.source for parcel in parcels} == {2}


def test_each_of_two_sources_of_the_same_serves_a_worker_of_its_own() -> None:
    names = [f"w{index}" for index in range(200)]
    some = [(name, Rectangle((0,), (4,))) for name in names]
    wanted = [some[::2], some[1::2]]
    parcels = plan_parcels([some, some], wanted, dict.fromkeys(names, ITEM_BYTES))
    edges = Counter((parcel.source, sink) for parcel in parcels for sink in parcel.sinks)
    assert sum(1 for count in edges.values() if count > 4) == 2
    found = loads(parcels)
    assert max(found.values()) <= 1.1 * sum(found.values()) / 2


@given(
    demands=st.lists(
        st.tuples(st.lists(st.integers(0, 5), min_size=1, unique=True), st.integers(1, 1000)),
        min_size=1,
        max_size=8,
    )
)
def test_the_busiest_takes_as_little_as_it_can(demands: list[tuple[list[int], float]]) -> None:
    taken = share_out(demands)
    load = [sum(shares.get(party, 0.0) for shares in taken) for party in range(6)]
    for (parties, amount), shares in zip(demands, taken, strict=True):
        assert set(shares) == set(parties)
        assert sum(shares.values()) == pytest.approx(amount)
        assert min(shares.values()) >= 0
    groups = [set(some) for count in range(1, 7) for some in itertools.combinations(range(6), count)]
    least = max(sum(a for some, a in demands if set(some) <= group) / len(group) for group in groups)
    assert max(load) == pytest.approx(least, rel=0.01)


def test_the_plan_follows_from_its_input_alone() -> None:
    held, wanted = [[rows(0, 60)], [rows(30, 90)]], [[rows(10, 80)], [rows(0, 40, 4)]]
    assert plan_parcels(held, wanted, {"w": 2}) == plan_parcels(held, wanted, {"w": 2})


def test_a_pack_holds_parcels_of_the_same_parties_up_to_its_size() -> None:
    sizes = [10, 30, 20, 100, 6]
    rectangle = Rectangle((0,), (1,))
    parcels = [Parcel(f"w{i}", rectangle, size, 0, (1, 2)) for i, size in enumerate(sizes)]
    other = Parcel("v", rectangle, 8, 0, (1,))
    packs = make_packs([*parcels[:2], other, *parcels[2:]], max_bytes=64)
    assert [[parcel.num_bytes for parcel in pack.parcels] for pack in packs] == [
        [10, 30],
        [20],
        [100],
        [6],
        [8],
    ]
    assert [pack.num_bytes for pack in packs] == [46, 20, 100, 6, 8]
    assert all(offset % ALIGN_BYTES == 0 for pack in packs for offset in pack.offsets)
