"""Composition root of a rollout replica."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from asyncrl.buffer.client import ReplicaClient
from asyncrl.buffer.rules.replica import count_max_groups
from asyncrl.core.config.conflicts import WITH_GREEDY
from asyncrl.core.config.lengths import parse_lengths
from asyncrl.core.config.tree import Config
from asyncrl.core.errors import ConfigError
from asyncrl.core.runtime.allocation import keep_freed_memory
from asyncrl.core.service import ServiceContext
from rollout_service.engine.metered import MeteredEngine
from rollout_service.engine.protocol import Engine, engine_variant
from rollout_service.environments.registry import Episodes, load_environment
from rollout_service.environments.runner import build_runner
from rollout_service.evaluation.wiring import build_evaluator, load_data
from rollout_service.gateway.gateway import build_gateway, check_gateway
from rollout_service.replica.parts import ReplicaParts, ReplicaSettings
from rollout_service.replica.service import Replica
from rollout_service.rewards.registry import load_reward
from rollout_service.rewards.shaping import Overlong
from rollout_service.sampling.groups import GroupRunner, GroupSettings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CALL_DEADLINE_S = 10.0

MakeEngine = Callable[[Config, "PreTrainedTokenizerBase"], Engine]
"""(configuration, tokenizer) -> an engine, not yet started."""


def build(context: ServiceContext, make_engine: MakeEngine | None = None) -> Replica:
    """Build the service `rollout.<n>`; it needs the addresses of `buffer.0` and `receiver.<n>`.

    Model and data must be paths by now: `builtin:` names and hub ids are resolved before services start.

    Args:
        make_engine: In place of the variant's, for benchmarks of all that is not the engine.

    Raises:
        ConfigError: Something that the configuration names does not exist.
    """
    started_ns = int(context.runtime.now() * 1e9)
    keep_freed_memory()
    config = context.config.of_replica(context.index)
    check_gateway(config)
    variant = engine_variant(config.rollout.engines[0])
    variant.prepare(config)  # as early as can be: it takes as long as all the rest of the start
    reward = load_reward(config.reward, run_dir=context.run_dir)
    named = config.rollout.environment
    episodes = None if named is None else load_environment(named)
    sources = (*config.data.train, *(config.data.eval or ()))
    for path in (config.model.path, *(source.path for source in sources)):
        if not Path(path).exists():
            raise ConfigError(f"{path} does not exist", hint="Give a path on this machine")

    async def build_parts() -> ReplicaParts:
        await reward.start()
        try:
            return await build_rest()
        except BaseException:
            await reward.close()
            raise

    async def build_rest() -> ReplicaParts:
        from weight_sync.link import ReceiverLink

        tokenizer, prompts, held_out = await asyncio.to_thread(load_data, config, episodes)
        reward.begin_trial(prompts.prompts[0].prompt)
        bare = (make_engine or variant.build)(config, tokenizer)
        engine = MeteredEngine(bare, context.runtime)
        gateway = build_gateway(context, prompts, bare, engine)
        overlong = _build_overlong(config)
        environment = build_runner(engine, tokenizer, episodes, reward, prompts.prompts, overlong)
        return ReplicaParts(
            engine=engine,
            buffer=ReplicaClient(
                context.addresses["buffer.0"],
                context.name,
                CALL_DEADLINE_S,
                context.client_keys,
                context.runtime,
            ),
            weights=ReceiverLink(
                context.runtime,
                context.addresses[f"receiver.{context.index}"],
                context.client_keys,
                started_ns,
                is_direct=config.weight_sync.is_direct,
            ),
            runner=gateway.manager if gateway else GroupRunner(environment, prompts, _group_settings(config)),
            evaluator=build_evaluator(config, engine, tokenizer, held_out, reward, episodes),
            prompts=prompts,
            overlong=overlong,
            reward=reward,
            gateway=gateway,
        )

    settings = _replica_settings(config, episodes)
    return Replica(context.runtime, context.name, settings, build_parts, is_standby=context.is_standby)


def _replica_settings(config: Config, episodes: Episodes | None = None) -> ReplicaSettings:
    rollout = config.rollout
    has_agents = rollout.gateway is not None
    return ReplicaSettings(
        max_groups=count_max_groups(rollout.max_sequences, _group_settings(config).num_samples),
        lease_s=config.buffer.lease_s,
        start_deadline_s=config.launcher.start_deadline_s,
        resumes_partial=rollout.resume_partial,
        records_turns=rollout.resume_partial
        and (has_agents or (episodes is not None and episodes.is_restorable)),
    )


def _build_overlong(config: Config) -> Overlong | None:
    """Training alone is shaped: an evaluation counts right answers, however long."""
    overlong = config.reward.overlong
    if overlong is None:
        return None
    return Overlong(config.rollout.max_tokens, overlong.buffer_tokens, overlong.penalty)


def _group_settings(config: Config) -> GroupSettings:
    rollout = config.rollout
    return GroupSettings(
        config.run.seed,
        rollout.group_size,
        rollout.temperature,
        rollout.max_tokens,
        parse_lengths(rollout.response_tokens),
        has_greedy=config.algorithm.advantage in WITH_GREEDY,
        stop=rollout.stop,
        masks_cut=rollout.truncated == "mask",
        branches=rollout.environment.branches if rollout.environment is not None else 1,
    )
