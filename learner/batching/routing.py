"""Router replay (arXiv 2510.11370): the learner's routers take the experts that the sampler's had chosen.

Owns the order of choice: the experts of a recorded row, weighted by the learner's own logits, so that the
router has its gradient; elsewhere the router's own. A reference policy and a critic choose for themselves:
their weights are others, and a model that is forced onto experts that it would not take is none that exists.
Invariant: a recorded row whose set is the router's own changes no bit.

Shapes: N positions that a model computes, P packed positions, S runs of positions in the same rows, R rows,
L layers, K active experts, E experts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from asyncrl.core.errors import DataError
from learner.attention.prefix_tree import PrefixTree
from learner.batching.batch import PackedBatch

_NUM_SUMS = 8
"""Of a router, behind the positions of each expert: entropy, positions, those that the sampler read, those
with a recorded row, those where it differs from the router's own choice, and the three of its losses."""


@dataclass(frozen=True, eq=False)
class Routing:
    """Inputs of the routers for the positions of one pass.

    Attributes:
        count_N: Packed positions that each stands for: 0 of padding, several of a shared prompt. Whole
            numbers: FSDP2 rounds real ones to the dtype of a layer.
        run_N: The run of each; that of padding is in no row.
        length_R: Tokens of each row, on all ranks.
        experts_NLK: The recorded experts, -1 where there are none; None if nowhere.
        read_N: Of `count_N` those that the sampler read: all but the last of each row.
        is_in_SR: Whether a run is in a row; None where each is a row of its own.
        factors: Of the losses of routers, of a row and of a token; None of a pass without them.
    """

    count_N: torch.Tensor
    run_N: torch.Tensor
    length_R: torch.Tensor
    experts_NLK: torch.Tensor | None = None
    read_N: torch.Tensor | None = None
    is_in_SR: torch.Tensor | None = None
    factors: tuple[float, float] | None = None

    @staticmethod
    def of_rows(
        cu_seqlens: Sequence[int], own_N: torch.Tensor, experts_PLK: torch.Tensor | None = None
    ) -> Routing:
        """Return that of the positions `own_N` of packed rows; those behind the last row are padding."""
        num_tokens = cu_seqlens[-1]
        is_padding_N = own_N >= num_tokens
        count_N, bounds = (~is_padding_N).long(), torch.tensor(cu_seqlens)
        known = count_N, torch.searchsorted(bounds[1:], own_N, right=True), bounds.diff()
        if experts_PLK is None:
            return Routing(*known)
        experts_NLK = _none(own_N, experts_PLK)
        experts_NLK[~is_padding_N] = experts_PLK[own_N[~is_padding_N]]
        return Routing(*known, experts_NLK, count_N * ~torch.isin(own_N, _last_positions(cu_seqlens)))

    @staticmethod
    def of_tree(
        cu_seqlens: Sequence[int], tree: PrefixTree, experts_PLK: torch.Tensor | None = None
    ) -> Routing:
        """Return that of a tree, whose positions have the same recorded experts in each of their rows."""
        count_N = torch.bincount(tree.tree_from_N, minlength=tree.num_tokens)
        run_N = torch.repeat_interleave(torch.tensor([one.end - one.start for one in tree.segments]))
        length_R = torch.tensor(cu_seqlens).diff()
        is_in_SR = torch.zeros(len(tree.segments), len(length_R), dtype=torch.bool)
        is_in_SR[run_N[tree.tree_from_N], torch.repeat_interleave(length_R)] = True
        if experts_PLK is None:
            return Routing(count_N, run_N, length_R, is_in_SR=is_in_SR)
        experts_NLK = _none(count_N, experts_PLK)
        experts_NLK[tree.tree_from_N] = experts_PLK
        assert experts_NLK[tree.tree_from_N].equal(experts_PLK), "rows that are routed apart share a position"
        last_N = torch.bincount(tree.tree_from_N[_last_positions(cu_seqlens)], minlength=tree.num_tokens)
        return Routing(count_N, run_N, length_R, experts_NLK, count_N - last_N, is_in_SR)

    def chunk(self, num_parts: int, part: int) -> Routing:
        """Return that of one of `num_parts` equal parts of the positions."""
        names = ("count_N", "run_N", "experts_NLK", "read_N")
        values = {name: value for name in names if (value := getattr(self, name)) is not None}
        return dataclasses.replace(self, **{name: x.chunk(num_parts)[part] for name, x in values.items()})


def _last_positions(cu_seqlens: Sequence[int]) -> torch.Tensor:
    return torch.tensor(cu_seqlens[1:], dtype=torch.long) - 1


def _none(values_N: torch.Tensor, experts_PLK: torch.Tensor) -> torch.Tensor:
    return experts_PLK.new_full((len(values_N), *experts_PLK.shape[1:]), -1)


def forget_routes(batch: PackedBatch) -> PackedBatch:
    """Return the batch for a model whose routers choose for themselves."""
    return dataclasses.replace(batch, experts_N=None)


class Recorded:
    """Recorded experts of one router for one pass.

    Attributes:
        shape: (N, K).
        is_there_N: Where there is a row.
        is_flipped_N: Where it differs from the router's own choice, once that was asked.
    """

    def __init__(self, experts_NK: torch.Tensor) -> None:
        self._experts_NK, self.shape = experts_NK.long(), experts_NK.shape
        self.is_there_N = experts_NK[:, 0] >= 0
        self.is_flipped_N = torch.zeros_like(self.is_there_N)

    def choose(self, own_NK: torch.Tensor) -> torch.Tensor:
        """Return the experts to take [N, K].

        Experts of an equal set stay in the router's order, and so do the bits of a sum over them.
        """
        differs_N = (self._experts_NK.sort(-1).values != own_NK.sort(-1).values).any(-1)
        self.is_flipped_N = differs_N & self.is_there_N
        return torch.where(self.is_flipped_N[:, None], self._experts_NK, own_NK)


