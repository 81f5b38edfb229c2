"""One rank's state, copied to the host and written in the layout-independent format.

`rank-<r>.safetensors` holds the rank's pieces, `rank-<r>.json` says what each is: its parameter, its
rectangle, its optimizer step. A snapshot is taken between two steps and may be written by a thread
while training goes on: it owns its bytes. Must never use pickle.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import xxhash

from asyncrl.core.files.durable import sync_path
from learner.checkpoint.pieces import Piece, record_file
from learner.checkpoint.tensor_file import write_tensors
from weight_sync.copies.registered import make_pinned

KINDS = ("main", "exp_avg", "exp_avg_sq")
"""Tensors of a piece, each in float32: the parameter as the optimizer keeps it, and AdamW's two moments."""


@dataclass(frozen=True)
class PieceState:
    """A piece and its values.

    Attributes:
        values: For each kind a contiguous vector of `piece.num_elements` float32, row by row.
        step: Updates that AdamW has made to it.
    """

    piece: Piece
    values: Mapping[str, torch.Tensor]
    step: float


@dataclass(frozen=True)
class Snapshot:
    """The state of one rank on the host.

    Attributes:
        layout: Partition of the model over ranks; equal layouts resume bit by bit, generators included.
        pieces: State that this rank alone writes.
        generators: States of this rank's random generators.
        extra: Plain values that are the same on every rank: the schedule's position, for example.
    """

    rank: int
    layout: Mapping[str, object]
    pieces: tuple[PieceState, ...]
    generators: dict[str, torch.Tensor]
    extra: Mapping[str, object]

    @property
    def num_bytes(self) -> int:
        return sum(12 * state.piece.num_elements for state in self.pieces)

    def write(self, folder: Path) -> dict[str, str]:
        """Write into `folder`, which is made if need be, and sync; return each file's xxh3-128 digest, hex.

        The record comes last.
        """
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {f"generator.{name}": state for name, state in self.generators.items()}
        for index, state in enumerate(self.pieces):
            shape = (state.piece.num_rows, state.piece.num_columns)
            tensors |= {piece_key(index, kind): state.values[kind].view(shape) for kind in KINDS}
        path = tensor_file(folder, self.rank)
        digests = {path.name: write_tensors(path, tensors)}
        record = {
            "layout": dict(self.layout),
            "extra": dict(self.extra),
            "pieces": [asdict(state.piece) | {"step": state.step} for state in self.pieces],
        }
        path = record_file(folder, self.rank)
        text = json.dumps(record, sort_keys=True).encode()
        path.write_bytes(text)
        sync_path(path)
        return digests | {path.name: xxhash.xxh3_128_hexdigest(text)}


class HostCopies:
    """Copies of a rank's tensors in one buffer on the host, which is used again for the next checkpoint.

    The buffer is pinned if a tensor lives on a GPU. A second `take` overwrites the first's copies.
    """

    def __init__(self) -> None:
        self._buffer: torch.Tensor | None = None

    def take(self, tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Return a float32 copy of each, flat; the same tensors must come in the same order each time."""
        wanted = list(tensors)
        sizes = [tensor.numel() for tensor in wanted]
        is_cuda = any(tensor.is_cuda for tensor in wanted)
        if self._buffer is None:
            num_elements = sum(sizes)
            self._buffer = make_pinned(num_elements, self) if is_cuda else torch.empty(num_elements)
        assert len(self._buffer) == sum(sizes), "the state of a rank does not change its shape"
        copies = list(self._buffer.split(sizes))
        for copy, tensor in zip(copies, wanted, strict=True):
            copy.copy_(tensor.detach().reshape(-1), non_blocking=True)
        if is_cuda:
            torch.cuda.synchronize()
        return copies


def piece_key(index: int, kind: str) -> str:
    """Return the key of a piece's values in the rank's safetensors file."""
    return f"{index:06d}.{kind}"


def tensor_file(folder: Path, rank: int) -> Path:
    """Return where `rank` keeps its tensors."""
    return folder / f"rank-{rank:05d}.safetensors"


def remove_files(folder: Path, rank: int) -> None:
    """Remove what `rank` has written into `folder`, as far as the disk lets it."""
    for path in (tensor_file(folder, rank), record_file(folder, rank)):
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
