"""Forward passes, updates and the optimizer of one sharded module; the policy and the critic each own one.

Ranks gather parameters together, layer by layer: invariant: every rank runs the same number of forward
and of backward passes. One that has fewer microbatches than another runs empty ones, which add zero.
The loss is each token's share of the minibatch, so any cut into microbatches and shares gives the
gradient of the whole. Must never read a clock or draw from an unseeded generator.

Shapes: N packed positions, C outputs of the module.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from asyncrl.core.config.tree import LearnerSection
from learner.algorithms.learning_rate import schedule_lr
from learner.batching.batch import PackedBatch, Totals, restore_order
from learner.batching.router_losses import weigh
from learner.batching.routing import Routing, forget_routes
from learner.batching.shared_prompts import SharedRows, plan_shared, share_prompts
from learner.checkpoint.snapshot import Snapshot
from learner.fsdp2 import sharding
from learner.fsdp2.groups import RankGroup
from learner.fsdp2.model.routers import Routers
from learner.fsdp2.model.rows import Rows
from learner.fsdp2.sharding import ShardedParameter
from learner.fsdp2.state import TrainingState
from learner.guard.hooks import MakeRoom, StepGate
from learner.numerics.precision import LossScale
from learner.numerics.reduction import reduce_metrics
from learner.numerics.transfer import send_fields

Inputs = tuple[torch.Tensor, torch.Tensor, Rows]
"""Tokens, labels, and their layout."""
EngineLoss = Callable[..., tuple[torch.Tensor, Mapping[str, torch.Tensor]]]
"""(*outputs of the module, microbatch) -> (loss, metrics)."""

T = TypeVar("T")


@dataclass
class Progress:
    """State that changes per update, besides weights and optimizer. `lr` is the schedule's peak."""

    lr: float
    num_updates: int = 0


