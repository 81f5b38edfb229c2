"""Device of a learner rank: a GPU if the configuration gives it one, else the CPU, whatever the machine has.

Code that a rank runs later asks `torch.cuda.is_initialized()`: whether this process computes on a GPU.
"""

from __future__ import annotations

import os

import torch

from asyncrl.core.config.gpus import memory_share
from asyncrl.core.config.sections.learner import DETERMINISTIC
from asyncrl.core.errors import ConfigError

VISIBLE = "CUDA_VISIBLE_DEVICES"
BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
"""Of torch.distributed, between ranks on a type of device."""


def claim_device(gpus: float, rank: int, *, is_deterministic: bool = False) -> torch.device:
    """Return `choose_device`; without a GPU hide all of them from this process, and from libraries in it.

    To be called before the backends are imported: Megatron-core binds functions for what it finds.

    Args:
        is_deterministic: Every operation of this process repeats its result, or raises RuntimeError.
    """
    if is_deterministic:
        os.environ.update(DETERMINISTIC if gpus else {})  # a replay's ranks are started without it
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    if not gpus and not torch.cuda.is_initialized():
        os.environ[VISIBLE] = ""
    return choose_device(gpus, rank)


def choose_device(gpus: float, rank: int) -> torch.device:
    """Return where a rank computes; a GPU is the process's current one from now on.

    Args:
        gpus: `learner.gpus`: GPUs of each rank. With a share of one the allocator gets that share of its
            memory: what goes beyond is an OutOfMemoryError here, and not one of the engine beside it.
        rank: Of the learner. Where a process sees several GPUs, as without Ray, ranks take them in turn.

    Raises:
        ConfigError: The rank is to have a GPU and PyTorch finds none.
    """
    if not gpus:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError(
            f"learner.gpus is {gpus:g}, and PyTorch {torch.__version__} finds no GPU in this process",
            hint="'asyncrl doctor' compares driver and packages; learner.gpus: 0 trains on the CPU",
        )
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    if (share := memory_share(gpus)) is not None:
        torch.cuda.set_per_process_memory_fraction(share, device)
    return device
