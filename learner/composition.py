"""Builds one learner rank."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch

from asyncrl.buffer.client import LearnerClient
from asyncrl.service import ServiceContext
from learner.algorithms.objective import make_objective
from learner.backend import Placement
from learner.checkpoint import CheckpointStore
from learner.intake import Intake
from learner.leader import Leader
from learner.megatron.backend import MegatronBackend
from learner.ranks import Ranks
from learner.service import LearnerService
from weight_sync.handoff import Handoff

CALL_DEADLINE_S = 60.0


def build(context: ServiceContext) -> LearnerService:
    """Build the service of `context.rank`; returns once all ranks have met."""
    config = context.config
    torch.set_num_threads(1 if not torch.cuda.is_available() else torch.get_num_threads())
    backend = MegatronBackend(
        Path(config.model.path),
        config.learner,
        Placement(context.rank, context.world_size, context.rendezvous),
        dtype=config.model.dtype,
        seed=config.run.seed,
        temperature=config.rollout.temperature,
    )
    device = torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")
    objective = make_objective(
        config.algorithm, max_lag=config.staleness.max_lag, max_response_tokens=config.rollout.max_tokens
    )
    client = LearnerClient(context.addresses["buffer.0"], deadline_s=CALL_DEADLINE_S)
    store = CheckpointStore(context.run_dir / "checkpoints", config.checkpoint.keep)
    connect = partial(
        Handoff, context.addresses["publisher.0"], context.shm_prefix, config.weight_sync.bucket_bytes
    )
    return LearnerService(
        config,
        Ranks(context.rank, context.world_size, device),
        backend,
        objective,
        Intake(client),
        store,
        context.run_dir / "weights",
        Leader(config, client, connect, store) if context.rank == 0 else None,
    )
