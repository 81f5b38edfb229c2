"""The checkpoint that an engine was started from: names, shapes and dtypes, and values. Imports no engine."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import safe_open

from asyncrl.core.errors import EngineError
from weight_sync.memory.manifest import Manifest, check_tensors

if TYPE_CHECKING:
    import torch

TORCH_DTYPES = {
    "BOOL": "bool",
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
}
"""Torch's name of a dtype by that of safetensors."""


@dataclass(frozen=True)
class CheckpointTensor:
    """Shape and dtype of one tensor in a checkpoint; `dtype` is torch's name."""

    shape: tuple[int, ...]
    dtype: str


def read_tensors(folder: Path) -> dict[str, CheckpointTensor]:
    """Return shape and dtype of every tensor of the safetensors checkpoint in `folder`, by name.

    A file is opened again only if it was written since: generation is paused while a load is checked.

    Raises:
        EngineError: There is no such checkpoint.
    """
    found: dict[str, CheckpointTensor] = {}
    for file in _find_files(folder):
        found.update(_read_file(file, file.stat().st_mtime_ns))
    return found


def read_values(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of the checkpoint in `folder`: views of mapped files. Raises EngineError as above."""
    for file in _find_files(folder):
        with safe_open(file, framework="pt") as checkpoint:
            for name in list(checkpoint.keys()):
                yield name, checkpoint.get_tensor(name)


def count_bytes(folder: Path) -> int:
    """Return the size of the checkpoint in `folder`. Raises EngineError as above."""
    return sum(file.stat().st_size for file in _find_files(folder))


def _find_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.exists():
        files = _read_index(index, index.stat().st_mtime_ns)
    else:
        files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise EngineError(f"{folder} has no safetensors files", hint="Save the model with save_pretrained")
    return files


def check_version(manifest: Manifest, expected: Mapping[str, CheckpointTensor], served: str) -> None:
    """Compare a version with the checkpoint's tensors; they may come in their dtype or in `served`.

    Raises:
        SyncError: They differ.
    """
    allowed = {dtype: {served, dtype} for dtype in {tensor.dtype for tensor in expected.values()}}
    check_tensors(
        manifest,
        {name: tensor.shape for name, tensor in expected.items()},
        {name: allowed[tensor.dtype] for name, tensor in expected.items()},
    )


@cache
def _read_index(index: Path, written_ns: int) -> list[Path]:
    """Return the files that `index` names, as it was when it was written last, at `written_ns`."""
    return sorted({index.parent / file for file in json.loads(index.read_text())["weight_map"].values()})


@cache
def _read_file(file: Path, written_ns: int) -> Mapping[str, CheckpointTensor]:
    """Return the tensors of `file` as it was when it was written last, at `written_ns`."""
    found: dict[str, CheckpointTensor] = {}
    with safe_open(file, framework="pt") as checkpoint:
        for name in list(checkpoint.keys()):
            piece = checkpoint.get_slice(name)
            dtype = str(piece.get_dtype())
            found[name] = CheckpointTensor(tuple(piece.get_shape()), TORCH_DTYPES.get(dtype, dtype))
    return found
