"""Stand-in for SGLang's compiled kernels on a CPU without AMX, where its layers take their torch paths.

SGLang imports many names and calls one operator: the hash that a request's seed is mixed with. The others
raise when they are called.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

__version__ = "0.0.0"
_MASK = 0xFFFFFFFF


def _rotate(x: torch.Tensor, bits: int) -> torch.Tensor:
    return ((x << bits) | (x >> (32 - bits))) & _MASK


def _mix(state: torch.Tensor, block: torch.Tensor) -> torch.Tensor:
    block = _rotate((block * 0xCC9E2D51) & _MASK, 15)
    state = state ^ ((block * 0x1B873593) & _MASK)
    return (_rotate(state, 13) * 5 + 0xE6546B64) & _MASK


def murmur_hash32_cpu(seed: torch.Tensor, positions: torch.Tensor, col_indices: torch.Tensor) -> torch.Tensor:
    """Return MurmurHash3 of (64-bit seed, 32-bit position, 32-bit column), uint32 [n, m].

    Products wrap in int64; their low 32 bits are exact all the same.
    """
    words = seed.view(torch.int64)
    state = _mix(torch.zeros_like(words), words & _MASK)
    state = _mix(state, (words >> 32) & _MASK)
    state = _mix(state, positions.to(torch.int64) & _MASK)
    state = _mix(state[:, None], (col_indices & _MASK)[None, :]) ^ 16
    state = ((state ^ (state >> 16)) * 0x85EBCA6B) & _MASK
    state = ((state ^ (state >> 13)) * 0xC2B2AE35) & _MASK
    return (state ^ (state >> 16)).to(torch.uint32)


_library = torch.library.Library("sgl_kernel", "FRAGMENT")
_library.define("murmur_hash32_cpu(Tensor seed, Tensor positions, Tensor col_indices) -> Tensor")
_library.impl("murmur_hash32_cpu", murmur_hash32_cpu, "CPU")


def __getattr__(name: str) -> Callable[..., None]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_args: object, **_options: object) -> None:
        raise NotImplementedError(f"sgl_kernel.{name} has no stand-in for a CPU")

    return missing
