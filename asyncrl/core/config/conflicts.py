"""Values that are right one by one and do not fit together.

Owns the rules that span several keys or sections of the tree; `Config` asks for them once every value
by itself is right.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from asyncrl.core.config.rules.streaming import find_stream_conflicts
from asyncrl.core.config.secrets import find_secrets
from asyncrl.core.variants import (
    GREEDY,
    VALUES,
    backend_facts,
    backend_names,
    engine_facts,
    estimators_needing,
    journal_facts,
    journal_names,
)

if TYPE_CHECKING:
    from asyncrl.core.config.root import Root
    from asyncrl.core.config.sections.experience import BufferSection
    from asyncrl.core.config.sections.learner import LearnerSection
    from asyncrl.core.config.sections.rollout import RolloutSection

WITH_VALUES = estimators_needing(VALUES)
"""Advantages that need a critic."""
WITH_GREEDY = estimators_needing(GREEDY)
"""Advantages that need the reward of a greedy answer per group."""
CONFLICT = "conflict"
"""The type of the validation error that carries `Conflict`s in its context."""


@dataclass(frozen=True)
class Conflict:
    """Values that do not fit together: their keys, what is wrong, what to do."""

    keys: tuple[str, ...]
    what: str
    hint: str = ""


def _journal_conflicts(buffer: BufferSection) -> list[Conflict]:
    keys, takes_url = ("buffer.journal", "buffer.url"), journal_facts(buffer.journal).takes_url
    if not takes_url and buffer.url is not None:
        what = f"buffer.url does nothing with buffer.journal: {buffer.journal}"
        others = " or ".join(name for name in journal_names() if journal_facts(name).takes_url)
        return [Conflict(keys, what, f"Set buffer.journal: {others}")]
    if takes_url and buffer.url is None:
        hint = "Set buffer.url, or buffer.url: managed for a private server"
        return [Conflict(keys, f"buffer.journal: {buffer.journal} names no Redis", hint)]
    return []


def find_conflicts(config: Root) -> list[Conflict]:
    """Return every pair of values that is right by itself and wrong together."""
    learner, conflicts = config.learner, []
    if learner.groups_per_step % learner.minibatches:
        conflicts.append(
            Conflict(
                ("learner.minibatches", "learner.groups_per_step"),
                f"learner.groups_per_step ({learner.groups_per_step}) must be a multiple of "
                f"learner.minibatches ({learner.minibatches})",
            )
        )
    if learner.groups_per_step // learner.minibatches < learner.dp:
        conflicts.append(
            Conflict(
                ("learner.dp", "learner.minibatches", "learner.groups_per_step"),
                f"a minibatch of {learner.groups_per_step // learner.minibatches} groups cannot be shared by "
                f"learner.dp ({learner.dp}) ranks",
            )
        )
    if config.eval.every_steps and config.data.eval is None:
        conflicts.append(
            Conflict(
                ("eval.every_steps", "data.eval"),
                "eval.every_steps is set, but data.eval names no prompts",
                "Set data.eval, or eval.every_steps: 0",
            )
        )
    if config.rollout.group_size == 1 and config.algorithm.drop_constant_groups:
        keys = "algorithm.drop_constant_groups", "rollout.group_size"
        conflicts.append(Conflict(keys, f"{keys[0]} drops every group of {keys[1]}: 1", "Set it to false"))
    conflicts.extend(_journal_conflicts(config.buffer))
    conflicts.extend(_find_evaluation_conflicts(config))
    conflicts.extend(_find_environment_conflicts(config))
    if not (config.launcher.is_local or config.launcher.has_curve):
        conflicts.append(
            Conflict(
                ("launcher.curve", "launcher.host"),
                f"launcher.curve: off with launcher.host: {config.launcher.host} lets anybody who reaches "
                "that interface into the run",
                "Set launcher.curve: auto, or launcher.host: 127.0.0.1",
            )
        )
    return [
        *conflicts,
        *(Conflict(*found) for found in find_secrets(config)),
        *(Conflict(*found) for found in find_stream_conflicts(config)),
        *_find_gpu_conflicts(config),
        *_find_checkpoint_conflicts(config),
        *_find_backend_conflicts(learner),
        *_find_engine_conflicts(config),
        *_find_quantization_conflicts(config),
        *_find_lora_conflicts(config),
        *_find_replay_conflicts(config),
        *_find_critic_conflicts(config),
        *_find_reward_conflicts(config),
        *_find_gateway_conflicts(config),
    ]


def _find_gpu_conflicts(config: Root) -> Iterator[Conflict]:
    """Yield what is set and needs GPUs that the services in question do not have."""
    if config.weight_sync.backend == "nccl":
        what = "weight_sync.backend: nccl is not there: publisher and receivers have no GPU"
        hint = "Set direct, which takes NCCL between GPUs, or leave it out: weights travel over gloo"
        yield Conflict(("weight_sync.backend",), what, hint)
    has_folder, backend = config.weight_sync.folder is not None, config.weight_sync.backend
    if backend == ("gloo" if has_folder else "folder"):
        what = (
            f"weight_sync.backend: {backend} {'does not use' if has_folder else 'needs'} weight_sync.folder"
        )
        hint = "Set backend: auto or folder, and folder: file:///a/shared/folder"
        yield Conflict(("weight_sync.folder", "weight_sync.backend"), what, hint)
    if config.model.dtype == "float16" and not (config.rollout.gpus and config.learner.gpus):
        what = "model.dtype: float16 needs GPUs on both sides"
        hint = "Set rollout.gpus and learner.gpus, or model.dtype: bfloat16"
        yield Conflict(("model.dtype", "rollout.gpus", "learner.gpus"), what, hint)


def _find_engine_conflicts(config: Root) -> Iterator[Conflict]:
    """Yield what is not free of each engine's arguments; those of several engines stand by engine."""
    rollout, keys = config.rollout, ("rollout.engine_args", "rollout.engine")
    if isinstance(rollout.engine, str):
        yield from _find_argument_conflicts(rollout, rollout.engine)
        return
    hint = f"Write {{{', '.join(f'{name}: {{...}}' for name in config.by_engine)}}}"
    for name, own in rollout.engine_args.items():
        if name not in rollout.engine or not isinstance(own, dict):
            yield Conflict(keys, f"rollout.engine_args: {name}: not the arguments of one engine", hint)
            return
    for name, one in config.by_engine.items():
        yield from _find_argument_conflicts(one.rollout, name)


