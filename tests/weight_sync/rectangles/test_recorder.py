"""A recorded loader: the rectangles alone say what it does, and one that computes is refused."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import pytest
import torch

from weight_sync.memory.manifest import TensorSpec
from weight_sync.rectangles.packs import Parameters, make_packs
from weight_sync.rectangles.parcels import plan_parcels
from weight_sync.rectangles.recorder import LoaderComputes, Recording, record
from weight_sync.rectangles.rectangle import Placement, Rectangle
from weight_sync.rectangles.strides import NotARectangle

Loader = Callable[[torch.Tensor, torch.Tensor], object]
UNWRITTEN = -1.0


def record_one(loader: Loader, shape: Sequence[int], holder: torch.Tensor) -> Recording:
    spec = TensorSpec("w", "float32", tuple(shape))
    return record(lambda weights: loader(dict(weights)["w"], holder), {"h": holder}, [spec])


def carry(recording: Recording, w: torch.Tensor, holder: torch.Tensor) -> None:
    """Bring `w` to `holder` in parcels, by nothing but what was recorded."""
    whole = Rectangle.whole(w.shape)
    order = tuple(range(len(whole.long_axes)))
    source = Parameters([Placement("w", whole, "w", whole, order)], {"w": w}, {"w": w.dtype})
    sink = Parameters(recording.placements, {"h": holder}, {"w": w.dtype})
    wanted = [("w", placement.rectangle) for placement in recording.placements]
    for pack in make_packs(plan_parcels([[("w", whole)]], [wanted], {"w": 4}, max_bytes=32)):
        data_B = torch.zeros(pack.num_bytes, dtype=torch.uint8)
        source.read(pack, data_B)
        sink.write(pack, data_B)
    for filled in recording.filled:
        holder[filled.local.slices] = filled.value


def place_stacked(w: torch.Tensor, h: torch.Tensor) -> None:
    for index, rows in enumerate(w.chunk(3)):
        h[index].copy_(rows)


def place_padded(w: torch.Tensor, h: torch.Tensor) -> None:
    h[: len(w)].copy_(w)
    h[len(w) :].fill_(0)


@pytest.mark.parametrize(
    ("loader", "shape", "held", "count"),
    [
        (lambda w, h: h.copy_(w), (4, 6), (4, 6), 1),
        (lambda w, h: h.copy_(w), (), (), 1),
        (lambda w, h: h.copy_(w.t()), (4, 6), (6, 4), 1),
        (lambda w, h: h.copy_(w.t().contiguous()), (4, 6), (6, 4), 1),
        (lambda w, h: h.copy_(w.bfloat16()), (4, 6), (4, 6), 1),
        (lambda w, h: h.copy_(w.view(2, 2, 6)[1]), (4, 6), (2, 6), 1),
        (lambda w, h: h.copy_(w.view(-1)), (4, 6), (24,), 4),
        (lambda w, h: h.copy_(w.view(4, 6)), (24,), (4, 6), 4),
        (lambda w, h: h.copy_(w[::2]), (4, 6), (2, 6), 2),
        (lambda w, h: h.copy_(w[1:3, 2:5]), (4, 6), (2, 3), 1),
        (lambda w, h: h.copy_(w.permute(2, 0, 1)), (2, 3, 4), (4, 2, 3), 1),
        (lambda w, h: h.copy_(w.view(2, 3, 2, 4).transpose(1, 2).contiguous()), (12, 4), (2, 2, 3, 4), 6),
        (lambda w, h: h.copy_(w.unsqueeze(1)), (4, 6), (4, 1, 6), 1),
        (lambda w, h: h.copy_(w.unfold(0, 3, 1)), (8,), (6, 3), 6),
        (place_stacked, (9, 4), (3, 3, 4), 3),
        (place_padded, (5, 3), (8, 3), 1),
    ],
)
def test_the_rectangles_alone_bring_each_element_where_the_loader_does(
    loader: Loader, shape: tuple[int, ...], held: tuple[int, ...], count: int
) -> None:
    recording = record_one(loader, shape, torch.empty(held, device="meta"))
    w = torch.arange(max(1, torch.Size(shape).numel()), dtype=torch.float32).reshape(shape)
    theirs, ours = torch.full(held, UNWRITTEN), torch.full(held, UNWRITTEN)
    loader(w, theirs)
    carry(recording, w, ours)
    assert torch.equal(ours, theirs)
    assert len(recording.placements) == count


@pytest.mark.parametrize(
    ("loader", "words"),
    [
        (lambda w, h: h.copy_(w + 1), "aten.add"),
        (lambda w, h: h.copy_(torch.cat([w[:2], w[2:]])), "aten.cat"),
        (lambda w, h: h.add_(w), "aten.add_"),
        (lambda w, h: (h.copy_(w), h.mul_(2)), "'h'"),
        (lambda w, h: h.copy_(w[0]), "broadcasts"),
        (lambda w, h: w.sum().item(), "aten.sum"),
        (lambda w, h: h.copy_(torch.zeros(4, 6)), "no tensor of the checkpoint"),
        (lambda w, h: torch.empty(4, 6, device="meta").copy_(w), "no parameter"),
        (lambda w, h: h[:2].copy_(w.clone()[:2]), "part of a copy of 'w'"),
        (lambda w, h: h.view(-1)[:9].copy_(w.view(-1)[:9]), "a run of 9 elements over rows of 6"),
        (lambda w, h: h.view(-1)[2:14].copy_(w.view(-1)[2:14]), "of a tensor of shape (4, 6)"),
        (lambda w, h: h[:3].copy_(w[:3]), "18 of 24 elements of 'h'"),
        (lambda w, h: (h[:2].copy_(w[:2]), h[1:3].copy_(w[1:3])), "of 'h' twice"),
    ],
)
def test_a_loader_that_is_no_arrangement_of_the_checkpoint_is_refused(loader: Loader, words: str) -> None:
    with pytest.raises(NotARectangle, match=re.escape(words)):
        record_one(loader, (4, 6), torch.empty(4, 6, device="meta"))


def test_living_parameters_are_recorded_and_not_touched() -> None:
    holder = torch.full((6, 4), 3.0)
    recording = record_one(lambda w, h: h.copy_(w.t()), (4, 6), holder)
    assert len(recording.placements) == 1
    assert torch.equal(holder, torch.full((6, 4), 3.0))


def test_what_the_loader_does_not_read_is_named() -> None:
    holder = torch.empty(4, 6, device="meta")
    specs = [TensorSpec(name, "float32", (4, 6)) for name in ("w", "expert.7")]
    recording = record(lambda weights: holder.copy_(dict(weights)["w"]), {"h": holder}, specs)
    assert recording.unread == {"expert.7"}


def test_a_parameter_that_is_a_view_is_refused() -> None:
    with pytest.raises(NotARectangle, match="'h' is itself a view"):
        record_one(lambda w, h: h.copy_(w), (4, 6), torch.empty(6, 4, device="meta").t())


def test_loaders_that_compute_have_an_error_of_their_own() -> None:
    with pytest.raises(LoaderComputes, match="'w'"):
        record_one(lambda w, h: h.copy_(-w), (4, 6), torch.empty(4, 6, device="meta"))
