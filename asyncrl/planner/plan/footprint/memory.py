"""Demand of a run for host memory, shared memory and GPU memory, part by part with its rule (pure).

Owns the arithmetic; the numbers of weights are handed in. Activations depend on the rows that meet in a
microbatch: `sizes` estimates them. Invariant: a part whose size is not known is left out, never guessed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from asyncrl.core.config.conflicts import WITH_VALUES
from asyncrl.core.config.gpus import memory_share
from asyncrl.core.config.rules.recorded_experts import recorded_sizes
from asyncrl.core.config.tree import Config
from asyncrl.core.experts import item_bytes
from asyncrl.core.variants import backend_facts, engine_facts

HOST, SHM = "host", "/dev/shm"
PER_REPLICA = {HOST: "host, for each replica", SHM: "/dev/shm, for each replica"}
"""On a cluster, where replicas are on other nodes: how many of them a node gets is known as they start."""
PER_RANK = {HOST: "host, for each learner rank elsewhere", SHM: "/dev/shm, for each other learner node"}
BUFFER, FRONT_ENDS, ENGINE_CORES, VERSIONS = (
    "buffer",
    "replicas' front ends",
    "engine cores",
    "versions on their way",
)
"""Users of main memory whose size a key of the configuration sets."""
SNAPSHOTS, STAGES, NUM_DIRECT = "snapshots of versions", "stages of engine workers", 2
"""With `weight_sync.backend: direct`: versions that ranks keep to send, and that workers hold, at most. Ranks
keep another one as the base of differences; a worker's base is one of the two."""
EXPERTS = "recorded experts of a step"
RELAYED = "a version while it is loaded"
UTILIZATION = "gpu_memory_utilization"
LEARNER_GPU, ROLLOUT_GPU = "each GPU of the learner", "each GPU of a replica"
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
QUANTIZED_BYTES = 1
"""Of a weight in INT8 or FP8; its share of a channel's scale is not counted."""
GRADIENT_BYTES, MOMENT_BYTES, MAIN_BYTES = 4, 8, 4
"""Per weight: a float32 gradient, AdamW's two moments, the float32 copy of a 16-bit or offloaded weight."""
SNAPSHOT_BYTES = 12
"""Per weight of a trained model: the host's copy for a checkpoint, of which each rank has its share."""
GB = 10**9
LEARNER_BYTES, FRONT_END_BYTES, RAY_BYTES = 440 * 10**6, 630 * 10**6, 400 * 10**6
"""Resident memory of a learner rank, a replica and Ray, with a model of nothing."""


@dataclass(frozen=True)
class Part:
    """One user of memory.

    Attributes:
        where: `HOST`, `SHM`, one of `PER_REPLICA` or `PER_RANK`, `LEARNER_GPU` or `ROLLOUT_GPU`.
        what: Name of the user.
        num_bytes: At most, of all its processes together; of one device where `where` is a GPU.
        rule: Rule of the count.
    """

    where: str
    what: str
    num_bytes: int
    rule: str


def shares_of(config: Config) -> dict[str, float]:
    """Return the shares of a GPU's memory of those that do not have theirs to themselves, by place."""
    engine = find_utilization(config) if memory_share(config.rollout.gpus) else None
    found = {LEARNER_GPU: memory_share(config.learner.gpus), ROLLOUT_GPU: engine}
    return {where: share for where, share in found.items() if share is not None}


def find_utilization(config: Config) -> float | None:
    """Return the share of its GPUs' memory that an engine is told to take; None leaves that to it."""
    asked = [one.rollout.engine_args.get(UTILIZATION) for one in config.by_engine.values()]
    told = [float(share) for share in asked if isinstance(share, int | float)]
    return max(told) if told else memory_share(config.rollout.gpus)


def count_parts(
    config: Config,
    num_weights: int | None,
    replicas: int,
    critic_weights: int | None = None,
    buffer_bytes: int | None = None,
    ranks: int | None = None,
    expert_weights: int = 0,
    adapter_weights: int | None = None,
    quantized_weights: int = 0,
) -> list[Part]:
    """Return the parts on the host and on GPUs; those of an unknown model size are without its weights.

    Args:
        num_weights: Of the policy.
        replicas: That are on this machine.
        critic_weights: Of the critic; without it those of the policy, if the critic starts as the policy.
        buffer_bytes: Of all groups that may be in flight, if that is known.
        ranks: Of the learner, that are on this machine; None: all.
        expert_weights: Weights of experts among those of the policy.
        adapter_weights: That are trained in place of the policy's, if it has adapters.
        quantized_weights: Weights among those of the policy that engines hold in one byte each.
    """
    if critic_weights is None and config.critic.path is None:
        critic_weights = num_weights
    return [
        Part(HOST, "Ray's own processes", RAY_BYTES, "observed"),
        _buffer_part(config.buffer.memory_bytes, buffer_bytes),
        *_learner_parts(
            config,
            num_weights,
            critic_weights,
            ranks or config.learner.num_ranks,
            expert_weights,
            adapter_weights,
        ),
        *_rollout_parts(config, num_weights, replicas, quantized_weights),
    ]


