"""Recorder of a weight loader: where it puts which rectangles of the checkpoint, learned without any bytes.

The loader runs once over tensors on torch's meta device, which have sizes, strides and an offset but no
storage: torch itself follows narrow, chunk, view, transpose and indexing. A dispatch mode sees the `copy_` at
the end, reads both views and runs neither, so the parameters may be those of a living engine. Whole copies on
the way (`contiguous`, `clone`, casts) are followed. Invariant: a loader that computes is never misread;
anything else that it does to a checkpoint's tensor or to a parameter raises.
Rectangles hold for parameters as the loader sees them: before an engine packs, pads or quantises them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from weight_sync.memory.manifest import TensorSpec
from weight_sync.rectangles.rectangle import Placement, Rectangle
from weight_sync.rectangles.strides import NotARectangle, View, match

Load = Callable[[Iterable[tuple[str, torch.Tensor]]], object]
"""`load_weights` of a model: takes (name, tensor) of the checkpoint, one after another."""

_ATEN = torch.ops.aten
_WHOLE_COPIES = (_ATEN.clone.default, _ATEN._to_copy.default)
_FILLS = (_ATEN.fill_.Scalar, _ATEN.fill_.Tensor, _ATEN.zero_.default)


class LoaderComputes(NotARectangle):
    """A loader does something to a checkpoint's tensor that is neither a view nor a copy."""


@dataclass(frozen=True)
class Filled:
    """A rectangle of a parameter that the loader fills with one value, such as padding of a vocabulary."""

    holder: str
    local: Rectangle
    value: float


@dataclass
class Recording:
    """Outcome of a loader's run.

    Attributes:
        unread: Tensors of the checkpoint that it took nothing of, such as experts of other ranks.
    """

    placements: list[Placement] = field(default_factory=list)
    filled: list[Filled] = field(default_factory=list)
    unread: set[str] = field(default_factory=set)


@torch.no_grad()
def record(load: Load, holders: Mapping[str, torch.Tensor], checkpoint: Iterable[TensorSpec]) -> Recording:
    """Return the placements that `load` makes of the checkpoint's tensors.

    Args:
        holders: The parameters by name, dense ones, on any device; none of their elements is changed.

    Raises:
        LoaderComputes: The loader is no mere arrangement of the checkpoint's elements.
        NotARectangle: It leaves part of a parameter unwritten, or writes an element twice.
    """
    sources = {
        spec.name: torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device="meta")
        for spec in checkpoint
    }
    recorder = _Recorder(sources, holders)
    with recorder:
        load(sources.items())
    _check_cover(recorder.recording, holders)
    return recorder.recording