def _find_argument_conflicts(rollout: RolloutSection, engine: str) -> Iterator[Conflict]:
    """Yield each argument of the engine that a replica sets itself, or that the engine cannot take."""
    facts, keys = engine_facts(engine), ("rollout.engine_args", "rollout.engine")
    if facts.owned_args is None and rollout.engine_args:
        yield Conflict(keys, f"rollout.engine_args: {facts.title} takes no arguments", "Leave it out")
        return
    owned = {**(facts.owned_args or {}), **({} if rollout.gpus else facts.owned_args_on_cpu)}
    for name in sorted(owned.keys() & rollout.engine_args.keys()):
        what = f"rollout.engine_args: {name} is not free for {facts.title}"
        yield Conflict(keys, what, f"Leave it out: {owned[name]}")


def _find_quantization_conflicts(config: Root) -> Iterator[Conflict]:
    """Yield each engine that does not have the quantization where it runs."""
    rollout, key = config.rollout, "rollout.quantization"
    place = "GPUs" if rollout.gpus else "CPU"
    for facts in map(engine_facts, dict.fromkeys(rollout.engines)):
        known = facts.quantizations.get(place)
        if rollout.quantization not in (None, known):
            what = f"{key}: {rollout.quantization} is not there with {facts.title} on {place}"
            hint = f"Set {known}, or leave it out" if known else "Leave it out"
            yield Conflict((key, "rollout.engine", "rollout.gpus"), what, hint)


