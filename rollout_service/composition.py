"""Builds a rollout replica from a run's configuration."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

from asyncrl.allocation import keep_freed_memory
from asyncrl.buffer.client import ReplicaClient
from asyncrl.clock import SystemClock
from asyncrl.config.conflicts import WITH_GREEDY
from asyncrl.config.tree import Config
from asyncrl.errors import ConfigError
from asyncrl.service import ServiceContext
from rollout_service.engine.core_nursery import open_nursery
from rollout_service.engine.environment import prepare_environment
from rollout_service.engine.metered import MeteredEngine
from rollout_service.engine.protocol import Engine
from rollout_service.engine.scripted_engine import ScriptedEngine
from rollout_service.engine.vllm_engine import VllmEngine, VllmSettings
from rollout_service.episode import SingleTurn
from rollout_service.evaluation import EvaluationSettings, Evaluator
from rollout_service.groups import GroupRunner, GroupSettings
from rollout_service.lengths import parse_lengths
from rollout_service.prompts import PromptSet, load_prompts
from rollout_service.replica import Replica, ReplicaParts, ReplicaSettings
from rollout_service.rewards.registry import load_reward
from rollout_service.rewards.shaping import Overlong

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CALL_DEADLINE_S = 10.0
SCRIPTED_TOKENS_PER_S = 200.0
MAX_TEMPERATURE = 2.0


def build(context: ServiceContext) -> Replica:
    """Build the service `rollout.<n>`; it needs the addresses of `buffer.0` and `receiver.<n>`.

    Model and data must be paths by now: `builtin:` names and hub ids are resolved before services start.

    Raises:
        ConfigError: Something that the configuration names does not exist.
    """
    keep_freed_memory()
    config = context.config
    if config.rollout.engine == "vllm":
        prepare_environment(has_gpu=config.rollout.gpus > 0)
        if not config.rollout.gpus:
            open_nursery()  # as early as can be: it takes as long as all the rest of the start
    reward = load_reward(config.reward.fn)
    parse_lengths(config.rollout.response_tokens)
    if max(config.rollout.temperature, config.eval.temperature) > MAX_TEMPERATURE:
        raise ConfigError(f"vLLM samples at temperatures up to {MAX_TEMPERATURE:g}", hint="Lower it")
    for path in (config.model.path, config.data.train, *([config.data.eval] if config.data.eval else [])):
        if not Path(path).exists():
            raise ConfigError(f"{path} does not exist", hint="Give a path on this machine")

    async def build_parts() -> ReplicaParts:
        from weight_sync.link import ReceiverLink

        tokenizer, prompts, held_out = await asyncio.to_thread(_load_data, config)
        engine = MeteredEngine(_build_engine(config, tokenizer), SystemClock())
        overlong = _build_overlong(config)
        environment = SingleTurn(engine, tokenizer, reward, overlong)
        return ReplicaParts(
            engine=engine,
            buffer=ReplicaClient(
                context.addresses["buffer.0"], context.name, CALL_DEADLINE_S, keys=context.client_keys
            ),
            weights=ReceiverLink(context.addresses[f"receiver.{context.index}"], context.client_keys),
            runner=GroupRunner(environment, prompts, _group_settings(config)),
            evaluator=_build_evaluator(config, engine, tokenizer, held_out),
            prompts=prompts,
            overlong=overlong,
        )

    return Replica(context.name, _replica_settings(config), build_parts)


def _replica_settings(config: Config) -> ReplicaSettings:
    rollout = config.rollout
    full = max(1, rollout.max_sequences // _group_settings(config).num_samples)
    return ReplicaSettings(
        max_groups=full + max(1, full // 4),  # a few wait inside the engine, so that its batch stays full
        lease_s=config.buffer.lease_s,
        start_deadline_s=config.launcher.start_deadline_s,
    )


def _build_overlong(config: Config) -> Overlong | None:
    """Training alone is shaped: an evaluation counts right answers, however long."""
    reward = config.reward
    if not reward.overlong_buffer_tokens:
        return None
    return Overlong(config.rollout.max_tokens, reward.overlong_buffer_tokens, reward.overlong_penalty)


def _group_settings(config: Config) -> GroupSettings:
    rollout = config.rollout
    return GroupSettings(
        config.run.seed,
        rollout.group_size,
        rollout.temperature,
        rollout.max_tokens,
        parse_lengths(rollout.response_tokens),
        has_greedy=config.algorithm.advantage in WITH_GREEDY,
    )


def _load_data(config: Config) -> tuple[PreTrainedTokenizerBase, PromptSet, PromptSet | None]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(config.model.path)
    limit = config.data.max_prompt_tokens
    prompts = load_prompts(Path(config.data.train), tokenizer, limit)
    held_out = load_prompts(Path(config.data.eval), tokenizer, limit) if config.data.eval else None
    return tokenizer, prompts, held_out


def _build_engine(config: Config, tokenizer: PreTrainedTokenizerBase) -> Engine:
    if config.rollout.engine == "scripted":
        return ScriptedEngine(tokenizer.eos_token_id, SCRIPTED_TOKENS_PER_S)
    rollout = config.rollout
    settings = VllmSettings(
        model=config.model.path,
        dtype=config.model.dtype,
        max_model_tokens=config.data.max_prompt_tokens + rollout.max_tokens,
        max_sequences=rollout.max_sequences,
        kv_cache_bytes=rollout.kv_cache_bytes,
        recomputes_kv_cache=rollout.kv_cache == "recompute",
        caches_prefixes=rollout.prefix_caching,
        num_gpus=rollout.gpus,
        seed=config.run.seed,
    )
    return VllmEngine(settings)


def _build_evaluator(
    config: Config, engine: Engine, tokenizer: PreTrainedTokenizerBase, held_out: PromptSet | None
) -> Evaluator | None:
    if held_out is None:
        return None
    environment = SingleTurn(engine, tokenizer, load_reward(config.reward.fn))
    settings = EvaluationSettings(config.eval.temperature, config.rollout.max_tokens, config.run.seed)
    return Evaluator(environment, held_out.prompts[: config.eval.prompts], settings)
