"""Pinned memory of any size on the host, registered with CUDA as a whole.

PyTorch's own pinned memory is rounded up to a power of two, up to twice what is needed, and never given back.
"""

from __future__ import annotations

import contextlib
import logging
import weakref

import torch

log = logging.getLogger(__name__)


def make_pinned(num_elements: int, owner: object) -> torch.Tensor:
    """Return float32 memory that stays pinned as long as `owner` lives; not pinned where CUDA refuses it."""
    buffer = torch.empty(num_elements, dtype=torch.float32)
    if num_elements and _is_registered(buffer):
        weakref.finalize(owner, _unregister, buffer).atexit = False
    return buffer


def _is_registered(buffer: torch.Tensor) -> bool:
    """Pin the memory of `buffer`, so that a GPU copies into it at the bus's rate; return whether it is."""
    code = torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), buffer.nbytes, 0)
    if not int(code):
        return True
    log.warning("copies from and to a GPU are slow: %d bytes cannot be pinned (%s)", buffer.nbytes, code)
    with contextlib.suppress(RuntimeError):  # CUDA keeps the error for whoever launches the next kernel
        torch.zeros(1, device="cuda")
    return False


def _unregister(buffer: torch.Tensor) -> None:
    """Let go of memory that `_is_registered` pinned, before it is freed."""
    torch.cuda.cudart().cudaHostUnregister(buffer.data_ptr())
