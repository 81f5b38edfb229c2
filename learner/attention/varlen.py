"""The variable-length kernel of torch (flash attention): packed queries and keys, no padding and no mask.

Shapes: P pieces, N queries, K keys, T keys that are handed in, h query heads, g key/value heads, D head size.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Collection
from dataclasses import dataclass

import torch

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:
    varlen_attn = None  # type: ignore[assignment]

from learner.attention.pieces import Pieces

log = logging.getLogger(__name__)

MAX_HEAD_SIZE = 256
NO_KERNEL = (
    f"torch {torch.__version__} has no varlen_attn with all options that packed rows take: they are attended "
    "as padded rows, with more memory. torch 2.12 has it"
)
_FIRST_CAPABILITY = (8, 0)
_OPTIONS = {"scale", "window_size", "enable_gqa"}


@dataclass(frozen=True, eq=False)
class VarlenPieces:
    """Pieces as the kernel is told of them; see `Pieces`."""

    query_offsets_P1: torch.Tensor
    key_offsets_P1: torch.Tensor
    key_source_K: torch.Tensor | None
    max_queries: int
    max_keys: int

    @classmethod
    def of(cls, pieces: Pieces) -> VarlenPieces:
        """Return the form of `pieces`, on the CPU."""
        query_offsets_P1, key_offsets_P1 = (
            torch.nn.functional.pad(counts_P.cumsum(0), (1, 0)).int()
            for counts_P in (pieces.num_queries_P, pieces.num_keys_P)
        )
        longest = (int(counts_P.max()) for counts_P in (pieces.num_queries_P, pieces.num_keys_P))
        return cls(query_offsets_P1, key_offsets_P1, pieces.key_source_K, *longest)

    def attend(
        self,
        query_NhD: torch.Tensor,
        key_TgD: torch.Tensor,
        value_TgD: torch.Tensor,
        scale: float | None,
        window: int | None = None,
    ) -> torch.Tensor:
        """Return the outputs [N, h, D]; see `RectanglePieces.attend`."""
        if self.key_source_K is not None:
            key_TgD, value_TgD = (x.index_select(0, self.key_source_K) for x in (key_TgD, value_TgD))
        output_NhD = varlen_attn(
            query_NhD,
            key_TgD,
            value_TgD,
            self.query_offsets_P1,
            self.key_offsets_P1,
            self.max_queries,
            self.max_keys,
            scale=scale,
            window_size=(-1 if window is None else window - 1, 0),
            enable_gqa=query_NhD.shape[1] != key_TgD.shape[1],
        )
        assert isinstance(output_NhD, torch.Tensor)
        return output_NhD


def has_kernel() -> bool:
    """Tell whether this torch has the kernel, with the options that are used here: 2.11 has not all."""
    return varlen_attn is not None and set(inspect.signature(varlen_attn).parameters) >= _OPTIONS


def can_run(device: torch.device, dtype: torch.dtype, head_sizes: Collection[int]) -> bool:
    """Tell whether the kernel runs on this device, for these sizes of a query's and of a value's head."""
    if device.type != "cuda" or dtype not in (torch.float16, torch.bfloat16):
        return False
    is_one_size = len(set(head_sizes)) == 1
    is_known = all(size % 8 == 0 and size <= MAX_HEAD_SIZE for size in head_sizes)
    if not (is_one_size and is_known and torch.cuda.get_device_capability(device) >= _FIRST_CAPABILITY):
        return False
    if not has_kernel():
        log.warning("%s", NO_KERNEL)
        return False
    return True