class _Recorder(TorchDispatchMode):
    def __init__(self, sources: Mapping[str, torch.Tensor], holders: Mapping[str, torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recording = Recording(unread=set(sources))
        self._sources = {_storage(tensor): (name, tuple(tensor.shape)) for name, tensor in sources.items()}
        self._holders: dict[int, tuple[str, tuple[int, ...]]] = {}
        for name, tensor in holders.items():
            if not tensor.is_contiguous() or tensor.storage_offset():
                raise NotARectangle(f"the parameter '{name}' is itself a view")
            self._holders.setdefault(_storage(tensor), (name, tuple(tensor.shape)))
        self._copies: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by storage: the copy and its origin

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: object,
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        tensors = list(_find_tensors((*args, *kwargs.values())))
        read = [tensor for tensor in tensors if self._is_source(tensor)]
        written = tensors[0] if tensors and self._is_holder(tensors[0]) else None
        if func is _ATEN.copy_.default and (read or written is not None):
            self._note_copy(*tensors)
            return tensors[0]
        if func in _FILLS and written is not None:
            self._note_fill(written, args[1] if len(args) > 1 else 0.0)
            return written
        if func in _WHOLE_COPIES and read:
            return self._note_whole_copy(tensors[0], kwargs.get("dtype"))
        if read and not _makes_views(func):
            raise LoaderComputes(f"the loader calls {func} on {[self._name_of(tensor) for tensor in read]}")
        if func._schema.is_mutable and written is not None:
            raise LoaderComputes(f"the loader calls {func} on the parameter '{self._holder_of(written)[0]}'")
        return func(*args, **kwargs)

    def _note_copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        if not self._is_holder(target):
            raise LoaderComputes(f"the loader copies '{self._name_of(source)}' into what is no parameter")
        holder, shape = self._holder_of(target)
        if not self._is_source(source):
            raise LoaderComputes(f"the loader copies to '{holder}' what is of no tensor of the checkpoint")
        name = self._name_of(source)
        view = self._view_of(source.expand(target.shape))
        for pair in match(view, _view(target, shape)):
            self.recording.placements.append(Placement(name, pair.source, holder, pair.target, pair.order))
            self.recording.unread.discard(name)

    def _note_fill(self, target: torch.Tensor, filler: object) -> None:
        holder, shape = self._holder_of(target)
        assert isinstance(filler, int | float | torch.Tensor), filler
        view, value = _view(target, shape), float(filler)
        self.recording.filled += [Filled(holder, pair.target, value) for pair in match(view, view)]

    def _note_whole_copy(self, origin: torch.Tensor, wanted: object) -> torch.Tensor:
        dtype = wanted if isinstance(wanted, torch.dtype) else origin.dtype
        made = torch.empty(origin.shape, dtype=dtype, device="meta")
        self._copies[_storage(made)] = (made, origin)
        return made

    def _is_source(self, tensor: torch.Tensor) -> bool:
        return _storage(tensor) in self._sources or _storage(tensor) in self._copies

    def _is_holder(self, tensor: torch.Tensor) -> bool:
        return _storage(tensor) in self._holders

    def _holder_of(self, tensor: torch.Tensor) -> tuple[str, tuple[int, ...]]:
        return self._holders[_storage(tensor)]

    def _name_of(self, tensor: torch.Tensor) -> str:
        while _storage(tensor) in self._copies:
            tensor = self._copies[_storage(tensor)][1]
        return self._sources[_storage(tensor)][0]

    def _view_of(self, tensor: torch.Tensor) -> View:
        """Return the view of the checkpoint's tensor that has these elements."""
        while (found := self._copies.get(_storage(tensor))) is not None:
            copy, origin = found
            if (tensor.shape, tensor.stride(), tensor.storage_offset()) != (copy.shape, copy.stride(), 0):
                raise LoaderComputes(f"the loader takes part of a copy of '{self._name_of(tensor)}'")
            tensor = origin
        return _view(tensor, self._sources[_storage(tensor)][1])


def _check_cover(recording: Recording, holders: Mapping[str, torch.Tensor]) -> None:
    """Refuse a recording in which an element of a parameter comes from nowhere or from two places."""
    written: dict[str, list[Rectangle]] = {}
    for placement in recording.placements:
        written.setdefault(placement.holder, []).append(placement.local)
    for filled in recording.filled:
        written.setdefault(filled.holder, []).append(filled.local)
    seen: set[int] = set()
    for name, tensor in holders.items():
        if _storage(tensor) in seen:
            continue  # a tied parameter, recorded under its first name
        seen.add(_storage(tensor))
        places = written.get(name, [])
        num_written = sum(place.num_elements for place in places)
        if num_written != tensor.numel() or _overlap(places):
            raise NotARectangle(
                f"the loader writes {num_written} of {tensor.numel()} elements of '{name}'"
                if num_written != tensor.numel()
                else f"the loader writes elements of '{name}' twice"
            )


def _overlap(places: list[Rectangle]) -> bool:
    """Tell whether two of the rectangles have an element in common."""
    by_start = sorted(places, key=lambda place: place.start[:1])
    live: list[Rectangle] = []
    for place in by_start:
        live = [one for one in live if not one.start or one.stop[0] > place.start[0]]
        if any(one.meet(place) for one in live):
            return True
        live.append(place)
    return False


def _find_tensors(values: Iterable[object]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _find_tensors(value)


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _view(tensor: torch.Tensor, base: tuple[int, ...]) -> View:
    return View(base, tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset()))


def _makes_views(func: OpOverload) -> bool:
    schema = func._schema
    return not schema.is_mutable and any(result.alias_info is not None for result in schema.returns)
