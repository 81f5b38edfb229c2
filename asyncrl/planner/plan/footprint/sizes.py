"""Fit of a run: its memory demand against the capacity, the model against its parallel sizes (pure).

Owns the arithmetic of a refusal, all of which stands in its message. Invariant: a run is refused only for
certain demand; activations, whose size depends on the rows that meet, are estimated and shown.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from asyncrl.core.config.tree import Config
from asyncrl.models.architectures import ModelSize
from asyncrl.planner.plan.footprint.memory import (
    BUFFER,
    ENGINE_CORES,
    FRONT_ENDS,
    GB,
    HOST,
    ITEM_BYTES,
    LEARNER_GPU,
    ROLLOUT_GPU,
    SHM,
    VERSIONS,
    Part,
)

if TYPE_CHECKING:
    from asyncrl.planner.plan.footprint.capacity import Capacity

ACTIVATIONS = "activations"
FROM_HIDDEN, FROM_MLP, FROM_HEADS = 6, 4, 4
"""Kept numbers per token and layer, per channel. Counted with saved-tensor hooks on a Qwen3 layer (torch
2.13, scaled dot-product attention): 4884, where 6 x 256 + 4 x 512 + 4 x (8 + 2) x 32 are 4864."""
REMEDIES = {
    HOST: "lower rollout.replicas, rollout.kv_cache_bytes or buffer.memory_bytes, or take a smaller model",
    SHM: "enlarge it (mount -o remount,size=..., or --shm-size of a container), or lower "
    "weight_sync.parallelism",
    LEARNER_GPU: "raise learner.tp, learner.pp or learner.dp, or set learner.offload",
    ROLLOUT_GPU: "raise rollout.gpus",
}
REMEDY_OF_SHARE = "raise this share of the GPU and lower the other one"
NONE_SHARED: Mapping[str, float] = {}
KEYS = {SHM: "weight_sync.parallelism", LEARNER_GPU: "learner.gpus", ROLLOUT_GPU: "rollout.gpus"}
"""The key that a line begins with."""
KEYS_OF_HOST = {
    BUFFER: "buffer.memory_bytes",
    FRONT_ENDS: "rollout.replicas",
    ENGINE_CORES: "rollout.replicas",
    VERSIONS: "rollout.replicas",
}
"""The same for main memory, by its largest part; any other part is of the model."""


def count_quantized_weights(config: Config, size: ModelSize | None) -> int:
    """Return the weights that engines hold quantised: of linear layers, without the head."""
    if config.rollout.quantization is None or size is None:
        return 0
    return size.num_weights - size.hidden_size * size.vocab_size


def count_expert_weights(size: ModelSize | None) -> int:
    """Return the weights of all experts of all layers; 0 of a dense model, or one that is not known."""
    experts = size.experts if size is not None else None
    if size is None or experts is None:
        return 0
    return 3 * size.hidden_size * experts.size * experts.num * sum(experts.layers)


def count_held_weights(size: ModelSize) -> int:
    """Return `size.num_weights` with those of the experts that a token does not meet."""
    experts = size.experts
    idle = (experts.num - experts.num_active) / experts.num if experts is not None else 0.0
    return size.num_weights + round(count_expert_weights(size) * idle)


def find_lacks(
    parts: Sequence[Part], capacity: Capacity, shares: Mapping[str, float] = NONE_SHARED
) -> Iterator[str]:
    """Yield a line for each kind of memory of which `parts` take more than there is.

    Args:
        shares: Of a GPU's memory, by place, of what does not have it to itself.
    """
    gpu = capacity.gpu
    there = {HOST: capacity.host, SHM: capacity.shm, LEARNER_GPU: gpu, ROLLOUT_GPU: gpu}
    for where, whole in there.items():
        share, size = shares.get(where), whole
        if whole is not None and share is not None:
            size = int(whole * share)
        taking = [part for part in parts if part.where == where and part.what != ACTIVATIONS]
        if where == HOST:
            taking += [part for part in parts if part.where == SHM]  # it is main memory too
        total = sum(part.num_bytes for part in taking)
        if size is not None and total > size:
            sums = " + ".join(f"{part.what} {part.num_bytes / GB:.3g} ({part.rule})" for part in taking)
            largest = max(taking, key=lambda part: part.num_bytes).what
            key = KEYS_OF_HOST.get(largest, "model.path") if where == HOST else KEYS[where]
            told = f"{size / GB:.3g}" + (f" ({share:.3g} of it)" if share is not None else "")
            remedy = REMEDIES[where] if share is None else REMEDY_OF_SHARE
            yield (f"{key}: the run takes {total / GB:.3g} GB of {where}, which has {told}: {sums}; {remedy}")


def find_uneven_engine(config: Config, size: ModelSize) -> Iterator[str]:
    """Say if the engine cannot be cut over a replica's GPUs, or nodes: vLLM gives each whole heads."""
    gpus = math.ceil(config.rollout.gpus) or config.rollout.num_nodes
    heads, kv_heads = size.num_heads, size.num_key_value_heads
    if gpus < 2:
        return
    if heads % gpus:
        yield f"rollout.gpus: {gpus} does not divide the model's {heads} attention heads; change it"
    elif kv_heads % gpus and gpus % kv_heads:
        yield (
            f"rollout.gpus: {gpus} neither divides the model's {kv_heads} key/value heads nor is a multiple "
            "of them; change it"
        )


