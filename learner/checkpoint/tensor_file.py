"""Writer of safetensors files piece by piece, digested while the bytes are in the processor's cache.

The file is read by `safetensors` as any other. Invariant: no tensor is copied to be written, and the digest
is that of the bytes that were handed to the disk, whatever the disk made of them.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
import xxhash

from asyncrl.core.files.durable import sync_path

PIECE_BYTES = 1 << 20
DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Names of the format."""


def write_tensors(
    path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None
) -> str:
    """Write contiguous tensors of the host's memory, and sync; return the file's xxh3-128 digest, hex."""
    digest = xxhash.xxh3_128()
    with path.open("wb") as file:
        for piece in _pieces(tensors, metadata):
            file.write(piece)
            digest.update(piece)
    sync_path(path)
    return digest.hexdigest()


def _pieces(
    tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None
) -> Iterator[bytes | memoryview]:
    # As `safetensors` does: wide elements first, so that each lies at a multiple of its size.
    names = sorted(tensors, key=lambda name: (-tensors[name].itemsize, name))
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    at = 0
    for name in names:
        tensor = tensors[name]
        end = at + tensor.numel() * tensor.itemsize
        header[name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [at, end],
        }
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield struct.pack("<Q", len(text)) + text
    for name in names:
        values_B = tensors[name].detach().view(-1).view(torch.uint8).numpy()
        for start in range(0, len(values_B), PIECE_BYTES):
            yield values_B[start : start + PIECE_BYTES].data
