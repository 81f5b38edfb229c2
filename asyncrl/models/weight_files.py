"""Safetensors of a model folder: which files hold its weights, and what their headers say.

Must never read a tensor.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from pathlib import Path

WEIGHTS = "model.safetensors"
INDEX = f"{WEIGHTS}.index.json"
MAX_HEADER_BYTES = 100_000_000
"""As safetensors allows."""


@dataclass(frozen=True)
class Header:
    """Header of a file: the shape of each tensor, and the size of the whole file."""

    shapes: dict[str, tuple[int, ...]]
    num_bytes: int


def read_header(file: Path) -> Header:
    """Return the header of a safetensors file. Raises OSError, or ValueError if it is none."""
    try:
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > MAX_HEADER_BYTES:
                raise ValueError(f"a header of {length} bytes")
            entries = json.loads(stream.read(length))
        entries.pop("__metadata__", None)
        shapes = {name: tuple(entry["shape"]) for name, entry in entries.items()}
        end = max((entry["data_offsets"][1] for entry in entries.values()), default=0)
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, struct.error) as error:
        raise ValueError(f"'{file}' is not a safetensors file: {error}") from error
    return Header(shapes, 8 + length + end)


def read_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor in the safetensors of `folder`, by name; none if one cannot be read."""
    try:
        headers = [read_header(file) for file in sorted(folder.glob("*.safetensors"))]
    except (OSError, ValueError):
        return {}
    return {name: shape for header in headers for name, shape in header.shapes.items()}


def read_index(folder: Path) -> dict[str, str]:
    """Return the file of each tensor as the index of `folder` says, nothing without an index.

    Raises:
        OSError, ValueError: It cannot be read.
    """
    if not (folder / INDEX).is_file():
        return {}
    try:
        return {
            name: str(file) for name, file in json.loads((folder / INDEX).read_bytes())["weight_map"].items()
        }
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error