def count_replica_elsewhere(
    config: Config, num_weights: int | None, quantized_weights: int = 0
) -> list[Part]:
    """Return the parts of one replica on whichever node it is, without its receiver's shared memory."""
    largest = max(config.by_engine, key=lambda name: engine_facts(name).core_bytes)
    parts = _rollout_parts(config.by_engine[largest], num_weights, 1, quantized_weights)
    return [replace(part, where=PER_REPLICA.get(part.where, part.where)) for part in parts]


def count_rank_elsewhere(
    config: Config,
    num_weights: int | None,
    critic_weights: int | None,
    expert_weights: int = 0,
    adapter_weights: int | None = None,
) -> list[Part]:
    """Return the host's parts of one learner rank on whichever node it is."""
    parts = _learner_parts(config, num_weights, critic_weights, 1, expert_weights, adapter_weights)
    return [replace(part, where=PER_RANK[HOST]) for part in parts if part.where == HOST]


def _buffer_part(ceiling: int, needed: int | None) -> Part:
    if needed is not None and needed < ceiling:
        return Part(HOST, BUFFER, needed, "the largest groups, as many as may be in flight")
    return Part(HOST, BUFFER, ceiling, "buffer.memory_bytes, for groups that are stored")


def _learner_parts(
    config: Config,
    num_weights: int | None,
    critic_weights: int | None,
    ranks: int,
    expert_weights: int,
    adapter_weights: int | None,
) -> Iterator[Part]:
    learner = config.learner
    yield Part(
        HOST, "learner processes", LEARNER_BYTES * ranks, f"{LEARNER_BYTES / GB:.2g} GB x {ranks} ranks"
    )
    yield from _expert_parts(config, ranks)
    if num_weights is None:
        return
    trained = _trained(config, num_weights if adapter_weights is None else adapter_weights, critic_weights)
    has_adapters = adapter_weights is not None
    for model in _models(config, num_weights, trained, expert_weights, has_adapters=has_adapters):
        is_on_gpu = learner.gpus > 0 and not model.is_offloaded
        count = 1 if is_on_gpu else ranks
        num_bytes = int(model.num_weights * model.bytes_per_weight / (learner.tp * learner.pp)) * count
        cuts = f" / (tp {learner.tp} x pp {learner.pp})" if learner.tp * learner.pp > 1 else ""
        rule = f"({model.rule}) x {model.num_weights / 1e9:.3g} G weights{cuts}"
        rule += f" x {ranks} ranks" if count > 1 else ""
        yield Part(LEARNER_GPU if is_on_gpu else HOST, model.what, num_bytes, rule)
    if config.weight_sync.is_direct:
        item, count = ITEM_BYTES[config.model.dtype], 1 if learner.gpus else ranks
        num_kept = NUM_DIRECT + config.weight_sync.uses_delta
        rule = f"{num_kept} x weight {item} bytes / {learner.num_ranks} ranks"
        num_bytes = num_kept * item * num_weights // learner.num_ranks * count
        where = LEARNER_GPU if learner.gpus else HOST
        yield Part(where, SNAPSHOTS, num_bytes, rule + (f" x {ranks} ranks" if count > 1 else ""))
    for name, size in trained.items():
        rule = f"weight and moments {SNAPSHOT_BYTES} bytes x {size / 1e9:.3g} G weights"
        num_bytes = SNAPSHOT_BYTES * size * ranks // learner.num_ranks
        rule += f" x {ranks} of {learner.num_ranks} ranks" if ranks < learner.num_ranks else ""
        yield Part(HOST, f"copy of the {name} for a checkpoint", num_bytes, rule)


