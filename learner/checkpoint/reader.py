"""Reader of checkpoint state written by any layout of ranks: a rank reads the pieces that it needs.

Must never read more of a file than the pieces that overlap. Invariant: a piece is filled completely
or CheckpointError is raised.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

import msgspec
import torch
from safetensors import SafetensorError, safe_open

from asyncrl.core.errors import CheckpointError
from learner.checkpoint.pieces import Piece, matrix_shape, whole
from learner.checkpoint.snapshot import piece_key, tensor_file

HINT = "The checkpoint is incomplete or damaged"


@dataclass(frozen=True)
class _Stored:
    rank: int
    index: int
    piece: Piece
    step: float


class _PieceRecord(msgspec.Struct, frozen=True):
    name: str
    shape: tuple[int, ...]
    rows: tuple[int, int]
    columns: tuple[int, int]
    step: float


class _Record(msgspec.Struct, frozen=True):
    """Record that one rank wrote beside its tensors, see `Snapshot.write`."""

    layout: dict[str, object]
    extra: dict[str, object]
    pieces: tuple[_PieceRecord, ...]


class _Slices(Protocol):
    def __getitem__(self, place: tuple[slice, slice]) -> torch.Tensor: ...


class _TensorFile(Protocol):
    """Used part of an open file of `safetensors`."""

    def keys(self) -> Iterable[str]: ...

    def get_slice(self, name: str) -> _Slices: ...

    def get_tensor(self, name: str) -> torch.Tensor: ...


class StateReader:
    """The state in one folder.

    Example:
        with StateReader(folder) as reader:
            weight = reader.read_whole("model.norm.weight")

    Raises:
        CheckpointError: Records are missing or unreadable.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[int, _TensorFile] = {}
        self._records = _read_records(folder)
        self._stored: dict[str, list[_Stored]] = defaultdict(list)
        for rank, record in enumerate(self._records):
            for index, row in enumerate(record.pieces):
                piece = Piece(row.name, row.shape, row.rows, row.columns)
                self._stored[piece.name].append(_Stored(rank, index, piece, row.step))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._files.clear()

    @property
    def layout(self) -> Mapping[str, object]:
        """The layout of the ranks that wrote the state."""
        return self._records[0].layout

    @property
    def extra(self) -> Mapping[str, object]:
        """The plain values that went with it."""
        return self._records[0].extra

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name and full shape of every parameter."""
        return {name: stored[0].piece.shape for name, stored in sorted(self._stored.items())}

    def read(self, piece: Piece, kind: str, into: torch.Tensor) -> None:
        """Copy the values of `piece` into the contiguous vector `into`.

        Raises:
            CheckpointError: The state does not hold all of it, or another shape of that name.
        """
        target = into.view(piece.num_rows, piece.num_columns)
        num_missing = piece.num_elements
        for stored in self._stored_of(piece):
            shared = piece.overlap(stored.piece)
            if shared is None:
                continue
            try:
                values = self._file(stored.rank).get_slice(piece_key(stored.index, kind))
                target[shared.within(piece)] = values[shared.within(stored.piece)].to(into.device)
            except SafetensorError as error:
                raise CheckpointError(f"{self._folder}: {error}", hint=HINT) from error
            num_missing -= shared.num_elements
        if num_missing:
            raise CheckpointError(f"{self._folder} lacks {num_missing} values of {piece.name}", hint=HINT)

    def read_whole(self, name: str, kind: str = "main") -> torch.Tensor:
        """Return a full parameter, float32."""
        shape = self.shapes[name]
        tensor = torch.empty(matrix_shape(shape), dtype=torch.float32)
        self.read(whole(name, shape), kind, tensor.view(-1))
        return tensor.view(shape)

    def step(self, piece: Piece) -> float:
        """Return how many updates AdamW had made to the parameter of `piece`."""
        return self._stored_of(piece)[0].step

    def generators(self, rank: int) -> dict[str, torch.Tensor]:
        """Return the generator states that `rank` wrote; with fewer ranks than now they serve in turn."""
        file = self._file(rank % len(self._records))
        prefix = "generator."
        names = [key for key in list(file.keys()) if key.startswith(prefix)]
        return {name.removeprefix(prefix): file.get_tensor(name) for name in names}

    def _stored_of(self, piece: Piece) -> list[_Stored]:
        stored = self._stored.get(piece.name, [])
        if not stored or stored[0].piece.shape != piece.shape:
            found = f"has it as {stored[0].piece.shape}" if stored else "has no such parameter"
            raise CheckpointError(
                f"this model has {piece.name} as {piece.shape}, {self._folder} {found}",
                hint="The checkpoint is of another model: resume with the model that the run began with",
            )
        return stored

    def _file(self, rank: int) -> _TensorFile:
        if rank not in self._files:
            path = tensor_file(self._folder, rank)
            try:
                self._files[rank] = safe_open(path, "pt")
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"{path}: {error}", hint=HINT) from error
        return self._files[rank]


def _read_records(folder: Path) -> list[_Record]:
    paths = sorted(folder.glob("rank-*.json"))
    try:
        records = [msgspec.convert(json.loads(path.read_text()), _Record) for path in paths]
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder}: {error}", hint=HINT) from error
    if not records or len(records) != records[0].layout.get("world_size"):
        raise CheckpointError(f"{folder} holds the state of {len(records)} ranks", hint=HINT)
    return records
