"""Caveats of a simulation: the parts of a configuration that it leaves out, in words (pure).

Owns the list in docs/planner.md. Invariant: a setting that the simulator does not model is named by its key;
nothing is left out without a word.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from asyncrl.core.config.conflicts import WITH_VALUES
from asyncrl.core.config.gpus import memory_share
from asyncrl.core.config.prefix_caching import choose_prefix_caching
from asyncrl.core.config.tree import Config
from asyncrl.core.variants import rewards
from asyncrl.planner.rates import ASSUMED, Rates

if TYPE_CHECKING:
    from asyncrl.planner.setting import Setting


def find_caveats(config: Config, setting: Setting, rates: Rates, most_steps: int) -> Iterator[str]:
    """Yield a line for each aspect that the simulation leaves out.

    Args:
        most_steps: Length of the simulation; rarer events are not simulated.
    """
    yield from _find_in_rollout(config, setting, rates)
    yield from _find_in_learner(config, setting, rates)
    yield from _find_rare(config, rates, most_steps)


def _find_in_rollout(config: Config, setting: Setting, rates: Rates) -> Iterator[str]:
    rollout = config.rollout
    if rollout.environment is not None:
        name = rollout.environment.name
        yield f"rollout.environment {name}: turns and tools; an answer is one stretch of tokens"
    if rollout.gateway is not None:
        yield "rollout.gateway: agents and their pauses; replicas are simulated as if they had prompts"
    for part in config.reward.fn:
        if _is_slow(part.fn) and not rates.group_overhead_s:
            yield f"reward.fn {part.fn}: the time to score an answer; a group is there with its last token"
    if rollout.replicas.is_elastic:
        bounds = f"{{min: {rollout.replicas.min}, max: {rollout.replicas.max}}}"
        yield f"rollout.replicas {bounds}: what the autoscaler decides; the fleet stays at {setting.replicas}"
    if setting.cohort > 1:
        yield f"rollout.replicas {setting.replicas}: a receiver for each; {setting.cohort} of them share one"
    if config.weight_sync.folder is not None:
        yield "weight_sync.folder: each replica's own pace; all receive a version together"
    if config.algorithm.drop_constant_groups and not setting.zero_variance_share:
        yield "algorithm.drop_constant_groups: groups dropped for equal rewards; their share counts as 0"
    if rollout.response_tokens and config.eval.every_steps:
        yield "rollout.response_tokens: how long answers of an evaluation are; drawn as those of groups"
    if rollout.kv_cache == "recompute" and ASSUMED in rates.source:
        yield _price_recomputation(setting, rates)
    shares_prompts = any(choose_prefix_caching(one)[0] for one in config.by_engine.values())
    if shares_prompts and rates.prefill_s_per_token and setting.num_samples > 1:
        yield f"rollout.prefix_caching: each of {setting.num_samples} answers computes its prompt here"


def _price_recomputation(setting: Setting, rates: Rates) -> str:
    """Return the caveat with tokens and seconds of one swap, where the time of a prompt's token is known."""
    what = "rollout.kv_cache recompute: KV cache of running answers that engines recompute at each swap"
    if not rates.prefill_s_per_token:
        return what
    running = min(setting.max_sequences, setting.max_groups * setting.num_samples)
    tokens = running * (setting.prompt_tokens + setting.lengths.median_tokens / 2)
    return f"{what}: {tokens:,.0f} tokens, {tokens * rates.prefill_s_per_token:.2g} s, when half done"


def _find_in_learner(config: Config, setting: Setting, rates: Rates) -> Iterator[str]:
    if not (config.rollout.gpus and config.learner.gpus):
        sides = [
            f"{name}.gpus 0"
            for name, count in (("rollout", config.rollout.gpus), ("learner", config.learner.gpus))
            if not count
        ]
        yield (
            f"{', '.join(sides)}: cores that learner and engines share; rates hold for the contention "
            "that they were taken under"
        )
    if memory_share(config.learner.gpus) and memory_share(config.rollout.gpus):
        shares = f"learner.gpus {config.learner.gpus:g}, rollout.gpus {config.rollout.gpus:g}"
        yield f"{shares}: GPU time that one side leaves idle; each side keeps its share all the time"
    if config.algorithm.advantage in WITH_VALUES and ASSUMED in rates.source:
        yield f"algorithm.advantage {config.algorithm.advantage}: the critic's seconds, in assumed rates"
    if setting.streams and not rates.part_s:
        yield (
            "learner.stream: what a part costs besides its tokens; these rates do not tell it "
            "(calibrate with learner.stream: true)"
        )
    if not rates.checkpoint_s:
        yield f"checkpoint.every_steps {setting.checkpoint_every}: its stall; these rates do not tell it"


def _find_rare(config: Config, rates: Rates, most_steps: int) -> Iterator[str]:
    every = {"checkpoint.every_steps": config.checkpoint.every_steps if rates.checkpoint_s else 0}
    every["eval.every_steps"] = config.eval.every_steps
    for key, steps in every.items():
        if steps > most_steps:
            yield f"{key} {steps}: it comes less often than once in the {most_steps} steps that are simulated"


def _is_slow(reward: str) -> bool:
    """Tell whether a server or another process gives it, as it does that of a URL or a file."""
    facts = rewards().get(reward)
    return ":" in reward if facts is None else facts.has_model or facts.is_pooled or bool(facts.part)
