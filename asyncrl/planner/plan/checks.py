"""Checks of sizes: what is asked for must fit, before anything starts.

Reads the model's `config.json` and this machine's memory for the arithmetic in `sizes`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from asyncrl.buffer.composition import ledger_settings, max_group_bytes
from asyncrl.buffer.journals.kind import journal_kind
from asyncrl.core.config.gpus import memory_share
from asyncrl.core.config.lengths import parse_lengths
from asyncrl.core.config.tree import Config
from asyncrl.core.errors import ConfigError
from asyncrl.core.variants import engine_facts, function
from asyncrl.models.architectures import ModelSize, read_max_positions
from asyncrl.models.named_models import find_table
from asyncrl.planner.plan import derived, machine, names
from asyncrl.planner.plan.footprint import capacity, memory, shared_memory, sizes
from asyncrl.planner.plan.footprint.capacity import Capacity
from asyncrl.planner.plan.footprint.memory import SHM, VERSIONS, Part
from asyncrl.planner.plan.models import check_cuts_of_named_models, table_of
from asyncrl.planner.plan.prepare import is_builtin
from weight_sync.backends.store import open_files

NOT_CHECKED_ELSEWHERE = (
    "the CPUs, GPUs and memory of the machine that it will run on: they are checked there, at `up`",
    "the files that model, data, reward and environment name, and what is in them",
    "the addresses and ports that it listens on",
    "the Redis that buffer.url names",
)
NOT_IN_A_CRITIC = ("lm_head.weight",)
"""Its head gives a value instead."""
HOST_ADAMW_S = 2.5
"""Per 10^9 weights on one core: AdamW 1.4 s, the cast to bfloat16 1 s (torch 2.13, 20 M weights)."""


def find_unchecked(config: Config) -> Iterator[str]:
    """Yield what is known only later: models that are not here yet have no size."""
    for key, path in (("model.path", config.model.path), ("critic.path", config.critic.path)):
        if path is None or Path(path, "config.json").exists():
            continue
        if find_table(path) is not None:
            yield f"{key}: '{path}' is fetched at `up`; until then the stored dimensions are used"
            continue
        when = "made" if is_builtin(path) else "fetched"
        yield f"{key}: '{path}' is {when} at `up`; its architecture, its cuts and its memory are checked then"


def find_notes(config: Config) -> Iterator[str]:
    """Yield what a run can do and its user may not have meant."""
    rollout = config.rollout
    if not rollout.replicas.max and not rollout.standby:
        yield (
            "rollout.replicas is 0: the run waits, and trains nothing, until 'asyncrl scale rollout=1' or a "
            "generator of another maker brings groups"
        )
    if rollout.gpus and rollout.kv_cache == "recompute":
        tokens = rollout.max_sequences * (config.data.max_prompt_tokens + rollout.max_tokens)
        yield (
            f"rollout.kv_cache recompute: at each version an engine computes up to {tokens:,} tokens again "
            "(rollout.max_sequences x tokens of a row; 'plan --simulate' tells seconds); keep: none"
        )
    if rollout.num_nodes > 1:
        yield (
            f"rollout.engine_args: nnodes {rollout.num_nodes}: an engine is paused while a version goes "
            "from its first node to the others, and what workers exchange for a token crosses the network"
        )
    if (learner := config.learner).offload and learner.gpus:
        cores, num_weights = max(1, int(learner.cpus)), shared_memory.count_weights(config.model.path) or 0
        seconds = num_weights / learner.num_ranks / cores / 1e9 * HOST_ADAMW_S
        yield (
            f"learner.offload: AdamW runs on the host, on {cores} cores (learner.cpus) for each rank: about "
            f"{seconds:.2g} s an update, which 'plan --simulate' does not count"
        )
    for where, share in memory.shares_of(config).items():
        yield f"{where} is shared: {share:.3g} of its memory is for this side, weights and caches together"


def count_all(config: Config, replicas: int, receivers: int) -> list[Part]:
    """Return what a run takes, part by part; a model whose size cannot be told counts for nothing.

    Args:
        replicas: That are counted.
        receivers: That take shared memory of this machine.
    """
    nodes = machine.count_learner_nodes(config)
    shared, size = shared_memory.count(config, receivers, nodes), read_size(config)
    critic = shared_memory.count_weights(config.critic.path or config.model.path, NOT_IN_A_CRITIC)
    group_bytes = max_group_bytes(config)
    buffer = derived.count_in_flight(config, group_bytes, replicas).groups * group_bytes
    num_weights = None if shared is None else shared.num_weights
    ranks = machine.count_ranks_here(config)
    experts, adapters = sizes.count_expert_weights(size), shared_memory.count_adapters(config)
    quantized = sizes.count_quantized_weights(config, size)
    parts = memory.count_parts(
        config, num_weights, replicas, critic, buffer, ranks, experts, adapters, quantized
    )
    if size is not None:
        parts.append(sizes.estimate_activations(config, size, ranks))
    if shared is not None:
        parts.append(Part(SHM, VERSIONS, shared.num_bytes, shared.rule))
    return parts


def count_nodes(config: Config) -> list[Part]:
    """Return the most that a run takes, node by node.

    On a cluster: what this machine takes without a replica, then what each learner rank that it has no room
    for takes of another, then what each replica takes of the node that it is started on: this one at last.
    """
    if not config.launcher.is_cluster:
        return count_all(config, machine.count_replicas(config), machine.count_receivers_here(config))
    at_receiver = shared_memory.count_at_receiver(config)
    num_weights = None if at_receiver is None else at_receiver.num_weights
    parts = count_all(config, 0, 0)
    if machine.count_ranks_here(config) < config.learner.num_ranks:
        critic = shared_memory.count_weights(config.critic.path or config.model.path, NOT_IN_A_CRITIC)
        experts, adapters = (
            sizes.count_expert_weights(read_size(config)),
            shared_memory.count_adapters(config),
        )
        parts += memory.count_rank_elsewhere(config, num_weights, critic, experts, adapters)
        parts += [replace(part, where=memory.PER_RANK[SHM]) for part in parts if part.where == SHM]
    quantized = sizes.count_quantized_weights(config, read_size(config))
    parts += memory.count_replica_elsewhere(config, num_weights, quantized)
    if at_receiver is not None:
        where = memory.PER_REPLICA[SHM]
        parts.append(Part(where, VERSIONS, at_receiver.num_bytes, at_receiver.rule))
    return parts


def read_size(config: Config) -> ModelSize | None:
    """Return the sizes of the policy's model, None if they cannot be told."""
    try:
        return ModelSize.read(table_of(config.model.path))
    except (OSError, ValueError, TypeError, KeyError):
        return None


