"""Schedule of microbatches through the model's stages: Megatron's plain, 1F1B and interleaved schedules.

Owns the inputs of the model and where its outputs go. It must never divide a loss: losses are shares of
the minibatch, gradients are summed. Invariant: all ranks of one copy of the model run the same number
of microbatches. Data-parallel ranks may run different numbers: they meet only when gradients are
reduced, after the last. Those that share experts meet in each layer, and pass empty ones to run as many.

Shapes: N positions of a microbatch, C columns of the head's output.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig

from asyncrl.core.config.tree import LearnerSection
from learner.attention import varlen
from learner.batching.batch import PackedBatch
from learner.batching.router_losses import weigh
from learner.batching.routing import check_recorded, forget_routes
from learner.batching.shared_prompts import plan_shared, share_prompts
from learner.batching.sharing import can_share
from learner.megatron.groups import RankGroups
from learner.megatron.model.movement import GatherOutputs
from learner.megatron.model.packing import PackedRows, describe_rows, describe_tree

ColumnsLoss = Callable[[torch.Tensor, PackedBatch], tuple[torch.Tensor, Mapping[str, torch.Tensor]]]
"""(output_CN, microbatch) -> (loss, metrics)."""


@dataclass(frozen=True)
class _Inputs:
    """A microbatch as every stage reads it. `tokens_1N` are this rank's share, padded."""

    microbatch: PackedBatch
    tokens_1N: torch.Tensor
    rows: PackedRows


