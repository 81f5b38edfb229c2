"""Losses of a mixture's routers, beside that of the policy: even loads of experts, and small logits.

Owns the formulas: DeepSeek-V3's balance of each row (arXiv 2412.19437, 2.1.2), and of each token the square
of its log-sum-exp (ST-MoE, arXiv 2202.08906), as means over an update and its layers of experts. Invariant:
they are sums over positions: any cut into microbatches, ranks, stages or trees gives the whole's gradient.
The usual balance, of a whole batch, is a product of two means: no part of the batch can know its share.

Shapes: those of `routing.py`.
"""

from __future__ import annotations

import dataclasses

import torch
import torch.distributed as dist

from asyncrl.core.config.tree import LearnerSection
from asyncrl.core.errors import ConfigError
from learner.batching.batch import Totals
from learner.batching.routing import Routing


class _Attach(torch.autograd.Function):
    """Passes values on; with their gradient comes that of a loss of which no later layer knows."""

    @staticmethod
    def forward(ctx: object, values: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
        return values.view_as(values)

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return gradient, torch.ones((), device=gradient.device)


def read_factors(section: LearnerSection, num_layers: int, problem: str = "") -> tuple[float, float] | None:
    """Return the factors in a layer of `num_layers` with experts; None where both losses are off.

    Raises:
        ConfigError: There is none, or what is said in `problem`.
    """
    if not (section.router_aux_loss or section.router_z_loss):
        return None
    if problem or not num_layers:
        said = f"learner.router_aux_loss, router_z_loss: {problem or 'the model has no experts'}"
        raise ConfigError(said, hint="Leave them out, or 0")
    return section.router_aux_loss / num_layers, section.router_z_loss / num_layers


def weigh(routing: Routing, factors: tuple[float, float], totals: Totals, scale: float) -> Routing:
    """Return the inputs of a pass with `scale` times the losses; `totals` are those of the update."""
    of_row = factors[0] * scale / max(totals.num_packed_rows, 1.0)
    of_token = factors[1] * scale / max(totals.num_positions, 1.0)
    return dataclasses.replace(routing, factors=(of_row, of_token))


def attach(
    values: torch.Tensor,
    routing: Routing,
    logits_NE: torch.Tensor,
    is_chosen_NE: torch.Tensor,
    group: dist.ProcessGroup | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return `values` with the losses of a layer's positions here, and balances, squares and rows summed [3].

    Args:
        values: An output of the router that has a gradient.
        is_chosen_NE: The experts that are taken.
        group: Ranks that have the rows' other positions.
    """
    if routing.factors is None:
        return values, None
    run_N, length_R, logits_NE = routing.run_N, routing.length_R[:, None], logits_NE.float()
    if routing.is_in_SR is not None:
        is_in_SR = routing.is_in_SR.float()
    else:
        is_in_SR = torch.eye(len(length_R) + 1, len(length_R), device=run_N.device)
    load_SE = is_in_SR.new_zeros(len(is_in_SR), logits_NE.shape[1])
    load_RE = is_in_SR.T @ load_SE.index_add_(0, run_N, is_chosen_NE.float())
    if group is not None and group.size() > 1 and len(length_R):
        dist.all_reduce(load_RE, group=group)
    even_RE = load_RE * logits_NE.shape[1] / load_RE.sum(-1, keepdim=True)  # 1: as often as the others
    balance = (logits_NE.softmax(-1) * (is_in_SR @ (even_RE / length_R))[run_N]).sum()
    square = logits_NE.logsumexp(-1).square() @ routing.count_N.float()
    sums = torch.stack([balance, square, (is_in_SR @ (1 / length_R))[run_N].sum()])
    loss = routing.factors[0] * balance + routing.factors[1] * square
    attached: torch.Tensor = _Attach.apply(values, loss)  # type: ignore[no-untyped-call]
    return attached, sums.detach()
