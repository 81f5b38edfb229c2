"""Limits of the engine on a device, known before the engine is started.

Imports no vLLM: `plan` reads this. A test compares the limits with those that vLLM states.
"""

from __future__ import annotations

CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Of vLLM's attention on CPU. On GPUs one of its backends takes any head size."""


def find_unsupported_head(head_size: int, gpus: int) -> str:
    """Say why an engine on so many GPUs cannot run heads of this size; nothing if it can.

    >>> find_unsupported_head(128, gpus=0)
    ''
    """
    if gpus or head_size in CPU_HEAD_SIZES:
        return ""
    known = ", ".join(map(str, CPU_HEAD_SIZES))
    return f"vLLM on CPU has no attention for heads of {head_size}, only of {known}"
