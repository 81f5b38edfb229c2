"""Mixtures of experts: which layouts train them, Megatron's options for them, and what their routers chose.

Owns the refusals of `learner.ep` and `learner.etp`. Each rank holds whole experts (ep) or parts of them (etp)
and sends tokens to the ranks of their experts, so all ranks take the same number of passes. Megatron's losses
that balance experts stay off: it multiplies them by the tokens of a microbatch and expects a division that a
summed loss does not have. The router computes in float32. Invariant: no layout that was not shown to train
as one process does.

Shapes: N positions, E experts, L layers of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_layer import TransformerLayer

from asyncrl.core.config.tree import LearnerSection
from asyncrl.core.errors import ConfigError
from asyncrl.core.variants import backend_facts, function
from asyncrl.models.architectures import Experts, Family
from learner.batching.router_losses import attach
from learner.batching.routing import Recorded, RouterTally, Routing, describe_routers
from learner.megatron.model.packing import PackedRows

_EXPERTS, _ROUTER = ".experts.", "mlp.router.weight"


@dataclass
class FamilyConfig(TransformerConfig):  # type: ignore[misc]  # Megatron has no types
    """Megatron's configuration, with the `Family` of the model."""

    family: object = None


def check_experts(experts: Experts | None, config: LearnerSection) -> None:
    """Raise ConfigError unless the learner's ranks can share these experts."""
    for problem, hint in function(backend_facts(config.backend).unfit_experts)(config, experts):
        raise ConfigError(problem, hint=hint)


def describe_experts(experts: Experts | None, ep: int, etp: int) -> dict[str, object]:
    """Return the fields of Megatron's configuration."""
    if experts is None:
        return {}
    return {
        "num_moe_experts": experts.num,
        "moe_router_topk": experts.num_active,
        "moe_ffn_hidden_size": experts.size,
        "moe_layer_freq": [int(is_sparse) for is_sparse in experts.layers],
        "moe_router_load_balancing_type": "none",
        # Weights that sum to one are a softmax over the chosen logits alone.
        "moe_router_pre_softmax": not experts.normalises,
        "moe_router_dtype": "fp32",
        "moe_grouped_gemm": False,  # needs TransformerEngine
        "expert_model_parallel_size": ep,
        "expert_tensor_parallel_size": etp,
    }


