"""The process group of one fsdp2 learner rank.

Owns the start and the end of torch.distributed: one learner rank per process. Further backends of
the same rank (a critic, a reference) join its group; the one that started it also ends it, last.
Every collective has a deadline: the group's timeout.
"""

from __future__ import annotations

import datetime
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from asyncrl.core.errors import ConfigError
from learner.backend import Placement
from learner.numerics.device import BACKENDS, choose_device
from learner.numerics.transfer import send


@dataclass(frozen=True)
class RankGroup:
    """All ranks, seen from this one.

    Attributes:
        device: Where this rank computes.
        is_owner: This object started the group, and so ends it.
        store: In which the ranks met, kept while their group may ask it.
    """

    rank: int
    size: int
    device: torch.device
    mesh: DeviceMesh
    is_owner: bool
    store: dist.Store | None = None

    def all_reduce(
        self, values: torch.Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
    ) -> torch.Tensor:
        """Return `values` reduced over all ranks, on the device; those of a lone rank where they are."""
        if self.size > 1:
            values = send(values, self.device)
            dist.all_reduce(values, op)
        return values

    def barrier(self) -> None:
        """Wait for all ranks; raises at the group's timeout."""
        self.all_reduce(torch.zeros(1)).item()

    def stop(self) -> None:
        """Leave the group, if this object started it."""
        if self.is_owner and dist.is_initialized():
            dist.destroy_process_group()


def join_group(placement: Placement, gpus: float, seed: int) -> RankGroup:
    """Join the ranks of the learner, each on its device; the first time in a process this starts the group.

    Args:
        gpus: `learner.gpus`.

    Raises:
        ConfigError: Several ranks have no rendezvous, or the process is another rank already; or there is no
            GPU.
    """
    is_owner = not dist.is_initialized()
    device = choose_device(gpus, placement.rank)
    store = _start(placement, device) if is_owner else None
    if is_owner:
        torch.manual_seed(seed)
    elif (dist.get_rank(), dist.get_world_size()) != (placement.rank, placement.world_size):
        raise ConfigError(
            f"this process is learner rank {dist.get_rank()} of {dist.get_world_size()} already, "
            f"and cannot also be {placement.rank} of {placement.world_size}",
            hint="One learner rank per process",
        )
    world = dist.group.WORLD
    assert world is not None, "the group has just been started"
    return RankGroup(
        rank=placement.rank,
        size=placement.world_size,
        device=device,
        # From the group itself: a mesh of its own would make groups that have PyTorch's timeout.
        mesh=DeviceMesh.from_group(world, device.type),
        is_owner=is_owner,
        store=store,
    )


def _start(placement: Placement, device: torch.device) -> dist.Store:
    alone = placement.world_size == 1
    if not alone and not placement.rendezvous:
        raise ConfigError(
            f"{placement.world_size} learner ranks need a rendezvous", hint='Give it as "host:port"'
        )
    store = dist.HashStore() if alone else placement.join_store()
    dist.init_process_group(
        BACKENDS[device.type],
        store=store,
        rank=placement.rank,
        world_size=placement.world_size,
        timeout=datetime.timedelta(seconds=placement.timeout_s),
    )
    return store
