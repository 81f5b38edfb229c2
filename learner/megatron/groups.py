"""The process groups of one learner rank.

Owns the process-wide state of torch.distributed and of Megatron's `parallel_state`: one learner rank
per process at a time. Every collective has a deadline: the group's timeout.
"""

from __future__ import annotations

import datetime

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from asyncrl.errors import ConfigError
from learner.backend import Placement


def start_groups(placement: Placement, tp: int, seed: int) -> None:
    """Join the ranks of the learner and cut them into tensor- and data-parallel groups.

    Raises:
        ConfigError: The ranks do not divide by `tp`, or several ranks have no rendezvous.
    """
    if placement.world_size % tp:
        raise ConfigError(f"{placement.world_size} learner ranks do not divide by learner.tp: {tp}")
    if placement.world_size > 1 and not placement.rendezvous:
        raise ConfigError(
            f"{placement.world_size} learner ranks need a rendezvous", hint='Give it as "host:port"'
        )
    has_cuda = torch.cuda.is_available()
    if has_cuda:
        torch.cuda.set_device(placement.rank % torch.cuda.device_count())
    alone = placement.world_size == 1
    dist.init_process_group(
        "nccl" if has_cuda else "gloo",
        store=dist.HashStore() if alone else None,
        init_method=None if alone else f"tcp://{placement.rendezvous}",
        rank=placement.rank,
        world_size=placement.world_size,
        timeout=datetime.timedelta(seconds=placement.timeout_s),
    )
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tp,
        create_gloo_process_groups=False,
        distributed_timeout_minutes=max(1, round(placement.timeout_s / 60)),
    )
    tensor_parallel.model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
    torch.manual_seed(seed)


def stop_groups() -> None:
    """Leave all groups; another learner rank may then start in this process."""
    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()


def rank_device() -> torch.device:
    """Return where this rank's tensors live."""
    return (
        torch.device("cuda", torch.cuda.current_device())
        if torch.cuda.is_available()
        else torch.device("cpu")
    )


def tensor_group() -> dist.ProcessGroup:
    """Return the group that shares one copy of the model."""
    group: dist.ProcessGroup = parallel_state.get_tensor_model_parallel_group()
    return group


def data_group() -> dist.ProcessGroup:
    """Return the group whose ranks hold the same part of the model and train different rows."""
    group: dist.ProcessGroup = parallel_state.get_data_parallel_group()
    return group