def check_buffer(config: Config) -> Iterator[str]:
    """Say if the buffer cannot hold two batches."""
    try:
        ledger_settings(config)
    except ConfigError as error:
        yield _line("buffer.memory_bytes", error)


def check_journal(config: Config) -> Iterator[str]:
    """Say if the journal cannot be used from here now."""
    try:
        journal_kind(config.buffer.journal).check(config.buffer, Path(config.run.dir) / config.run.name)
    except ConfigError as error:
        yield _line("buffer.url", error)


def check_folder(config: Config) -> Iterator[str]:
    """Say if the folder of weights needs a package that is not here."""
    try:
        if config.weight_sync.folder is not None:
            open_files(config.weight_sync.folder)
    except ConfigError as error:
        yield _line("weight_sync.folder", error)


def _line(key: str, error: ConfigError) -> str:
    """Return an error with its hint on a line that begins with the key."""
    said = error.message if error.message.startswith(f"{key}:") else f"{key}: {error.message}"
    return f"{said}; {error.hint[:1].lower()}{error.hint[1:]}"


def check_cut_of_engine(config: Config) -> Iterator[str]:
    """Say if the engine cannot be cut over a replica's GPUs."""
    for engine in map(engine_facts, config.by_engine):
        if config.rollout.gpus > 1 and engine.one_gpu:
            yield f"rollout.gpus: {engine.title}: {engine.one_gpu}; set 1, or rollout.engine: vllm"
    size = read_size(config)
    if size is not None:
        yield from sizes.find_uneven_engine(config, size)


def check_nodes_of_replica(config: Config) -> Iterator[str]:
    """Say what does not go with replicas over several nodes."""
    rollout, key = config.rollout, "rollout.engine_args: nnodes"
    count = rollout.engine_args.get("nnodes", 1)
    if count != rollout.num_nodes or isinstance(count, bool):
        yield f"{key} is {count!r}; give the number of nodes of a replica"
    if rollout.engines[1:] and any("nnodes" in one.rollout.engine_args for one in config.by_engine.values()):
        yield f"{key}: replicas of several nodes are of one engine; leave it out, or name one rollout.engine"
    if rollout.num_nodes == 1:
        return
    if not config.launcher.is_cluster:
        yield f"{key} {count} is for a cluster; set launcher.ray to the address of one"
    if rollout.gpus % rollout.num_nodes:
        yield f"{key} {count} does not divide rollout.gpus: {rollout.gpus:g}; each node gets as many"
    if config.weight_sync.is_direct:
        yield f"{key} {count}: weight_sync.backend: direct reaches workers of one node; set auto"