class Schedule:
    """Runs the chunks of this rank: one per virtual stage, wrapped for training or plain."""

    def __init__(
        self,
        chunks: Sequence[torch.nn.Module],
        config: TransformerConfig,
        groups: RankGroups,
        *,
        is_varlen: bool = False,
        shares_prompts: bool = False,
    ) -> None:
        is_interleaved = len(chunks) > 1
        assert not is_interleaved or (config.overlap_p2p_comm and not config.batch_p2p_comm), (
            "interleaved stages without overlap_p2p_comm give wrong gradients without any sign of it"
        )
        self._chunks, self._config, self._groups = list(chunks), config, groups
        self._is_varlen, self.shares_prompts = is_varlen, shares_prompts
        self._num_multiple = groups.pp.size() if is_interleaved else 1
        self.is_reducing, self._reduces = False, True
        self.router_factors: tuple[float, float] | None = None
        config.finalize_model_grads_func = self._finalize_gradients

    def split(self, batch: PackedBatch, max_tokens: int) -> Sequence[PackedBatch]:
        """Return the microbatches: enough for every stage to have work, if there are rows enough.

        One that is empty stands for an empty share: there is a pass to take part in.
        """
        pp, multiple = self._groups.pp.size(), self._num_multiple
        plan_rows = plan_shared if self.shares_prompts else None
        parts = batch.balance_microbatches(max_tokens, plan_rows=plan_rows)
        wanted = min(max(pp, -(-len(parts) // multiple) * multiple), batch.num_rows)
        if len(parts) < wanted:
            parts = batch.balance_microbatches(max_tokens, min_parts=wanted, plan_rows=plan_rows)
        return parts or [batch]

    def train(
        self, microbatches: Sequence[PackedBatch], loss_fn: ColumnsLoss, scale: float, *, reduces: bool = True
    ) -> list[Mapping[str, torch.Tensor]]:
        """Add the gradients of all microbatches and reduce them; return each one's metrics (last stage).

        Gradients are `scale` times those of the loss. Without `reduces` they stay on their ranks, until a
        later call reduces all that was added. `is_reducing` says, also after an error, whether the other
        data-parallel ranks have been met.
        """
        self.is_reducing, self._reduces = False, reduces
        results: list[Mapping[str, torch.Tensor]] = self._run(
            microbatches, functools.partial(self._compute_loss, loss_fn, scale), scale=scale
        )
        return results

    @torch.no_grad()
    def forward(
        self, microbatches: Sequence[PackedBatch], *, has_squares: bool = False
    ) -> list[torch.Tensor]:
        """Return the head's output [C, N] of each microbatch (on the last stage)."""
        self.is_reducing = False
        results: list[torch.Tensor] = self._run(microbatches, self._keep_output, has_squares=has_squares)
        return results

    def _run(
        self,
        microbatches: Sequence[PackedBatch],
        finish: Callable[..., object],
        *,
        scale: float | None = None,
        has_squares: bool = False,
    ) -> list[Any]:
        """Run the passes; those without the `scale` of a loss forward alone."""
        inputs = [self._prepare(microbatch) for microbatch in microbatches]
        num_padding = self._count_passes(len(inputs)) - len(inputs)
        inputs += [self._prepare(microbatches[0].select_groups(()))] * num_padding if num_padding else []
        for one in inputs:
            one.rows.has_squares = has_squares
            if scale is not None and self.router_factors is not None:
                assert one.rows.routing is not None
                totals = one.microbatch.totals
                one.rows.routing = weigh(one.rows.routing, self.router_factors, totals, scale)
        run = get_forward_backward_func()
        iterators = [iter(inputs) for _ in self._chunks]
        results = run(
            forward_step_func=functools.partial(_step_forward, finish),
            data_iterator=iterators if len(iterators) > 1 else iterators[0],
            model=self._chunks if len(self._chunks) > 1 else self._chunks[0],
            num_microbatches=len(inputs),
            seq_length=1,  # the shapes of variable sequences are sent along
            micro_batch_size=1,
            forward_only=scale is None,
            collect_non_loss_data=scale is None,
        )
        return list(results)[: len(microbatches)]

    def _count_passes(self, num_microbatches: int) -> int:
        """Return the number of passes: with experts that ranks share, the same on all. Collective then."""
        count = num_microbatches
        if self._config.expert_model_parallel_size > 1:
            count = int(self._groups.all_reduce(torch.tensor(count), dist.ReduceOp.MAX))
        return -(-count // self._num_multiple) * self._num_multiple

    def _prepare(self, microbatch: PackedBatch) -> _Inputs:
        groups, config = self._groups, self._config
        multiple_of = groups.tp.size() if config.sequence_parallel else 1
        is_sparse_L = config.moe_layer_freq if config.num_moe_experts is not None else ()
        check_recorded(microbatch, config.num_moe_experts or 0, config.moe_router_topk, is_sparse_L)
        experts_N = microbatch.experts_N
        shared = share_prompts(microbatch, multiple_of) if self.shares_prompts else None
        microbatch = forget_routes(microbatch).to(groups.device)
        if shared is not None:
            rows = describe_tree(
                microbatch.cu_seqlens,
                shared,
                groups.device,
                is_varlen=self._is_varlen,
                experts_N=experts_N,
            )
            assert rows.shared is not None
            return _Inputs(microbatch, rows.shared.tokens_M[None], rows)
        rows = describe_rows(
            microbatch.cu_seqlens,
            groups.device,
            cp_rank=groups.cp.rank(),
            cp_size=groups.cp.size(),
            multiple_of=multiple_of,
            is_varlen=self._is_varlen,
            experts_N=experts_N,
        )
        assert rows.share is not None
        rows.labels_N = rows.share.take(microbatch.labels_N)
        return _Inputs(microbatch, rows.share.take(microbatch.tokens_N)[None], rows)

    def _gather(self, output_CN: torch.Tensor, rows: PackedRows) -> torch.Tensor:
        """Return the output of whole rows, without padding."""
        if rows.shared is not None:
            return rows.shared.spread(output_CN)
        assert rows.share is not None
        if self._groups.cp.size() == 1:
            return output_CN[:, : rows.share.num_tokens]
        gathered: torch.Tensor = GatherOutputs.apply(output_CN, rows.share, self._groups.cp)
        return gathered

    def _compute_loss(
        self, loss_fn: ColumnsLoss, scale: float, inputs: _Inputs, output_CN: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, Mapping[str, torch.Tensor]]:
        loss, metrics = loss_fn(self._gather(output_CN, inputs.rows), inputs.microbatch)
        if not inputs.microbatch.num_rows:
            # No loss, but a backward pass: other stages wait for its gradient, and overlapped
            # reductions for every parameter.
            loss = loss.detach() + output_CN.sum() * 0.0
        return loss * scale, torch.zeros((), dtype=torch.int, device=loss.device), metrics

    def _finalize_gradients(
        self, chunks: list[torch.nn.Module], _num_tokens: object, **options: object
    ) -> None:
        """Reduce gradients over all groups; Megatron would divide by the number of tokens here."""
        if not self._reduces:
            return
        self.is_reducing = True
        finalize_model_grads(chunks, None, **options)

    def _keep_output(
        self, inputs: _Inputs, output_CN: torch.Tensor, non_loss_data: bool = True
    ) -> torch.Tensor:
        assert non_loss_data
        return self._gather(output_CN, inputs.rows)


def make_schedule(
    chunks: Sequence[torch.nn.Module],
    config: TransformerConfig,
    groups: RankGroups,
    section: LearnerSection,
    model: Path,
) -> Schedule:
    """Return the schedule, with the kernel of attention that runs here, and shared prompts if they can be."""
    assert config.kv_channels is not None, "Megatron fills it in"
    is_varlen = varlen.can_run(groups.device, config.params_dtype, [config.kv_channels])
    shares_prompts = can_share(section, model, groups.device, is_varlen=is_varlen)
    return Schedule(chunks, config, groups, is_varlen=is_varlen, shares_prompts=shares_prompts)


def _step_forward(
    finish: Callable[..., object], iterator: Iterator[_Inputs], chunk: torch.nn.Module
) -> tuple[torch.Tensor, Callable[..., object]]:
    inputs = next(iterator)
    output: torch.Tensor = chunk(inputs.tokens_1N, None, None, packed_seq_params=inputs.rows)
    return output, functools.partial(finish, inputs)
