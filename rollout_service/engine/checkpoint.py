"""Names, shapes and dtypes of the checkpoint that an engine was started from. Imports no engine."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from safetensors import safe_open

from asyncrl.core.errors import EngineError

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
    index = folder / "model.safetensors.index.json"
    if index.exists():
        files = sorted({folder / file for file in json.loads(index.read_text())["weight_map"].values()})
    else:
        files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise EngineError(f"{folder} has no safetensors files", hint="Save the model with save_pretrained")
    found: dict[str, CheckpointTensor] = {}
    for file in files:
        found.update(_read_file(file, file.stat().st_mtime_ns))
    return found


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