def check_shares(config: Config) -> Iterator[str]:
    """Say what does not go with a share of a GPU."""
    learner, rollout, share = config.learner, config.rollout, memory_share(config.rollout.gpus)
    if memory_share(learner.gpus) and learner.num_ranks > 1:
        yield f"learner.gpus: {learner.gpus:g} is for a lone rank, as NCCL refuses two on one GPU; set 1"
    if config.launcher.is_cluster:
        for key, section in (("learner.gpus", learner), ("rollout.gpus", rollout)):
            if memory_share(section.gpus):
                yield f"{key}: shares of a GPU are for one machine, and launcher.ray is a cluster; set 1"
    asked = memory.find_utilization(config)
    if share is not None and asked is not None and asked > rollout.gpus:
        yield (
            f"rollout.engine_args: {memory.UTILIZATION} {asked:g} is more than rollout.gpus: "
            f"{rollout.gpus:g}; leave it out, and {share:.3g} is taken"
        )


def check_long_rows(config: Config) -> Iterator[str]:
    """Say if a row may be longer than the engine can take."""
    size = read_size(config)
    if size is None or not any(engine_facts(name).loads_model for name in config.rollout.engines):
        return
    table = table_of(config.model.path)
    yield from sizes.find_long_rows(config, size, read_max_positions(table))


def check_heads(config: Config) -> Iterator[str]:
    """Say if the engine has no attention for the model's heads on the device that it is to run on."""
    size = read_size(config)
    for engine in map(engine_facts, config.by_engine):
        if size is None or config.rollout.gpus or not engine.cpu_head_sizes:
            continue
        latent = size.latent
        known = (engine.cpu_latent_size,) if latent else engine.cpu_head_sizes
        found = latent.rank + latent.rotary if latent else size.head_size
        if found in known:
            continue
        told = f"{found} (kv_lora_rank + qk_rope_head_dim)" if latent else found
        sizes_known = ", ".join(map(str, known))
        problem = f"{engine.title} on CPU has no attention for heads of {told}, only of {sizes_known}"
        yield f"model.path: {problem}; choose another model, or rollout.gpus: 1"


def check_models_of_engines(config: Config) -> Iterator[str]:
    """Say why an engine cannot run the policy's model."""
    longest = config.data.max_prompt_tokens + config.rollout.max_tokens
    for engine in map(engine_facts, config.by_engine):
        with contextlib.suppress(OSError, ValueError, TypeError):  # `check_models` says why
            if engine.unfit_model and (
                why := function(engine.unfit_model)(table_of(config.model.path), longest)
            ):
                yield f"model.path: {why}; use rollout.engine: vllm, or rows that are no longer"


def check_forced_lengths(config: Config) -> Iterator[str]:
    """Say if `rollout.response_tokens` is no distribution."""
    try:
        parse_lengths(config.rollout.response_tokens)
    except ConfigError as error:
        yield _line("rollout.response_tokens", error)


def check_quantized_experts(config: Config) -> Iterator[str]:
    """Say if experts are to be quantised: engines have that for linear layers alone."""
    kind, size = config.rollout.quantization, read_size(config)
    if kind is not None and size is not None and size.experts is not None:
        yield f"rollout.quantization: {kind} does not take a mixture of experts; leave it out"


def check_memory(config: Config, there: Capacity | None = None) -> Iterator[str]:
    """Say what this machine, or one of which `there` is told, has too little memory for.

    Replicas that may come later, and those on other nodes, are no reason to refuse a run.
    """
    here = machine.count_replicas_here(config)
    parts, there = count_all(config, here, here), there or capacity.measure()
    yield from sizes.find_lacks(parts, there, memory.shares_of(config))


PORTABLE_CHECKS: tuple[Callable[[Config], Iterator[str]], ...] = (
    check_buffer,
    check_cuts_of_named_models,
    check_cut_of_engine,
    check_forced_lengths,
    check_heads,
    check_long_rows,
    check_models_of_engines,
    check_nodes_of_replica,
    check_quantized_experts,
    check_shares,
    names.check_algorithm,
    names.check_rewards,
    names.check_environment,
)
"""Checks that are the same on any machine."""
SIZE_CHECKS: tuple[Callable[[Config], Iterator[str]], ...] = (*PORTABLE_CHECKS, check_memory)
"""Each yields a line per problem, which begins with the key that it is about."""
