"""A recorded loader: what it reads of a checkpoint's tensors, whatever it does with it."""

from __future__ import annotations

import itertools
import mmap
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.core.errors import SyncError
from weight_sync.copies.to_gpu import PinnedCopies
from weight_sync.memory.manifest import TensorSpec, plan
from weight_sync.memory.staging import view_tensor
from weight_sync.rectangles import recorder as recording
from weight_sync.rectangles.parcels import Region
from weight_sync.rectangles.recorder import ReadRecorder
from weight_sync.rectangles.rectangle import Rectangle

Loader = Callable[[torch.Tensor], object]


def record(loader: Loader, w: torch.Tensor) -> list[Region]:
    with ReadRecorder([("before", torch.ones(3)), ("w", w), ("after", torch.ones(3))]) as recorder:
        loader(w)
    return recorder.regions


def numbered(*shape: int) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)


def covered(regions: list[Region], shape: tuple[int, ...]) -> np.ndarray:
    mask = np.zeros(shape, np.int8)
    for name, rectangle in regions:
        assert name == "w"
        mask[rectangle.slices] = 1
    return mask


READS: dict[str, tuple[Loader, tuple[int, ...], int]] = {
    "whole": (lambda w: torch.empty(4, 6).copy_(w), (4, 6), 1),
    "scalar": (lambda w: torch.empty(()).copy_(w), (), 1),
    "transposed": (lambda w: torch.empty(6, 4).copy_(w.t()), (4, 6), 1),
    "cast": (lambda w: w.bfloat16(), (4, 6), 1),
    "rows of a view": (lambda w: w.view(2, 2, 6)[1].clone(), (4, 6), 1),
    "flat": (lambda w: w.view(-1).clone(), (4, 6), 1),
    "chunk": (lambda w: w.chunk(2, 1)[1].clone(), (4, 6), 1),
    "narrow": (lambda w: w.narrow(0, 1, 2).clone(), (4, 6), 1),
    "every other row": (lambda w: w[::2].clone(), (4, 6), 2),
    "block": (lambda w: torch.empty(2, 3).copy_(w[1:3, 2:5]), (4, 6), 1),
    "permuted": (lambda w: w.permute(2, 0, 1).contiguous(), (2, 3, 4), 1),
    "heads interleaved": (lambda w: w.view(2, 3, 2, 4)[:, 1].clone(), (12, 4), 2),
    "all heads interleaved": (lambda w: w.view(2, 3, 2, 4).transpose(1, 2).clone(), (12, 4), 1),
    "expanded": (lambda w: w[:1].expand(4, 6).clone(), (2, 6), 1),
    "overlapping": (lambda w: w.unfold(0, 3, 1).clone(), (8,), 6),
    "computed": (lambda w: w[1:] + 1, (4, 6), 1),
    "concatenated": (lambda w: torch.cat([w[:1], w[2:3]]), (4, 6), 2),
    "summed": (lambda w: w[:, :2].sum().item(), (4, 6), 1),
    "one element": (lambda w: w[2, 3].item(), (4, 6), 1),
    "indexed": (lambda w: w[1:].index_select(0, torch.tensor([0])), (4, 6), 1),
    "set as a parameter": (lambda w: torch.empty(0).set_(w[1:]), (4, 6), 1),
}


