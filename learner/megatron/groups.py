"""The process groups of one learner rank.

Owns the process-wide state of torch.distributed and of Megatron's `parallel_state`: one learner rank
per process. Further backends of the same rank (a critic, a reference) join its groups; the one that
started them also ends them, last. Every collective has a deadline: the group's timeout.
"""

from __future__ import annotations

import datetime
import json
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from asyncrl.core.errors import ConfigError
from learner.backend import Placement
from learner.megatron import cpu_adaptor
from learner.megatron.model.architecture import Parallelism
from learner.numerics.device import BACKENDS, VISIBLE, choose_device
from learner.numerics.transfer import send


@dataclass(frozen=True)
class RankGroups:
    """The groups that this rank is in.

    Attributes:
        tp: Ranks that share the matrices of a stage.
        pp: The stages of one copy of the model.
        cp: Ranks that share the tokens of each row.
        dp: Ranks that hold the same part of the model and train different rows.
        device: Where this rank computes.
        is_owner: This object started the groups, and so ends them.
        store: In which the ranks met, kept while their groups may ask it.
    """

    tp: dist.ProcessGroup
    pp: dist.ProcessGroup
    cp: dist.ProcessGroup
    dp: dist.ProcessGroup
    device: torch.device
    is_owner: bool
    store: dist.Store | None = None

    @property
    def is_last_stage(self) -> bool:
        return self.pp.rank() == self.pp.size() - 1

    def all_reduce(self, values: torch.Tensor, op: dist.ReduceOp.RedOpType) -> torch.Tensor:
        """Return `values` reduced over the data-parallel ranks, on the device."""
        values = send(values, self.device)
        if self.dp.size() > 1:
            dist.all_reduce(values, op, group=self.dp)
        return values

    def share_from(self, stage: int, values: torch.Tensor) -> torch.Tensor:
        """Return `values` of pipeline stage `stage`; the other stages hand in the space for it."""
        if self.pp.size() > 1:
            dist.broadcast(values, dist.get_global_rank(self.pp, stage), group=self.pp)
        return values

    def share_table_from(self, stage: int, table: object) -> object:
        """Return what stage `stage` hands in: numbers, strings, lists and dicts of them."""
        if self.pp.size() == 1:
            return table
        data = json.dumps(table).encode()
        length = self.share_from(stage, torch.tensor([len(data)], device=self.device))
        buffer = torch.zeros(int(length), dtype=torch.uint8, device=self.device)
        if self.pp.rank() == stage:
            buffer.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        return json.loads(self.share_from(stage, buffer).cpu().numpy().tobytes())

    def stop(self) -> None:
        """Leave all groups, if this object started them; another learner rank may then start here."""
        if self.is_owner:
            stop_groups()


def join_groups(placement: Placement, parallelism: Parallelism, gpus: float, seed: int) -> RankGroups:
    """Join the ranks of the learner, each on its device; the first time in a process this starts the groups.

    Args:
        gpus: `learner.gpus`.

    Raises:
        ConfigError: The ranks do not divide, several ranks have no rendezvous, or the groups that there
            are were cut another way; or there is no GPU, or one that Megatron-core would take unasked.
    """
    is_owner = not parallel_state.is_initialized()
    device = choose_device(gpus, placement.rank)
    if device.type == "cpu" and not cpu_adaptor.is_installed():
        raise ConfigError(
            "learner.gpus is 0, and this process sees a GPU, which Megatron-core would compute on",
            hint=f"Hide it: {VISIBLE}= before the command; or set learner.gpus: 1",
        )
    store = _start(placement, parallelism, device, seed) if is_owner else None
    groups = RankGroups(
        tp=parallel_state.get_tensor_model_parallel_group(),
        pp=parallel_state.get_pipeline_model_parallel_group(),
        cp=parallel_state.get_context_parallel_group(),
        dp=parallel_state.get_data_parallel_group(),
        device=device,
        is_owner=is_owner,
        store=store,
    )
    found = (
        groups.tp.size(),
        groups.pp.size(),
        parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1,
        groups.cp.size(),
        parallel_state.get_expert_model_parallel_world_size(),
        parallel_state.get_expert_tensor_parallel_world_size(),
        dist.get_world_size(),
    )
    layout = parallelism
    wanted = (
        *(layout.tp, layout.pp, layout.vpp, layout.cp, layout.ep, layout.etp),
        placement.world_size,
    )
    if found != wanted:
        raise ConfigError(
            f"a model with tp, pp, vpp, cp, ep, etp, ranks = {wanted} cannot join groups of {found}",
            hint="All models of the learner have the same layout",
        )
    return groups


def _start(placement: Placement, parallelism: Parallelism, device: torch.device, seed: int) -> dist.Store:
    if placement.world_size % parallelism.num_copies:
        raise ConfigError(
            f"{placement.world_size} learner ranks do not divide by learner.tp x pp x cp: "
            f"{parallelism.tp} x {parallelism.pp} x {parallelism.cp}"
        )
    if placement.world_size > 1 and not placement.rendezvous:
        raise ConfigError(
            f"{placement.world_size} learner ranks need a rendezvous", hint='Give it as "host:port"'
        )
    alone = placement.world_size == 1
    store = dist.HashStore() if alone else placement.join_store()
    dist.init_process_group(
        BACKENDS[device.type],
        store=store,
        rank=placement.rank,
        world_size=placement.world_size,
        timeout=datetime.timedelta(seconds=placement.timeout_s),
    )
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallelism.tp,
        pipeline_model_parallel_size=parallelism.pp,
        virtual_pipeline_model_parallel_size=parallelism.vpp if parallelism.vpp > 1 else None,
        context_parallel_size=parallelism.cp,
        expert_model_parallel_size=parallelism.ep,
        expert_tensor_parallel_size=parallelism.etp,
        create_gloo_process_groups=False,
        distributed_timeout_minutes=max(1, round(placement.timeout_s / 60)),
    )
    tensor_parallel.model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
    torch.manual_seed(seed)
    return store


def stop_groups() -> None:
    """Leave all groups; another learner rank may then start in this process."""
    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()