class Engine:
    """Runs `module`; a frozen one has no optimizer."""

    def __init__(
        self,
        module: FSDPModule,
        parameters: Sequence[ShardedParameter],
        group: RankGroup,
        config: LearnerSection,
        *,
        dtype: torch.dtype,
        lay_out: Callable[[Sequence[int]], Rows],
        lay_out_shared: Callable[[SharedRows], Rows] | None = None,
        is_frozen: bool = False,
        routers: Routers | None = None,
    ) -> None:
        self.parameters, self.progress = parameters, Progress(config.lr)
        self._module: Any = module  # an FSDPModule, whose class in PyTorch is no Module
        self._group, self._config, self._lay_out = group, config, lay_out
        self._lay_out_shared, self._routers = lay_out_shared, routers
        self.max_tokens_per_microbatch = config.max_tokens_per_microbatch
        self.step_gate: StepGate | None = None
        self.make_room: MakeRoom | None = None
        self._loss_scale = LossScale(dtype)
        for parameter in parameters:
            parameter.tensor.requires_grad_(not is_frozen)
        self._optimizer = None if is_frozen else make_optimizer(parameters, config)
        self._state = TrainingState(parameters, self._optimizer, group) if self._optimizer else None

    @torch.no_grad()
    def infer(self, batch: PackedBatch, **options: bool) -> list[torch.Tensor]:
        """Return each output of the module, called with `options`, for the whole batch; collective."""
        return self._run_again(batch, lambda: self._infer(batch, **options))

    def _infer(self, batch: PackedBatch, **options: bool) -> list[torch.Tensor]:
        microbatches: list[PackedBatch] = []
        parts_CN: list[torch.Tensor] = []
        for microbatch, inputs in self._microbatches(batch):
            outputs = self._module(*inputs, **options)
            if microbatch is not None:
                microbatches.append(microbatch)
                parts_CN.append(torch.stack(tuple(outputs)))
        # The root stays gathered for a backward pass, which does not come.
        self._module.reshard()
        return list(restore_order(microbatches, parts_CN).cpu()) if parts_CN else []

    def update(self, minibatch: PackedBatch, loss_fn: EngineLoss, num_outputs: int) -> dict[str, float]:
        """Do one update on this rank's share; return metrics of the whole and `grad_norm`, `lr`,
        `skipped_updates`; collective."""
        assert self._optimizer is not None, "a frozen model is never updated"
        minibatch = dataclasses.replace(minibatch, totals=self._sum_totals(minibatch.totals))
        metrics: dict[str, float] = {}
        for scale in self._loss_scale.attempts():
            reduced = self.accumulate([minibatch], loss_fn, num_outputs, scale)
            metrics = reduced | self._step_optimizer(reduced, scale)
            if math.isfinite(metrics["grad_norm"]):
                self._loss_scale.accept(scale)
                break
        self.progress.num_updates += 1
        return metrics

    def accumulate(
        self, parts: Sequence[PackedBatch], loss_fn: EngineLoss, num_outputs: int, scale: float = 1.0
    ) -> dict[str, float]:
        """Add the gradient of the last of `parts`; see `LearnerBackend.accumulate`.

        Where memory runs out in it, all parts are computed anew.
        """
        assert self._optimizer is not None, "a frozen model is never updated"
        optimizer, todo = self._optimizer, parts[-1:]

        def run() -> dict[str, float]:
            nonlocal todo
            wanted, todo = todo, parts
            if len(wanted) == len(parts):
                optimizer.zero_grad()
            found: dict[str, float] = {}
            for part in wanted:
                found = self._add_gradients(part, loss_fn, num_outputs, scale)
            return found

        return self._run_again(parts[-1], run)

    def apply(self, metrics: Mapping[str, float], divisor: float) -> dict[str, float]:
        """Divide the gradient and do the update; see `LearnerBackend.apply`."""
        done = self._step_optimizer(metrics, divisor)
        self.progress.num_updates += 1
        return {**metrics, **done}

    def snapshot_state(self) -> Snapshot:
        """Copy this rank's state to the host; see `LearnerBackend.snapshot_state`."""
        assert self._state is not None, "a frozen model has no state"
        return self._state.snapshot(dataclasses.asdict(self.progress) | self._loss_scale.state())

    def load_state(self, folder: Path) -> None:
        """Restore what any layout wrote; see `LearnerBackend.load_state`."""
        assert self._state is not None, "a frozen model has no state"
        extra = self._state.load(folder)
        self.progress = msgspec.convert(extra, Progress)
        self._loss_scale.restore(extra)

    def _add_gradients(
        self, minibatch: PackedBatch, loss_fn: EngineLoss, num_outputs: int, scale: float
    ) -> dict[str, float]:
        """Add the gradient of `scale` times the loss; return the metrics of the whole minibatch."""
        collected: list[Mapping[str, torch.Tensor]] = []
        for microbatch, inputs in self._microbatches(minibatch):
            outputs: Sequence[torch.Tensor] = self._module(*self._weigh(microbatch, inputs, scale))
            if microbatch is None:
                loss = torch.stack([output.sum() * 0.0 for output in outputs]).sum()
            else:
                loss, metrics = loss_fn(*outputs, microbatch)
                collected.append(metrics)
            (loss * scale).backward()
        if not collected:  # an empty share: the names must be there for the reduction
            nothing = [torch.zeros(0, device=self._group.device)] * num_outputs
            collected.append(loss_fn(*nothing, minibatch.to(self._group.device))[1])
        return reduce_metrics(
            {name: [metrics[name] for metrics in collected] for name in collected[0]}, self._group
        )

    def _run_again(self, batch: PackedBatch, run: Callable[[], T]) -> T:
        """Return what the pass `run` does; where memory runs out do it again, if this is the only rank.

        Ranks gather each layer together: one cannot repeat what the others have behind them.
        """
        while True:
            try:
                return run()
            except (MemoryError, RuntimeError) as error:  # torch.OutOfMemoryError is a RuntimeError
                if self.make_room is None:
                    raise
                is_alone = self._group.size == 1
                if is_alone:  # first: it lets go of layers that are gathered
                    self._end_broken_pass()
                self.make_room(batch.row_lengths, error, is_alone)

    def _end_broken_pass(self) -> None:
        """Bring FSDP2 back to where a pass begins; only for a lone rank.

        A backward pass that broke off leaves its layers waiting for an end that never comes: later passes
        would run, and no gradient would arrive (seen with torch 2.13).
        """
        self._module._get_fsdp_state()._root_post_backward_final_callback()

    @property
    def shares_prompts(self) -> bool:
        """See `ModelBackend.shares_prompts`."""
        return self._lay_out_shared is not None

    def _microbatches(self, batch: PackedBatch) -> Iterator[tuple[PackedBatch | None, Inputs]]:
        """Yield this rank's microbatches on the device and the module's inputs for them.

        Then None as often as other ranks have more, with one token whose outputs nobody reads.
        """
        device, plan_rows = self._group.device, plan_shared if self.shares_prompts else None
        microbatches = batch.balance_microbatches(self.max_tokens_per_microbatch, plan_rows=plan_rows)
        count = self._group.all_reduce(torch.tensor([len(microbatches)]), dist.ReduceOp.MAX)
        for microbatch in microbatches:
            if self._routers is not None:
                self._routers.check(microbatch)
            sent = forget_routes(microbatch).to(device)
            yield sent, self._share(microbatch) or self._pack(microbatch, sent)
        token = torch.zeros(1, dtype=torch.long, device=device)
        for _ in range(int(count) - len(microbatches)):
            yield None, (token, token, self._lay_out((0, 1)))

    def _weigh(self, microbatch: PackedBatch | None, inputs: Inputs, scale: float) -> Inputs:
        """Return the inputs with `scale` times the losses of routers, if there are any."""
        tokens, labels, rows = inputs
        factors = None if self._routers is None else self._routers.factors
        if factors is None or microbatch is None or rows.routing is None:
            return inputs
        routing = weigh(rows.routing, factors, microbatch.totals, scale)
        return tokens, labels, dataclasses.replace(rows, routing=routing)

    def _pack(self, microbatch: PackedBatch, sent: PackedBatch) -> Inputs:
        """Return the inputs of its rows as they are."""
        rows = self._lay_out(sent.cu_seqlens)
        if self._routers is not None and self._routers.are_asked:
            own_N = torch.arange(microbatch.num_tokens)
            routing = Routing.of_rows(microbatch.cu_seqlens, own_N, microbatch.experts_N)
            rows = dataclasses.replace(rows, routing=send_fields(routing, self._group.device))
        return sent.tokens_N, sent.labels_N, rows

    def _share(self, microbatch: PackedBatch) -> Inputs | None:
        """Return the inputs of the tree that stands for its rows, if they share prompts."""
        shared = share_prompts(microbatch) if self._lay_out_shared is not None else None
        if shared is None or self._lay_out_shared is None:
            return None
        rows = self._lay_out_shared(shared)
        assert rows.shared is not None, "they are there with the layout"
        inputs = rows.shared.tokens_M, rows.shared.labels_E
        if self._routers is not None and self._routers.are_asked:
            routing = Routing.of_tree(microbatch.cu_seqlens, shared.tree, microbatch.experts_N)
            rows = dataclasses.replace(rows, routing=send_fields(routing, self._group.device))
        return *inputs, rows

    def _step_optimizer(self, metrics: Mapping[str, float], scale: float) -> dict[str, float]:
        assert self._optimizer is not None, "a frozen model is never updated"
        step = self.progress.num_updates // self._config.minibatches
        lr = schedule_lr(self.progress.lr, step, self._config)
        for options in self._optimizer.param_groups:
            options["lr"] = lr
        if scale != 1.0:
            sharding.scale_gradient(self.parameters, 1.0 / scale)
        grad_norm = sharding.measure_gradient(self.parameters, self._group)
        may_step = math.isfinite(grad_norm) and (self.step_gate is None or self.step_gate(grad_norm, metrics))
        if may_step:
            sharding.clip_gradient(self.parameters, grad_norm, self._config.grad_clip)
            self._optimizer.step()
        self._optimizer.zero_grad()
        done = {"grad_norm": grad_norm, "lr": lr, "skipped_updates": float(not may_step)}
        return done if self._routers is None else done | self._routers.take_balance(self._group)

    def _sum_totals(self, totals: Totals) -> Totals:
        counts = torch.tensor(dataclasses.astuple(totals), dtype=torch.float64)
        return Totals(*self._group.all_reduce(counts).tolist())


def make_optimizer(parameters: Sequence[ShardedParameter], config: LearnerSection) -> torch.optim.AdamW:
    """Return AdamW over the shards, its state made already; all decays, as in verl and our Megatron."""
    optimizer = torch.optim.AdamW(
        [parameter.tensor for parameter in parameters],
        lr=config.lr,
        betas=config.betas,
        eps=1e-8,
        weight_decay=config.weight_decay,
        fused=True,
    )
    for parameter in parameters:  # what AdamW makes at its first step, so that it can be saved before
        optimizer.state[parameter.tensor] = {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.tensor.device),
            "exp_avg": torch.zeros_like(parameter.tensor),
            "exp_avg_sq": torch.zeros_like(parameter.tensor),
        }
    return optimizer