class RouterTally:
    """Sums of one router over the positions of passes with gradients, until they are taken."""

    def __init__(self) -> None:
        self._sums: torch.Tensor | None = None

    @torch.no_grad()
    def add(
        self,
        logits_NE: torch.Tensor,
        is_chosen_NE: torch.Tensor,
        routing: Routing,
        recorded: Recorded | None,
        losses: torch.Tensor | None = None,
    ) -> None:
        """Add the positions of a pass; `losses` are the sums of `router_losses.attach`."""
        count_N = routing.count_N.float()
        logprobs_NE = logits_NE.float().log_softmax(-1)
        entropy = -(logprobs_NE.exp() * logprobs_NE).sum(-1) @ count_N
        sums = [entropy, count_N.sum(), *count_N.new_zeros(_NUM_SUMS - 2)]
        if recorded is not None and routing.read_N is not None:
            sums[2] = routing.read_N.float().sum()
            sums[3] = recorded.is_there_N.float() @ count_N
            sums[4] = recorded.is_flipped_N.float() @ count_N
        if losses is not None:
            sums[5:] = losses
        found = torch.cat([count_N @ is_chosen_NE.float(), torch.stack(sums)])
        self._sums = found if self._sums is None else self._sums + found

    def take(self, num_experts: int, device: torch.device) -> torch.Tensor:
        """Return the sums since the last call."""
        taken, self._sums = self._sums, None
        return torch.zeros(num_experts + _NUM_SUMS, device=device) if taken is None else taken


def describe_routers(sums_LS: torch.Tensor) -> dict[str, float]:
    """Return the metrics of all layers' routers, from their sums over all ranks."""
    load_LE, entropy_L, positions_L, read_L, recorded_L, flipped_L, *losses = sums_LS.split(
        [sums_LS.shape[1] - _NUM_SUMS, *[1] * _NUM_SUMS], dim=1
    )
    is_met_L = positions_L[:, 0] > 0
    if not is_met_L.any():
        return {}
    load_LE = load_LE[is_met_L]
    share_LE = load_LE * load_LE.shape[1] / load_LE.sum(-1, keepdim=True)
    metrics = {
        "actor/expert_load_max": float(share_LE.max()),
        "actor/expert_load_min": float(share_LE.min()),
        "actor/router_entropy": float(entropy_L.sum() / positions_L.sum()),
    }
    if read_L.any():
        metrics["actor/router_flip_rate"] = float(flipped_L.sum() / recorded_L.sum().clamp(min=1))
        metrics["actor/router_unrecorded"] = 1.0 - float(recorded_L.sum() / read_L.sum())
    balance, square, num_rows = (float(sums_L.sum()) for sums_L in losses)
    if num_rows:
        metrics["actor/router_aux_loss"] = balance / num_rows
        metrics["actor/router_z_loss"] = square / float(positions_L.sum())
    return metrics


def check_recorded(batch: PackedBatch, num_experts: int, num_active: int, is_sparse_L: Sequence[int]) -> None:
    """Raise DataError, which names the row, unless routers of that model can take what was recorded.

    Args:
        is_sparse_L: Whether each layer has experts; what is recorded of another is not read.
    """
    if batch.experts_N is None:
        return
    if not any(is_sparse_L):
        raise DataError(
            f"step {batch.step}: experts were recorded, and the model has none",
            hint="Engine and learner must run the same model",
        )
    shape, wanted = tuple(batch.experts_N.shape[1:]), (len(is_sparse_L), num_active)
    if shape != wanted:
        raise DataError(
            f"step {batch.step}: the recorded experts are of {shape[0]} layers and {shape[1]} a token, "
            f"those of the model of {wanted[0]} and {wanted[1]}",
            hint="Engine and learner must run the same model",
        )
    layers = [layer for layer, is_sparse in enumerate(is_sparse_L) if is_sparse]
    recorded_NLK = batch.experts_N if len(layers) == len(is_sparse_L) else batch.experts_N[:, layers]
    is_wrong_NL = _find_wrong(recorded_NLK, num_experts)
    if is_wrong_NL.any():
        position, index = is_wrong_NL.nonzero()[0].tolist()
        row = int(batch.row_N[position])
        raise DataError(
            f"step {batch.step}: ticket {batch.tickets_G[int(batch.group_R[row])]}, token "
            f"{position - batch.cu_seqlens[row]} of a row, layer {layers[index]}: the recorded experts "
            f"{recorded_NLK[position, index].tolist()} are not {num_active} different ones of {num_experts}",
            hint="Where none were recorded all are -1. Nothing was trained on this batch",
        )


def _find_wrong(recorded_NLK: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Return where a row is neither whole, of different experts that there are, nor empty [N, L]."""
    is_there_NLK = recorded_NLK >= 0
    is_wrong_NL = is_there_NLK.any(-1) & ~is_there_NLK.all(-1)
    is_wrong_NL |= ((recorded_NLK >= num_experts) | (recorded_NLK < -1)).any(-1)
    for distance in range(1, recorded_NLK.shape[-1] // 2 + 1):  # each pair once, without a sort
        is_wrong_NL |= ((recorded_NLK == recorded_NLK.roll(distance, -1)) & is_there_NLK).any(-1)
    return is_wrong_NL
