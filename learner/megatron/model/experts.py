"""Mixtures of experts: which layouts train them, Megatron's options for them, and what their routers chose.

Owns the refusals of `learner.ep` and `learner.etp`. Each rank holds whole experts (ep) or parts of them (etp)
and sends tokens to the ranks of their experts, so all ranks take the same number of passes. Megatron's losses
that balance experts stay off: it multiplies them by the tokens of a microbatch and expects a division that a
summed loss does not have. The router computes in float32. Invariant: no layout that was not shown to train
as one process does.

Shapes: N positions, E experts, L layers of the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.router import TopKRouter

from asyncrl.core.config.tree import LearnerSection
from asyncrl.core.errors import ConfigError
from asyncrl.core.variants import backend_facts, function
from asyncrl.models.architectures import Experts, Family

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


class MeasuredRouter(TopKRouter):  # type: ignore[misc]  # Megatron has no types
    """Counts, in passes with gradients, how many positions each expert got, and the router's entropy."""

    counts_E2: torch.Tensor | None = None
    """Of each expert its positions; then the sum of entropies and the positions, in the first two rows."""

    def routing(
        self, logits: torch.Tensor, padding_mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        weights_NE, chosen_NE = super().routing(logits, padding_mask=padding_mask)
        if torch.is_grad_enabled():  # not those of a pass that is to be recomputed
            assert padding_mask is not None, "positions that are padding are not counted"
            is_padding_N = padding_mask.flatten()
            if len(is_padding_N) != len(chosen_NE):  # Megatron scatters it on the first stage alone
                is_padding_N = is_padding_N.chunk(self.tp_group.size())[self.tp_group.rank()]
            self._count(logits.detach().view_as(chosen_NE), chosen_NE, ~is_padding_N[:, None])
        return weights_NE, chosen_NE

    @torch.no_grad()
    def _count(self, logits_NE: torch.Tensor, chosen_NE: torch.Tensor, is_counted_N1: torch.Tensor) -> None:
        if self.counts_E2 is None:
            self.counts_E2 = torch.zeros(chosen_NE.shape[1], 2, device=chosen_NE.device)
        logprobs_NE = logits_NE.float().log_softmax(-1)
        self.counts_E2[:, 0] += (chosen_NE & is_counted_N1).sum(0)
        self.counts_E2[0, 1] -= (logprobs_NE.exp() * logprobs_NE * is_counted_N1).sum()
        self.counts_E2[1, 1] += is_counted_N1.sum()


def take_balance(
    chunks: Sequence[torch.nn.Module], experts: Experts | None, device: torch.device
) -> dict[str, float]:
    """Return the metrics of all routers since they were last taken, over all ranks. Collective."""
    if experts is None:
        return {}
    counts_LE2 = torch.zeros(len(experts.layers), experts.num, 2, device=device)
    for router in (module for chunk in chunks for module in chunk.modules()):
        if isinstance(router, MeasuredRouter) and router.counts_E2 is not None:
            counts_LE2[router.layer_number - 1] += router.counts_E2
            router.counts_E2 = None
    if dist.get_world_size() > 1:
        dist.all_reduce(counts_LE2)
    load_LE, entropy_L, positions_L = counts_LE2[..., 0], counts_LE2[:, 0, 1], counts_LE2[:, 1, 1]
    is_met_L = positions_L > 0
    if not is_met_L.any():
        return {}
    share_LE = load_LE[is_met_L] * experts.num / load_LE[is_met_L].sum(-1, keepdim=True)
    return {
        "actor/expert_load_max": float(share_LE.max()),
        "actor/expert_load_min": float(share_LE.min()),
        "actor/router_entropy": float(entropy_L.sum() / positions_L.sum()),
    }


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
