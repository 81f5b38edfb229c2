"""Stages of a worker: tensors are made of packs, and only of versions that came whole and may be loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from asyncrl.core.errors import SyncError
from asyncrl.core.runtime.threads import ThreadRuntime
from tests.different import assert_all_differ
from weight_sync.direct.stage import Stages
from weight_sync.memory.manifest import TensorSpec, plan
from weight_sync.memory.parts import Part
from weight_sync.rectangles.packs import Parameters, make_packs, place_parts
from weight_sync.rectangles.parcels import Region, plan_parcels
from weight_sync.rectangles.rectangle import Rectangle

SHAPES = {
    "whole": (8, 6),
    "rows": (8, 6),
    "columns": (8, 6),
    "scattered": (9, 4),
    "one": (),
    "unread": (5, 4),
}
READ: list[Region] = [
    ("whole", Rectangle((0, 0), (8, 6))),
    ("rows", Rectangle((2, 0), (5, 6))),
    *(("scattered", Rectangle((row, 1), (row + 1, 4))) for row in (0, 4, 8)),
    ("columns", Rectangle((0, 3), (8, 6))),
    ("one", Rectangle((), ())),
]
DTYPES = {**dict.fromkeys(SHAPES, "bfloat16"), "columns": "float32", "one": "float32"}
LAYOUT = plan([TensorSpec(name, DTYPES[name], shape) for name, shape in SHAPES.items()], 1 << 10)
SPLIT_AT = 3
"""Row from which the second source has a tensor."""


def version(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator).to(getattr(torch, DTYPES[name]))
        for name, shape in SHAPES.items()
    }


def poisoned(*shape: Any, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor that is NaN, or bytes that are."""
    made = torch.empty(*shape, dtype=dtype)
    return made.fill_(torch.nan if dtype.is_floating_point else 255)


def transfer(
    stages: Stages, number: int, tensors: Mapping[str, torch.Tensor], num_packs: int | None = None
) -> None:
    """Bring a version from two sources, or only the first packs of it."""
    sources = []
    for first, last in ((0, SPLIT_AT), (SPLIT_AT, None)):
        rows = {name: tensor.reshape(*tensor.shape[:1] or (1,), -1) for name, tensor in tensors.items()}
        parts = [
            Part(name, tuple(tensors[name].shape), first, 0, all_RC[first:last])
            for name, all_RC in rows.items()
            if len(all_RC) > first
        ]
        sources.append(place_parts(parts))
    held = [[(p.tensor, p.rectangle) for p in placements] for placements, _ in sources]
    sizes = {name: tensor.itemsize for name, tensor in tensors.items()}
    packs = make_packs(plan_parcels(held, [stages.regions], sizes, max_bytes=64), 64)
    assert len(packs) > 3
    store = stages.open(number, packs, 0.0)
    dtypes = {name: tensor.dtype for name, tensor in tensors.items()}
    for index, pack in enumerate(packs[:num_packs]):
        Parameters(*sources[pack.source], dtypes).read(pack, store.pack(index))
    store.close(is_whole=num_packs is None)


def load(stages: Stages, number: int) -> dict[str, torch.Tensor]:
    return dict(stages.tensors(number, LAYOUT))


def check(found: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor]) -> None:
    """What the worker reads is the version's, and the shapes and dtypes are those of the checkpoint."""
    assert list(found) == list(SHAPES)
    for name, tensor in tensors.items():
        assert (found[name].shape, found[name].dtype) == (tensor.shape, tensor.dtype)
    for name, rectangle in READ:
        assert torch.equal(found[name][rectangle.slices], tensors[name][rectangle.slices]), name


def test_a_stage_has_what_the_worker_reads_and_nothing_else() -> None:
    stages, tensors = Stages(READ, ThreadRuntime(), poisoned), version(1)
    transfer(stages, 1, tensors)
    found = load(stages, 1)
    check(found, tensors)
    for name, tensor in found.items():
        num_read = sum(rectangle.num_elements for of, rectangle in READ if of == name)
        assert int((~tensor.isnan()).sum()) == num_read, name
    assert found["unread"].untyped_storage().nbytes() == 2


def test_a_tensor_that_came_in_one_piece_is_not_copied() -> None:
    stages, tensors = Stages(READ, ThreadRuntime()), version(1)
    transfer(stages, 1, tensors)
    first, second = load(stages, 1), load(stages, 1)
    shared = {name for name in SHAPES if first[name].data_ptr() == second[name].data_ptr()}
    assert shared == {"one"}, "the others come in two pieces, or are not whole"


def test_memory_is_used_again_once_the_last_view_of_a_tensor_is_gone() -> None:
    made: list[int] = []

    def counted(*shape: Any, dtype: torch.dtype) -> torch.Tensor:
        made.extend(shape if dtype == torch.uint8 else ())
        return poisoned(*shape, dtype=dtype)

    stages, tensors = Stages(READ, ThreadRuntime(), counted), version(1)
    transfer(stages, 1, tensors)
    made.clear()
    parts = []
    for name, tensor in stages.tensors(1, LAYOUT):
        parts += [(name, r, tensor[r.slices]) for of, r in READ if of == name]
    assert made == [2 * 48, 2 * 48, 4 * 48, 2 * 36]
    for name, rectangle, part in parts:
        assert torch.equal(part, tensors[name][rectangle.slices])
    del tensor, part, parts
    made.clear()
    for name, tensor in stages.tensors(1, LAYOUT):
        for of, rectangle in READ:
            assert of != name or torch.equal(tensor[rectangle.slices], tensors[name][rectangle.slices])
    assert made == [2 * 48, 2 * 48, 4 * 48], "a loop refers to one while the next is made"


def test_what_did_not_come_whole_or_at_all_cannot_be_loaded() -> None:
    stages = Stages(READ, ThreadRuntime())
    with pytest.raises(SyncError, match="version 1 is not on this worker"):
        stages.tensors(1, LAYOUT)
    transfer(stages, 1, version(1), num_packs=2)
    with pytest.raises(SyncError, match="version 1 is not on this worker"):
        stages.tensors(1, LAYOUT)
    transfer(stages, 1, version(2))
    check(load(stages, 1), version(2))


def test_a_new_version_frees_those_that_are_not_to_be_kept() -> None:
    stages, versions = Stages(READ, ThreadRuntime()), {number: version(number) for number in (1, 2, 3)}
    assert_all_differ(versions.values(), in_every_tensor=True)
    transfer(stages, 1, versions[1])
    stages.keep([1])
    transfer(stages, 2, versions[2])
    check(load(stages, 1), versions[1])
    loading = stages.tensors(1, LAYOUT)
    stages.keep([2])
    transfer(stages, 3, versions[3])
    check(dict(loading), versions[1])
    with pytest.raises(SyncError, match="version 1 is not on this worker"):
        stages.tensors(1, LAYOUT)
    for number in (2, 3):
        check(load(stages, number), versions[number])


def test_a_version_that_comes_again_and_breaks_is_gone() -> None:
    stages = Stages(READ, ThreadRuntime())
    transfer(stages, 1, version(1))
    stages.keep([1])
    transfer(stages, 1, version(2), num_packs=2)
    with pytest.raises(SyncError, match="version 1 is not on this worker"):
        stages.tensors(1, LAYOUT)