@pytest.mark.parametrize("name", READS)
def test_what_an_operation_takes_in_is_read(name: str) -> None:
    loader, shape, count = READS[name]
    w = numbered(*shape)
    regions = record(loader, w)
    assert len(regions) == count
    wanted, start = np.zeros(shape, np.int8), w.data_ptr()
    with ReadAddresses() as read:
        loader(w)
    for address in read.addresses:
        if start <= address < start + w.nbytes:
            wanted.reshape(-1)[(address - start) // 4] = 1
    assert (covered(regions, shape) == wanted).all()


class ReadAddresses(torch.utils._python_dispatch.TorchDispatchMode):
    """Notes the address of each element that an operation takes in: one after the other, by its index."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if not recording._makes_views(func):
            for tensor in recording._find_tensors((*args, *(kwargs or {}).values())):
                for index in itertools.product(*map(range, tensor.shape)):
                    steps = zip(index, tensor.stride(), strict=True)
                    self.addresses.add(tensor.data_ptr() + 4 * sum(place * step for place, step in steps))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "loader",
    [
        lambda w: w.view(-1)[:9].clone(),  # a row and a half
        lambda w: w.view(-1)[2:14].clone(),
        lambda w: w.view(6, 4)[:, 0].clone(),  # a stride that does not fit into rows
        lambda w: w.view(torch.int16)[1, 4:6].clone(),  # elements of another size
    ],
)
def test_what_no_rectangles_describe_is_the_whole_tensor(loader: Loader) -> None:
    assert record(loader, numbered(4, 6)) == [("w", Rectangle.whole((4, 6)))]


def test_a_view_that_runs_on_beyond_its_tensor_is_all_of_that_tensor() -> None:
    memory = numbered(12)
    assert record(lambda _: memory[::3].clone(), memory[:3].view(1, 3)) == [("w", Rectangle.whole((1, 3)))]
    assert record(lambda _: memory[2:].clone(), memory[:6]) == [("w", Rectangle.whole((6,)))]


def test_tensors_and_views_without_elements_are_not_read() -> None:
    with ReadRecorder([("none", torch.empty(0, 3)), ("w", w := numbered(4, 6))]) as recorder:
        w[:0].clone()
        torch.empty(0).clone()
        w[3:].clone()
    assert recorder.regions == [("w", Rectangle((3, 0), (4, 6)))]


def test_more_rectangles_than_a_plan_can_use_are_the_whole_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "MANY", 3)
    assert len(record(lambda w: w[::2].clone(), numbered(6, 2))) == 3
    assert record(lambda w: w[::2].clone(), numbered(8, 2)) == [("w", Rectangle.whole((8, 2)))]


def test_views_alone_and_loads_to_the_meta_device_read_nothing() -> None:
    """vLLM counts a tensor's elements by a load into parameters without storage."""
    assert record(lambda w: w.view(2, 2, 6).transpose(0, 1)[1].chunk(2), numbered(4, 6)) == []
    assert record(lambda w: torch.empty(4, 6, device="meta").copy_(w), numbered(4, 6)) == []
    assert record(lambda w: w.to("meta"), numbered(4, 6)) == []


def test_a_loader_that_writes_into_the_checkpoint_is_refused() -> None:
    """It may be given a view of what a repeated load reads again."""
    with pytest.raises(SyncError, match="writes into 'w'"):
        record(lambda w: w[1:].mul_(2), numbered(4, 6))
    assert record(lambda w: torch.ones(6).add_(w[0]), numbered(4, 6)) == [("w", Rectangle((0, 0), (1, 6)))]


def test_a_load_does_what_it_does_without_the_recorder() -> None:
    w, loaded = numbered(4, 6), torch.zeros(2, 3)
    assert record(lambda w: loaded.copy_(w[1:3, 2:5]), w) == [("w", Rectangle((1, 2), (3, 5)))]
    assert torch.equal(loaded, w[1:3, 2:5])


def test_tensors_of_one_mapped_file_are_told_apart() -> None:
    specs = [TensorSpec(name, "bfloat16", (5, 3)) for name in "abc"]
    layout = plan(specs, 1 << 10)
    mapping = mmap.mmap(-1, layout.total_bytes)
    tensors = {entry.name: view_tensor(mapping, entry) for entry in layout.tensors}
    with ReadRecorder(tensors.items()) as recorder:
        tensors["b"][2:].clone()
        tensors["c"].t()[0].clone()
        torch.ones(3) + 1
    assert recorder.regions == [("b", Rectangle((2, 0), (5, 3))), ("c", Rectangle((0, 0), (5, 1)))]


class Passing(PinnedCopies):
    """`PinnedCopies` on a machine without a GPU: takes every copy apart, as if to a GPU."""

    def __init__(self) -> None:
        super(PinnedCopies, self).__init__()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func is not torch.ops.aten.copy_.default:
            return func(*args, **(kwargs or {}))
        target, source = args
        for row in range(len(target)):
            torch.empty(source[row].shape).copy_(source[row])
        return target


@pytest.mark.parametrize("is_above", [True, False])
def test_copies_that_another_mode_takes_over_are_recorded_above_and_below_it(is_above: bool) -> None:
    w, target = numbered(4, 6), torch.empty(2, 6)
    recorder = ReadRecorder([("w", w)])
    first, second = (Passing(), recorder) if is_above else (recorder, Passing())
    with first, second:
        target.copy_(w[1:3])
    assert (covered(recorder.regions, (4, 6)) == [[0], [1], [1], [0]]).all()
    assert len(recorder.regions) == (1 if is_above else 2)


@given(data=st.data(), shape=st.lists(st.integers(1, 6), min_size=1, max_size=3).map(tuple))
def test_a_chain_of_slices_and_transpositions_is_recorded_exactly(
    data: st.DataObject, shape: tuple[int, ...]
) -> None:
    w = numbered(*shape)
    view = w
    for _ in range(data.draw(st.integers(1, 3))):
        axis = data.draw(st.integers(0, view.dim() - 1))
        first = data.draw(st.integers(0, view.shape[axis] - 1))
        step = data.draw(st.integers(1, 3))
        view = view[(slice(None),) * axis + (slice(first, None, step),)]
        if data.draw(st.booleans()):
            view = view.transpose(0, axis)
    elements = set(view.reshape(-1).tolist())
    found = set(w[torch.from_numpy(covered(record(lambda _: view.clone(), w), shape)) == 1].tolist())
    assert found == elements


@given(data=st.data(), shape=st.lists(st.integers(1, 6), min_size=1, max_size=3).map(tuple))
def test_any_strided_view_is_covered(data: st.DataObject, shape: tuple[int, ...]) -> None:
    w = numbered(*shape)
    sizes = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    strides = data.draw(st.lists(st.integers(0, 9), min_size=len(sizes), max_size=len(sizes)))
    extent = sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    if extent >= w.numel():
        return
    view = w.as_strided(sizes, strides, data.draw(st.integers(0, w.numel() - 1 - extent)))
    found = set(w[torch.from_numpy(covered(record(lambda _: view.clone(), w), shape)) == 1].tolist())
    assert found >= set(view.reshape(-1).tolist())