def _find_lora_conflicts(config: Root) -> Iterator[Conflict]:
    """Yield what cannot take adapters, or was not shown with them, and settings of adapters without one."""
    rollout, learner, lora, key = config.rollout, config.learner, config.model.lora, "model.lora.rank"
    if not lora.rank and lora != type(lora)():
        what = f"model.lora does nothing without a rank: {key} is 0, which trains all weights"
        yield Conflict((key, "model.lora"), what, f"Set {key}: 32 or so, or leave model.lora out")
    lacking = [name for name in rollout.engines if not engine_facts(name).merges_adapters]
    for option, is_set, why in (
        ("rollout.engine", lacking, f"{', '.join(lacking)} takes whole weights alone"),
        ("rollout.quantization", rollout.quantization, "they were not shown together"),
        ("learner.compile", learner.compile, "they were not shown together"),
        ("learner.kernels", learner.kernels == "te", "its matrices hold norms as well"),
        ("weight_sync.backend", config.weight_sync.is_direct, "direct sends parts of whole matrices"),
    ):
        if lora.rank and is_set:
            hint = f"Leave it out, or {key}: 0"
            yield Conflict((option, key), f"{option} does not take adapters: {why}", hint)


def _find_replay_conflicts(config: Root) -> Iterator[Conflict]:
    """Yield what records no experts, or cannot take them again."""
    rollout, key = config.rollout, "rollout.router_replay"
    lacking = [facts.title for facts in map(engine_facts, rollout.engines) if not facts.records_experts]
    is_without = bool(rollout.gpus) and rollout.prefix_caching is False
    for option, is_set, why in (
        ("rollout.engine", lacking, f"{', '.join(lacking)} does not say which experts it chose"),
        ("learner.compile", config.learner.compile, "compiled layers take no recorded experts"),
        ("rollout.prefix_caching", is_without, "on GPUs vLLM keeps them with the blocks of its prefix cache"),
    ):
        if rollout.router_replay != "off" and is_set:
            hint = f"Leave it out, or {key}: off"
            yield Conflict((option, key), f"{option} does nothing for {key}: {why}", hint)


def _find_critic_conflicts(config: Root) -> list[Conflict]:
    is_default = config.critic == type(config.critic)()
    return [unused_critic(config)] if not is_default and has_no_critic(config) else []


def has_no_critic(config: Root) -> bool:
    """Tell whether the advantage is known to need no values."""
    advantage = config.algorithm.advantage
    return advantage not in WITH_VALUES and ":" not in advantage


def unused_critic(config: Root) -> Conflict:
    """Return the conflict of a section `critic` where there is no critic."""
    return Conflict(
        ("critic", "algorithm.advantage"),
        f"critic is set, but algorithm.advantage: {config.algorithm.advantage} asks for no values",
        f"Choose {' or '.join(WITH_VALUES)}, or leave critic out",
    )


def _find_environment_conflicts(config: Root) -> Iterator[Conflict]:
    """Yield what makes episodes without asking the environment, and trees that are not whole."""
    rollout = config.rollout
    if rollout.environment is None:
        return
    if rollout.group_size % rollout.environment.branches:
        key = "rollout.environment.branches"
        what = f"rollout.group_size ({rollout.group_size}) must be a multiple of {key}"
        yield Conflict((key, "rollout.group_size"), what, f"Make it a multiple, or {key}: 1")
    for key, value in (
        ("rollout.gateway", rollout.gateway),
        ("rollout.response_tokens", rollout.response_tokens),
    ):
        if value is not None:
            what = f"rollout.environment does nothing with {key}"
            yield Conflict((key, "rollout.environment"), what, "Leave one of them out")