def find_long_rows(config: Config, size: ModelSize, max_positions: int | None) -> Iterator[str]:
    """Say if the longest row has more positions than the model, or more keys and values than the engine.

    Args:
        max_positions: That the model has, if that can be told.
    """
    longest = config.data.max_prompt_tokens + config.rollout.max_tokens
    sums = f"data.max_prompt_tokens + rollout.max_tokens = {longest}"
    if max_positions is not None and longest > max_positions:
        yield (
            f"rollout.max_tokens: a row may have {sums} tokens, and the model knows {max_positions} "
            "positions (max_position_embeddings); lower one of them, or choose another model"
        )
    token_bytes = size.num_cached * ITEM_BYTES[config.model.dtype]
    there = config.rollout.kv_cache_bytes
    if not config.rollout.gpus and longest * token_bytes > there:
        yield (
            f"rollout.kv_cache_bytes: {there} do not hold one row of {sums} tokens x {token_bytes} bytes = "
            f"{longest * token_bytes}; raise it, or lower one of them"
        )


def estimate_activations(config: Config, size: ModelSize, ranks: int | None = None) -> Part:
    """Return what a microbatch of the most tokens keeps for its backward pass, on one GPU or on the host.

    Args:
        ranks: That are on this machine; None: all.
    """
    learner = config.learner
    item = ITEM_BYTES[config.model.dtype]
    heads = (size.num_heads + size.num_key_value_heads) * size.head_size
    hidden, channels, experts = FROM_HIDDEN * size.hidden_size, size.intermediate_size, size.experts
    if experts is not None:  # a token is copied to each of its experts, and comes back from it
        hidden += 2 * experts.num_active * size.hidden_size
        met = (experts.num_active + experts.num_shared) * experts.size
        channels = max(met, 0 if all(experts.layers) else channels)
    layer = hidden + FROM_MLP * channels + FROM_HEADS * heads
    num_layers = -(-size.num_layers // learner.pp)
    is_whole = learner.recompute != "full"
    numbers = layer * num_layers if is_whole else size.hidden_size * num_layers + layer
    tokens, cuts = count_tokens(config), learner.tp * learner.cp
    kept = (
        f"{layer} numbers x {num_layers} layers" if is_whole else f"{numbers} numbers, recomputed per layer"
    )
    rule = f"estimated: {tokens} tokens x {kept} x {item} bytes" + (
        f" / (tp x cp {cuts})" if cuts > 1 else ""
    )
    ranks = 1 if learner.gpus else ranks or learner.num_ranks
    num_bytes = tokens * numbers * item * ranks // cuts
    return Part(LEARNER_GPU if learner.gpus else HOST, ACTIVATIONS, num_bytes, rule)


def count_tokens(config: Config) -> int:
    """Return the tokens of the largest microbatch: its budget, or all rows that a rank has of a minibatch."""
    learner, rollout = config.learner, config.rollout
    groups = -(-learner.groups_per_step // (learner.minibatches * learner.dp))
    rows = groups * rollout.group_size * (config.data.max_prompt_tokens + rollout.max_tokens)
    return min(learner.max_tokens_per_microbatch, rows)