class _Replay(Recorded):
    """Asked by Megatron in place of its own `RouterReplay`, of which one list is for all models."""

    def get_replay_topk(
        self,
        scores_NE: torch.Tensor,
        topk: int,
        groups: object,
        group_topk: object,
        choose: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the scores and the numbers of the experts to take."""
        chosen_NK = self.choose(choose(scores_NE, topk, num_groups=groups, group_topk=group_topk)[1])
        return scores_NE.gather(1, chosen_NK), chosen_NK


class ReplayingRouter(TopKRouter):  # type: ignore[misc]  # Megatron has no types
    """Takes recorded experts where there are any, and tallies passes with gradients."""

    routed: Routing | None = None
    """Of the pass that the layer does; see `RoutedLayer`."""

    def __init__(self, *args: object, **options: object) -> None:
        super().__init__(*args, **options)
        self.tally = RouterTally()

    def routing(
        self, logits: torch.Tensor, padding_mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert self.routed is not None, "a router's layer tells it of the rows"
        routed = self.routed
        if self.config.sequence_parallel:  # each tensor-parallel rank routes its own positions
            routed = routed.chunk(self.tp_group.size(), self.tp_group.rank())
        experts_NLK = routed.experts_NLK
        replay = None if experts_NLK is None else _Replay(experts_NLK[:, self.layer_number - 1])
        self.router_replay = replay
        weights_NE, chosen_NE = super().routing(logits, padding_mask=padding_mask)
        if torch.is_grad_enabled():  # not those of a pass that is to be recomputed
            logits_NE = logits.view_as(chosen_NE)
            weights_NE, sums = attach(weights_NE, routed, logits_NE, chosen_NE, self.tp_cp_group)
            self.tally.add(logits_NE.detach(), chosen_NE, routed, replay, sums)
        return weights_NE, chosen_NE


class RoutedLayer(TransformerLayer):  # type: ignore[misc]  # Megatron has no types
    """Tells its router of the rows of each pass, of one that is recomputed too."""

    def forward(self, *args: object, packed_seq_params: PackedRows, **options: object) -> object:
        router = getattr(self.mlp, "router", None)
        if isinstance(router, ReplayingRouter):
            router.routed = packed_seq_params.routing
        output: object = super().forward(*args, packed_seq_params=packed_seq_params, **options)
        if router is not None:  # it kept the graph of the pass, and so the model and its groups, for good
            self.mlp.token_dispatcher.probs = None
        return output


def take_balance(
    chunks: Sequence[torch.nn.Module], experts: Experts | None, device: torch.device
) -> dict[str, float]:
    """Return the metrics of all routers since they were last taken, over all ranks. Collective."""
    if experts is None:
        return {}
    sums: dict[int, torch.Tensor] = {}
    for router in (module for chunk in chunks for module in chunk.modules()):
        if isinstance(router, ReplayingRouter):
            sums[router.layer_number - 1] = router.tally.take(experts.num, device)
    nothing = RouterTally().take(experts.num, device)
    sums_LS = torch.stack([sums.get(layer, nothing) for layer in range(len(experts.layers))])
    if dist.get_world_size() > 1:
        dist.all_reduce(sums_LS)
    return describe_routers(sums_LS)


def is_expert(name: str) -> bool:
    """Return whether `name`, in Megatron or in a checkpoint, is of one expert."""
    return _EXPERTS in name


def tensor_group(name: str, group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Return the ranks that the parameter `name` is cut over: experts have a group of their own."""
    return parallel_state.get_expert_tensor_parallel_group() if is_expert(name) else group


def global_name(inner: str, layer: torch.nn.Module) -> str:
    """Return the name within the layer with experts counted over all expert-parallel ranks."""
    head, is_local, tail = inner.partition(".experts.local_experts.")
    if not is_local:
        return inner
    index, _, kind = tail.partition(".")
    return f"{head}{_EXPERTS}{vars(layer.get_submodule(head))['local_expert_indices'][int(index)]}.{kind}"


def names_of_place(name: str, config: TransformerConfig) -> list[str]:
    """Return `name`, or of an expert the names of those at its place on all expert-parallel ranks."""
    if not is_expert(name):
        return [name]
    head, _, tail = name.partition(_EXPERTS)
    index, _, kind = tail.partition(".")
    num_local = config.num_moe_experts // config.expert_model_parallel_size
    places = range(int(index) % num_local, config.num_moe_experts, num_local)
    return [f"{head}{_EXPERTS}{place}.{kind}" for place in places]


def gather_experts(
    name: str, full: torch.Tensor, config: TransformerConfig
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) of `names_of_place`; of an expert collective over expert-parallel ranks."""
    names, parts = names_of_place(name, config), [full]
    if len(names) > 1:
        parts = [torch.empty_like(full) for _ in names]
        dist.all_gather(parts, full.contiguous(), group=parallel_state.get_expert_model_parallel_group())
    yield from zip(names, parts, strict=True)


def checkpoint_names(inner: str, config: TransformerConfig) -> tuple[str, ...]:
    """Return the names in a checkpoint's layer of a router or an expert; none of anything else.

    Those of a fused matrix come in the order of its rows.
    """
    family = getattr(config, "family", None)
    names = family.experts if isinstance(family, Family) else None
    if names is None or not (is_expert(inner) or inner == _ROUTER):
        return ()
    if inner == _ROUTER:
        return (f"{names.block}.gate.weight",)
    index, _, kind = inner.partition(_EXPERTS)[2].partition(".")
    parts = (names.gate, names.up) if kind == "linear_fc1.weight" else (names.down,)
    return tuple(f"{names.block}{_EXPERTS}{index}.{part}.weight" for part in parts)
