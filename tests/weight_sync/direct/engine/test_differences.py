"""Direct transfers as differences to the version before: exact to the bit, and whole where that is needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.core.errors import SyncError
from tests.different import assert_all_differ
from tests.weight_sync.direct.members import RUNTIME, Members
from weight_sync.backends.contract import DigestMismatch
from weight_sync.direct.snapshot import Snapshots
from weight_sync.direct.stage import Stages
from weight_sync.encoding.delta_codec import ELEMENTS, Head, compare_on_device, compare_on_host, shorten
from weight_sync.memory.manifest import ITEM_BYTES, TensorSpec, plan
from weight_sync.memory.parts import Part
from weight_sync.rectangles.packs import make_packs
from weight_sync.rectangles.parcels import Region, plan_parcels
from weight_sync.rectangles.rectangle import Rectangle

DTYPES = {"wide": "bfloat16", "odd": "bfloat16", "main": "float32", "scale": "float64", "codes": "uint8"}
SHAPES = {"wide": (96, 64), "odd": (9, 7), "main": (24, 20), "scale": (6, 3), "codes": (11, 5)}
SPECS = [TensorSpec(name, DTYPES[name], shape) for name, shape in SHAPES.items()]
LAYOUT = plan(SPECS, 1 << 12)
NUM_BYTES = sum(spec.num_bytes for spec in SPECS)
SPLIT = {name: rows // 3 for name, (rows, _) in SHAPES.items()}
"""Row from which the second source has a tensor."""
ALL: list[Region] = [(name, Rectangle.whole(shape)) for name, shape in SHAPES.items()]
SOME: list[Region] = [
    ("wide", Rectangle((10, 0), (80, 64))),
    ("wide", Rectangle((90, 3), (95, 60))),
    ("odd", Rectangle((0, 2), (9, 7))),
    ("codes", Rectangle.whole(SHAPES["codes"])),
]
Version = dict[str, torch.Tensor]


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(ELEMENTS[tensor.itemsize])


def make_version(seed: int) -> Version:
    """Return weights of any bits, NaN of all kinds among them."""
    generator, made = torch.Generator().manual_seed(seed), {}
    for name, shape in SHAPES.items():
        dtype = getattr(torch, DTYPES[name])
        bytes_B = torch.randint(
            0, 256, (shape[0] * shape[1] * dtype.itemsize,), generator=generator, dtype=torch.uint8
        )
        made[name] = bytes_B.view(dtype).view(shape)
    assert any(values.isnan().any() for name, values in made.items() if name != "codes")
    return made


def change(version: Version, share: float, seed: int, *names: str) -> Version:
    """Return a version that differs in about `share` of the elements, by any of their bits."""
    generator, changed = torch.Generator().manual_seed(seed), {}
    for name, values in version.items():
        bits = bits_of(values).clone()
        if not names or name in names:
            at = torch.rand(values.shape, generator=generator) < share
            bits[at] ^= 1 << (seed % (8 * values.itemsize - 1))
        changed[name] = bits.view(values.dtype)
    return changed


class Run:
    """Two learner ranks and sinks of some regions, one membership at a time."""

    def __init__(self, *wanted: Sequence[Region], is_tagged: bool = False) -> None:
        self.sources = [Snapshots(RUNTIME, keeps_sent=True) for _ in range(2)]
        self.sinks = [Stages(regions, RUNTIME) for regions in wanted]
        self.versions: dict[int, Version] = {}
        self._is_tagged, self.met = is_tagged, list[Members]()
        self.meet(*self.sinks)

    def meet(self, *sinks: Stages) -> None:
        self.met.append(Members([*self.sources, *sinks], 2, is_tagged=self._is_tagged))

    def publish(self, number: int, version: Version) -> None:
        self.versions[number] = version
        assert_all_differ([make_version(0), *self.versions.values()])
        for source, ends in zip(self.sources, ((0, 1), (1, 2)), strict=True):
            parts = []
            for name, values in version.items():
                edges = (0, SPLIT[name], len(values))
                first, last = edges[ends[0]], edges[ends[1]]
                parts.append(Part(name, tuple(values.shape), first, 0, values[first:last]))
            assert source.take(number, parts, DTYPES)

    def send(self, number: int, base: int = 0) -> tuple[list[type | None], int]:
        """Return how it ended for each sink, and the bytes that the sources have sent."""
        members = self.met[-1]
        ends = members.run(number, base=base)
        assert ends[:2] == [None, None]
        return [end and type(end) for end in ends[2:]], sum(one.num_bytes for one in members.carriers[:2])

    @property
    def whole_bytes(self) -> int:
        """Bytes of all packs of the membership."""
        steps = [step for carrier in self.met[-1].carriers[:2] for step in carrier._steps]
        return sum(step.pack.num_bytes for step in steps)

    def has(self, sink: Stages, number: int) -> bool:
        """Tell whether a sink can load a version, all of whose bits are right."""
        found = dict(sink.tensors(number, LAYOUT))
        version = self.versions[number]
        parts = [(found[name][r.slices], version[name][r.slices]) for name, r in sink.regions]
        return all(torch.equal(bits_of(one), bits_of(other)) for one, other in parts)


@pytest.fixture
def start() -> Iterator[Callable[..., Run]]:
    runs: list[Run] = []

    def make(*args: object, **kwargs: object) -> Run:
        runs.append(Run(*args, **kwargs))
        return runs[-1]

    yield make
    for members in (one for run in runs for one in run.met):
        members.close()


@pytest.mark.parametrize("is_tagged", [False, True])
def test_a_chain_of_versions_goes_as_differences_and_arrives_right_to_the_bit(start, is_tagged):
    run = start(ALL, ALL, SOME, is_tagged=is_tagged)
    run.publish(1, make_version(1))
    assert run.send(1) == ([None] * 3, run.whole_bytes)
    for number in (2, 3, 4):
        run.publish(number, change(run.versions[number - 1], 0.02, number))
        ends, num_bytes = run.send(number, base=number - 1)
        assert ends == [None] * 3
        assert num_bytes < 0.2 * NUM_BYTES, "heads included"
        assert all(run.has(sink, number) for sink in run.sinks)


def test_a_sink_without_the_base_fails_alone_and_gets_the_next_version_whole(start):
    run = start(ALL, ALL)
    run.publish(1, make_version(1))
    run.send(1)
    run.sinks[1]._whole.clear()
    run.publish(2, change(run.versions[1], 0.02, 2))
    assert run.send(2, base=1)[0] == [None, DigestMismatch]
    assert run.has(run.sinks[0], 2)
    with pytest.raises(SyncError, match="version 2 is not on this worker"):
        run.sinks[1].tensors(2, LAYOUT)
    run.publish(3, change(run.versions[2], 0.02, 3))
    assert run.send(3) == ([None, None], run.whole_bytes)
    run.publish(4, change(run.versions[3], 0.02, 4))
    assert run.send(4, base=3)[0] == [None, None]
    assert all(run.has(sink, 4) for sink in run.sinks)


@pytest.mark.parametrize("place", [0, NUM_BYTES // 2])
def test_a_base_that_is_not_what_it_was_is_found_by_the_digest(start, place):
    """At one sink, through which packs go to the other: that one gets what the source has sent."""
    run = start(ALL, ALL)
    run.publish(1, make_version(1))
    run.send(1)
    run.sinks[0]._whole[1]._data_B[place] ^= 1
    run.publish(2, change(run.versions[1], 0.02, 2))
    assert run.send(2, base=1)[0] == [DigestMismatch, None]
    assert run.has(run.sinks[1], 2)


def test_a_source_without_the_base_sends_its_packs_whole_and_the_other_one_differences(start):
    run = start(ALL)
    run.publish(1, make_version(1))
    run.send(1)
    run.publish(2, change(run.versions[1], 0.01, 2))
    run.sources[1]._slots = [slot for slot in run.sources[1]._slots if slot.number == 2]
    ends, num_bytes = run.send(2, base=1)
    share = sum(
        (rows - SPLIT[name]) * columns * ITEM_BYTES[DTYPES[name]] for name, (rows, columns) in SHAPES.items()
    )
    assert ends == [None] and share < num_bytes < share + 0.2 * NUM_BYTES
    assert run.has(run.sinks[0], 2)


def test_packs_that_changed_everywhere_go_whole_beside_differences_and_later_ones_as_differences_again(start):
    run = start(ALL, SOME)
    run.publish(1, make_version(1))
    run.send(1)
    run.publish(2, change(change(run.versions[1], 1.0, 3, "wide"), 0.02, 4, "main"))
    _, dense = run.send(2, base=1)
    assert 0.9 * 96 * 64 * 2 < dense < 96 * 64 * 2 + 0.2 * NUM_BYTES
    assert all(run.has(sink, 2) for sink in run.sinks)
    run.publish(3, change(run.versions[2], 0.02, 5))
    assert run.send(3, base=2)[1] < 0.2 * NUM_BYTES
    assert all(run.has(sink, 3) for sink in run.sinks)


def test_the_base_of_another_membership_serves_although_its_packs_were_others(start):
    run = start(ALL, SOME, ALL)
    run.publish(1, make_version(1))
    run.send(1)
    packs = run.sinks[0]._whole[1]._packs
    run.meet(*run.sinks[:2])
    run.publish(2, change(run.versions[1], 0.02, 2))
    ends, num_bytes = run.send(2, base=1)
    assert ends == [None, None] and num_bytes < 0.2 * NUM_BYTES
    assert all(run.has(sink, 2) for sink in run.sinks[:2])
    assert run.sinks[0]._whole[2]._packs != packs


def test_an_engine_loads_the_base_while_the_difference_to_it_arrives(start):
    run = start(ALL)
    run.publish(1, make_version(1))
    run.send(1)
    run.sinks[0].keep([1])
    loading = run.sinks[0].tensors(1, LAYOUT)
    name, first = next(loading)
    run.publish(2, change(run.versions[1], 0.3, 2))
    run.send(2, base=1)
    found = {name: first, **dict(loading)}
    assert all(torch.equal(bits_of(found[one]), bits_of(run.versions[1][one])) for one in SHAPES)
    assert run.has(run.sinks[0], 1) and run.has(run.sinks[0], 2)


def test_a_failed_transfer_leaves_the_base_as_it_is(start):
    run = start(ALL)
    run.publish(1, make_version(1))
    run.send(1)
    run.publish(2, change(run.versions[1], 0.3, 2))
    stage = run.sinks[0].open(2, run.sinks[0]._whole[1]._packs, 0.0, base=1)
    assert stage.base(0) is not None
    stage.pack(0).zero_()
    stage.close(is_whole=False)
    assert run.has(run.sinks[0], 1)
    assert run.send(2, base=1)[0] == [None] and run.has(run.sinks[0], 2)


@settings(max_examples=25, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from([0.0, 0.01, 0.2, 0.6, 1.0]), st.integers(0, 99)), min_size=1, max_size=4
    ),
    st.sampled_from([500, 1 << 12]),
    st.integers(0, 1 << 16),
)
def test_random_changes_of_all_dtypes_come_out_exact_from_any_plan(changes, max_bytes, seed):
    """Without a network: what sources and a sink do with each pack, whose size is another one each time."""
    random, source = Random(seed), Snapshots(RUNTIME, keeps_sent=True)
    regions = [one for one in ALL + SOME if random.random() < 0.6] or ALL
    stages, version, base = Stages(regions, RUNTIME), make_version(seed), 0
    for number, (share, at) in enumerate([(1.0, 0), *changes], 1):
        version = change(version, share, at)
        parts = [Part(name, tuple(values.shape), 0, 0, values) for name, values in version.items()]
        assert source.take(number, parts, DTYPES)
        sizes = {name: ITEM_BYTES[dtype] for name, dtype in DTYPES.items()}
        most = max_bytes << random.randrange(3)
        packs = make_packs(plan_parcels([source.regions], [regions], sizes, max_bytes=most), most)
        reading, stage = source.open(number, packs, 0.0, base), stages.open(number, packs, 0.0, base)
        for index, pack in enumerate(packs):
            new_B = reading.pack(index)
            head_B, body_B = shorten(reading.base(index), new_B, pack.width)
            head = Head.read(head_B, pack.num_bytes, "a pack")
            assert len(body_B) <= pack.num_bytes and head.num_bytes == len(body_B)
            if head.is_whole:
                stage.pack(index).copy_(body_B)
            else:
                head.apply(body_B.clone(), stage.base(index))
            assert torch.equal(stage.pack(index), new_B)
        reading.close(is_whole=True)
        stage.close(is_whole=True)
        base = number
        found = dict(stages.tensors(number, LAYOUT))
        for name, rectangle in regions:
            expected = version[name][rectangle.slices]
            assert torch.equal(bits_of(found[name][rectangle.slices]), bits_of(expected))


@pytest.mark.parametrize(("share", "is_shorter"), [(0.0, True), (0.05, True), (0.5, True), (1.0, False)])
def test_a_device_compares_where_the_bytes_lie(share, is_shorter):
    version = make_version(1)
    old_B, new_B = (
        bits_of(one["wide"]).view(-1).view(torch.uint8) for one in (version, change(version, share, 2))
    )
    here, there = compare_on_host(old_B, new_B, 2), compare_on_device(old_B, new_B, 2)
    assert (there is not None) == (here is not None) == is_shorter
    if here is not None and there is not None:
        assert (here.code, here.num_changed, here.data.tobytes()) == (
            there.code,
            there.num_changed,
            there.data.tobytes(),
        )


@settings(max_examples=60, deadline=None)
@given(st.data(), st.sampled_from([1, 2, 4, 8]), st.integers(0, 300))
def test_a_comparison_as_a_gpu_makes_it_gives_the_same_difference(data, width, num_elements):
    size = width * num_elements
    old_B = torch.frombuffer(
        bytearray(data.draw(st.binary(min_size=size, max_size=size)) or b"0"), dtype=torch.uint8
    )
    new_B = old_B.clone()
    old_B, new_B = old_B[:size], new_B[:size]
    for position in data.draw(st.lists(st.integers(0, max(0, size - 1)), max_size=40)):
        new_B[position : position + 1] ^= 1 << position % 8
    here, there = compare_on_host(old_B, new_B, width), compare_on_device(old_B, new_B, width)
    assert (here is None) == (there is None)
    if here is not None and there is not None:
        assert (here.code, here.width, here.num_changed) == (there.code, there.width, there.num_changed)
        assert here.data.tobytes() == there.data.tobytes()
        assert len(there.data) < size
