"""Evaluation of a model folder by itself: an engine in this process, no run, no buffer."""

from __future__ import annotations

import asyncio

from asyncrl.buffer.messages import EvaluationOrder
from asyncrl.core.config.tree import Config
from asyncrl.core.errors import ConfigError
from asyncrl.core.metrics.tallies import conclude
from rollout_service.engine.protocol import engine_variant
from rollout_service.environments.registry import load_environment
from rollout_service.evaluation.wiring import build_evaluator, load_held_out, load_tokenizer
from rollout_service.rewards.registry import load_reward

WHOLE = EvaluationOrder(id=0, step=0)


def evaluate_model(config: Config) -> dict[str, float]:
    """Return what the model of `config` makes of its held-out prompts, under the names of a run's evaluation.

    Raises:
        ConfigError: The data, the reward or the engine's settings cannot be used.
        EngineError: vLLM cannot load the model, or died.
    """
    return asyncio.run(_evaluate(config))


async def _evaluate(config: Config) -> dict[str, float]:
    named = config.rollout.environment
    episodes = None if named is None else load_environment(named)
    tokenizer = load_tokenizer(config.model.path)
    held_out = load_held_out(config, tokenizer, episodes)
    reward = load_reward(config.reward)
    engine = engine_variant(config.rollout.engines[0]).build(config.of_replica(0), tokenizer)
    evaluator = build_evaluator(config, engine, tokenizer, held_out, reward, episodes)
    if evaluator is None:
        raise ConfigError("there are no prompts to evaluate on", hint="Name a file with --data")
    await reward.start()
    try:
        await engine.start()
        return conclude(await evaluator.run(WHOLE))
    finally:
        await engine.shutdown()
        await reward.close()