def _find_evaluation_conflicts(config: Root) -> Iterator[Conflict]:
    if config.eval.samples > 1 and not config.eval.temperature:
        what = f"eval.samples: {config.eval.samples} with eval.temperature: 0 repeats the same answer"
        yield Conflict(("eval.samples", "eval.temperature"), what, "Raise eval.temperature, or leave it out")
    for number, source in enumerate(config.data.eval or ()):
        if source.weight != 1.0:
            what = "a weight does nothing in data.eval: each source is evaluated by itself"
            yield Conflict((f"data.eval.{number}.weight", "data.eval"), what, "Leave it out")


def _find_reward_conflicts(config: Root) -> list[Conflict]:
    overlong, max_tokens = config.reward.overlong, config.rollout.max_tokens
    if overlong is None or overlong.buffer_tokens <= max_tokens:
        return []
    key = "reward.overlong.buffer_tokens"
    what = f"{key} ({overlong.buffer_tokens}) leaves no answer unpunished"
    hint = f"Keep it at or below rollout.max_tokens ({max_tokens})"
    return [Conflict((key, "rollout.max_tokens"), what, hint)]


def _find_gateway_conflicts(config: Root) -> Iterator[Conflict]:
    """Yield what agents that generate through the gateway cannot give."""
    rollout, advantage = config.rollout, config.algorithm.advantage
    if rollout.gateway is None:
        return
    hint = "Leave it out, or rollout.gateway"
    for name in dict.fromkeys(rollout.engines):
        if not engine_facts(name).has_gateway:
            what = f"rollout.engine: {name} has no gateway"
            yield Conflict(("rollout.engine", "rollout.gateway"), what, hint)
    if advantage in WITH_GREEDY:
        what = f"algorithm.advantage: {advantage} needs a greedy answer, and agents sample all of theirs"
        yield Conflict(("algorithm.advantage", "rollout.gateway"), what, hint)
    for key, is_set, why in (
        ("rollout.response_tokens", rollout.response_tokens is not None, "agents say when an answer ends"),
        ("rollout.stop", bool(rollout.stop), "agents say when an answer ends"),
        ("reward.overlong", config.reward.overlong is not None, "agents give the rewards"),
    ):
        if is_set:
            what = f"{key} does nothing with a rollout.gateway: {why}"
            yield Conflict((key, "rollout.gateway"), what, hint)


def _find_checkpoint_conflicts(config: Root) -> list[Conflict]:
    checkpoint, every_steps = config.checkpoint, config.eval.every_steps
    is_by_accuracy = checkpoint.keep_best > 0 and checkpoint.best_metric == "accuracy"
    if not is_by_accuracy or (every_steps and checkpoint.every_steps % every_steps == 0):
        return []
    return [
        Conflict(
            ("checkpoint.keep_best", "eval.every_steps", "checkpoint.every_steps"),
            "checkpoint.keep_best goes by accuracy, but not every checkpoint is evaluated",
            "Make checkpoint.every_steps a multiple of eval.every_steps, or name another "
            "checkpoint.best_metric, such as critic/rewards/mean",
        )
    ]


def _find_backend_conflicts(learner: LearnerSection) -> list[Conflict]:
    """Return what is set and the chosen backend does not have: it would do nothing."""
    facts = backend_facts(learner.backend)
    found = []
    for option in facts.lacks:
        name, _, refused = option.partition(": ")
        chosen = str(getattr(learner, name)).lower()
        default = str(type(learner).model_fields[name].default).lower()
        if chosen == default or (refused and chosen != refused):
            continue
        others = [other for other in backend_names() if option not in backend_facts(other).lacks]
        what = f"learner.backend: {learner.backend} has no learner.{name}: {chosen}"
        hint = facts.hint or f"Backends that have it: {', '.join(others) or 'none'}"
        found.append(Conflict((f"learner.{name}", "learner.backend"), what, hint))
    return found
