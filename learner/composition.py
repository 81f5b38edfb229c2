"""Composition root of one learner rank."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import torch

from asyncrl.buffer.client import LearnerClient
from asyncrl.core.config.tree import Config
from asyncrl.core.runtime.allocation import keep_freed_memory
from asyncrl.core.service import ServiceContext
from asyncrl.core.variants import backend_facts, function
from learner.algorithms.objective import Objective, describe, make_objective
from learner.backend import LearnerBackend, Models, Placement, ValueBackend
from learner.batch_fetcher import BatchFetcher, SharedFetcher
from learner.checkpoint import CheckpointStore
from learner.checkpoint.node_folders import NodeFolders
from learner.leader.leader import Leader
from learner.lora.factors import BaseReference
from learner.numerics.device import claim_device
from learner.ranks import Ranks
from learner.record.batch_store import FOLDER, BatchStore
from learner.record.recorder import Recorder
from learner.record.settings import settings_of
from learner.service import LearnerService
from learner.striped import StripedPublish, own_stripes
from weight_sync.direct.seat import DeskAddress
from weight_sync.direct.source import DirectSource
from weight_sync.protocol.lanes.stripes import Stripe
from weight_sync.publisher_client import PublisherClient

log = logging.getLogger(__name__)


OpenModels = Callable[[Config, Objective, Placement], Models]


def build(context: ServiceContext, make_models: OpenModels | None = None) -> LearnerService:
    """Build the service of `context.rank`; returns once all ranks have met.

    Args:
        make_models: In place of `open_models`, for benchmarks of all that is not the model.
    """
    keep_freed_memory()
    config = context.config
    learner = config.learner
    device = claim_device(learner.gpus, context.rank, is_deterministic=learner.deterministic)
    if device.type == "cpu":
        torch.set_num_threads(1)
    objective = make_objective(
        config.algorithm, max_lag=config.staleness.max_lag, max_response_tokens=config.rollout.max_tokens
    )
    if context.rank == 0:
        log.info("algorithm: %s", describe(config.algorithm))
    placement = Placement(context.rank, context.world_size, context.rendezvous, secret=context.secret)
    models = (make_models or open_models)(config, objective, placement)
    client = LearnerClient(
        context.addresses["buffer.0"],
        deadline_s=config.launcher.start_deadline_s,
        keys=context.client_keys,
        runtime=context.runtime,
    )
    store = CheckpointStore(
        context.run_dir / "checkpoints", config.checkpoint.keep, config.checkpoint.keep_best
    )
    ranks = Ranks(context.rank, context.world_size, device)
    stripes, num_stripes = own_stripes(context.addresses, ranks)
    bucket_bytes = config.weight_sync.bucket_bytes

    first = Stripe(0, num_stripes)

    def connect(token: int, stripe: Stripe = first) -> PublisherClient:
        address, keys = context.addresses[f"publisher.{stripe.index}"], context.client_keys
        where = (context.runtime, address, context.shm_prefix)
        return PublisherClient(*where, bucket_bytes, token, keys=keys, stripe=stripe)

    share = ranks.of_share(models.policy.dp_rank, placement.timeout_s)
    fetcher = SharedFetcher(BatchFetcher(client, prefetches=models.policy.dp_size == 1), share)
    folders = NodeFolders(ranks)
    if config.launcher.is_cluster:
        folders = NodeFolders.find(ranks, store.root, needs_one="run.record" if config.run.record else "")
    desk = DeskAddress(context.addresses["publisher.0"], context.client_keys)
    direct, leader = None, None
    if config.weight_sync.is_direct:
        direct = DirectSource(context.runtime, desk, ranks, keeps_sent=config.weight_sync.uses_delta)
    if context.rank == 0:
        leader = Leader(config, client, connect, store, context.world_size, context.runtime)
        leader.is_paused = context.is_paused
    return LearnerService(
        config,
        ranks,
        models,
        objective,
        fetcher,
        store,
        context.run_dir / "weights",
        leader,
        runtime=context.runtime,
        recorder=open_recorder(config, context.run_dir, share, models.policy) if config.run.record else None,
        folders=folders,
        direct=direct,
        striped=StripedPublish(connect, stripes, ranks, bucket_bytes) if num_stripes > 1 else None,
    )


def open_recorder(config: Config, run_dir: Path, share: Ranks, policy: LearnerBackend) -> Recorder | None:
    """Return the recorder of this rank's share; None where another rank of the share leads."""
    if not share.is_leader:
        return None
    batch_store, stall_s = BatchStore(run_dir / FOLDER), config.checkpoint.max_stall_s
    shares = (policy.dp_rank, policy.dp_size)
    return Recorder(batch_store, config.run.seed, stall_s, *shares, settings=settings_of(config))


def open_models(config: Config, objective: Objective, placement: Placement) -> Models:
    """Return the policy, with the critic and the reference that its objective asks for."""
    policy, reference = open_policy(config, placement), None
    critic = open_critic(config, placement) if objective.needs_values else None
    if objective.needs_reference:
        has_adapters = config.model.lora.rank > 0
        reference = BaseReference(policy) if has_adapters else open_policy(config, placement, is_frozen=True)
    return Models(policy, critic, reference)


def open_policy(config: Config, placement: Placement, *, is_frozen: bool = False) -> LearnerBackend:
    """Return the policy on the backend that `config` names; frozen, a reference that joins its groups.

    Imports the chosen backend only: each brings seconds of imports of its own.
    """
    path, learner = Path(config.model.path), config.learner
    dtype, seed, temperature = config.model.dtype, config.run.seed, config.rollout.temperature
    build: Callable[..., LearnerBackend] = function(backend_facts(learner.backend).policy)
    options = {"seed": seed, "temperature": temperature, "is_frozen": is_frozen, "lora": config.model.lora}
    return build(path, learner, placement, dtype=dtype, **options)


def open_critic(config: Config, placement: Placement) -> ValueBackend:
    """Return the critic beside the policy, on the same backend and at the same `placement`."""
    path, dtype, seed = Path(config.critic.path or config.model.path), config.model.dtype, config.run.seed
    learner = config.learner.model_copy(update={"lr": config.critic.lr})
    build: Callable[..., ValueBackend] = function(backend_facts(learner.backend).value)
    return build(path, learner, placement, dtype=dtype, seed=seed)