def _expert_parts(config: Config, ranks: int) -> Iterator[Part]:
    """Yield what a step's recorded experts take: as they arrive, and in two bytes each in the batch."""
    sizes, learner, rollout = recorded_sizes(config), config.learner, config.rollout
    if sizes is None:
        return
    num_layers, num_chosen, num_experts = sizes
    of_token = num_layers * num_chosen * (item_bytes(num_experts) + 2)
    rows = learner.groups_per_step * rollout.group_size
    tokens = rows * (config.data.max_prompt_tokens + rollout.max_tokens)
    rule = f"{of_token} bytes x {tokens / 1e6:.3g} M tokens / dp {learner.dp} x {ranks} ranks"
    yield Part(HOST, EXPERTS, of_token * tokens * ranks // learner.dp, rule)


@dataclass(frozen=True)
class _Model:
    """Memory of one model on a rank, per weight of its share."""

    what: str
    num_weights: int
    bytes_per_weight: float
    rule: str
    is_offloaded: bool = False


def _models(
    config: Config, num_weights: int, trained: dict[str, int], expert_weights: int, *, has_adapters: bool
) -> Iterator[_Model]:
    learner = config.learner
    # Of tp shares: a rank has 1 / tp of the rest, and 1 / (ep x etp) of the experts.
    fewer = 1 - learner.tp / (learner.ep * learner.expert_tp)
    kept = 1 - fewer * expert_weights / max(1, num_weights)
    is_sharded = backend_facts(learner.backend).shards_weights
    item = 4 if is_sharded else ITEM_BYTES[config.model.dtype]
    main = 0 if item == 4 else MAIN_BYTES
    # Megatron's ranks of one context share their optimizer too.
    shards = learner.dp if is_sharded else learner.dp * learner.cp
    cut = f" / dp {shards}" if shards > 1 else ""
    if shards > learner.dp:
        cut = f" / (dp {learner.dp} x cp {learner.cp})"
    shared = cut if is_sharded else ""
    held = kept * (item + GRADIENT_BYTES) / (shards if is_sharded else 1)
    state = (main + MOMENT_BYTES) / shards
    weights = f"weight {item}{shared} + gradient {GRADIENT_BYTES}{shared}"
    weights = weights if kept == 1 else f"({weights}) x {kept:.3g} with ep {learner.ep}"
    optimizer = f"optimizer {main + MOMENT_BYTES}{cut}"
    if learner.offload and learner.gpus and not is_sharded:  # gradients go to the host's AdamW
        state = (MAIN_BYTES + MOMENT_BYTES + GRADIENT_BYTES) / shards
        optimizer = f"optimizer {MAIN_BYTES + MOMENT_BYTES} + gradient {GRADIENT_BYTES}{cut}"
    for name, size in trained.items():
        if learner.offload:
            yield _Model(f"{name} and its gradient", size, held, f"{weights} bytes", is_sharded)
            yield _Model(f"optimizer of the {name}", size, state, f"{optimizer} bytes", is_offloaded=True)
        else:
            yield _Model(f"{name} and its optimizer", size, held + state, f"{weights} + {optimizer} bytes")
    if has_adapters or config.algorithm.kl.coef > 0:
        name = "model" if has_adapters else "reference policy"
        reference = kept * item / (shards if is_sharded else 1)
        told = "" if kept == 1 else f" x {kept:.3g} with ep {learner.ep}"
        yield _Model(name, num_weights, reference, f"weight {item}{shared}{told} bytes")


def _trained(config: Config, policy_weights: int, critic_weights: int | None) -> dict[str, int]:
    """Return the number of weights of each model that is trained."""
    has_critic = config.algorithm.advantage in WITH_VALUES and critic_weights is not None
    return {"policy": policy_weights} | ({"critic": critic_weights} if has_critic and critic_weights else {})


def _rollout_parts(
    config: Config, num_weights: int | None, replicas: int, quantized_weights: int
) -> Iterator[Part]:
    rollout = config.rollout
    if not replicas:
        return
    each = f" x {replicas} replicas" if replicas > 1 else ""
    yield Part(HOST, FRONT_ENDS, FRONT_END_BYTES * replicas, f"{FRONT_END_BYTES / GB:.2g} GB{each}")
    item = ITEM_BYTES[config.model.dtype]
    if config.weight_sync.is_direct and num_weights is not None:
        rule = f"{NUM_DIRECT} x weight {item} bytes{each}"
        yield Part(HOST, STAGES, NUM_DIRECT * item * num_weights * replicas, rule)
    if rollout.num_nodes > 1 and num_weights is not None:
        rule = f"weight {item} bytes, on each further node of a replica{each}"
        yield Part(HOST, RELAYED, item * num_weights * replicas, rule)
    held = (num_weights or 0) * item - quantized_weights * (item - QUANTIZED_BYTES)
    told = f", {quantized_weights / GB:.3g} G of them {QUANTIZED_BYTES}" if quantized_weights else ""
    if rollout.gpus:
        if num_weights is not None:
            num_gpus = math.ceil(rollout.gpus)
            cut = f" / {num_gpus} GPUs" if num_gpus > 1 else ""
            rule = f"weight {item} bytes{told}{cut}; the KV cache takes what is left"
            yield Part(ROLLOUT_GPU, "engine", held // num_gpus, rule)
        return
    names = [rollout.engines[index % len(rollout.engines)] for index in range(replicas)]
    core_bytes = sum(engine_facts(name).core_bytes for name in names) // replicas
    core = core_bytes + rollout.kv_cache_bytes + held
    rule = f"({core_bytes / GB:.2g} GB + rollout.kv_cache_bytes + weight {item} bytes{told}){each}"
    yield Part(HOST, ENGINE_CORES, core * replicas, rule)
