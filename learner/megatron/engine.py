"""One model of a learner rank on Megatron-core: what a policy and a value model have in common.

Runs over gloo on the CPU and NCCL on GPUs. The loss is already each token's share of the minibatch,
so gradients are summed over microbatches and ranks and never divided. Invariant: any cut into
microbatches, data-parallel shares, stages or pieces of rows gives the gradient of the whole. Must never
read a clock or draw from an unseeded generator: two runs from one seed are bit-equal on the CPU.

Shapes: N packed positions, C columns of the head's output.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

import msgspec
import torch
import torch.distributed as dist

from asyncrl.core.config.tree import LearnerSection, LoraSection
from learner.algorithms.learning_rate import schedule_lr
from learner.backend import Placement
from learner.batching.batch import PackedBatch, Totals, restore_order
from learner.batching.router_losses import read_factors
from learner.checkpoint import pretrained
from learner.checkpoint.snapshot import Snapshot
from learner.guard.hooks import MakeRoom, StepGate
from learner.lora.factors import NO_ADAPTERS, Switch, with_factors
from learner.lora.folder import save_merged
from learner.megatron import cpu_adaptor
from learner.numerics.precision import DTYPES, LossScale
from learner.numerics.reduction import average_metrics, reduce_metrics
from weight_sync.memory.parts import Part

cpu_adaptor.install()  # before anything of Megatron is bound below

from learner.megatron import convert, groups  # noqa: E402
from learner.megatron.linear import bind_products  # noqa: E402
from learner.megatron.model import architecture, experts, heads, te_layers  # noqa: E402
from learner.megatron.model.lora import add_adapters  # noqa: E402
from learner.megatron.optimizer.updates import Updates  # noqa: E402
from learner.megatron.rows import ExportedParts  # noqa: E402
from learner.megatron.schedule import ColumnsLoss, make_schedule  # noqa: E402
from learner.megatron.state import TrainingState  # noqa: E402

bind_products()
T = TypeVar("T")


@dataclass(frozen=True)
class _Progress:
    """Schedule state that a checkpoint keeps."""

    lr: float
    num_updates: int


class Engine:
    """A model in process groups, trained or frozen; base of the two backends."""

    shares_prompts = False

    def __init__(
        self,
        model_path: Path,
        config: LearnerSection,
        placement: Placement,
        *,
        kind: Literal["policy", "value"],
        dtype: str,
        seed: int,
        temperature: float,
        is_frozen: bool,
        lora: LoraSection = NO_ADAPTERS,
    ) -> None:
        """Join the other ranks and load the model. Raises ConfigError as the backends do."""
        self._source, self._config, self._kind = model_path, config, kind
        self._lora, self._seed, self._adapters = lora, seed, Switch()
        self._dtype, self._temperature = DTYPES[dtype], temperature
        self._architecture = architecture.read_architecture(model_path)
        self._parallelism = architecture.Parallelism.of(config)
        architecture.check_parallelism(self._architecture, self._parallelism)
        experts.check_experts(self._architecture.experts, config)
        self._groups = groups.join_groups(placement, self._parallelism, config.gpus, seed)
        self._lr, self._num_updates, self._loss_scale = config.lr, 0, LossScale(self._dtype)
        self._max_tokens = config.max_tokens_per_microbatch
        self._gate: StepGate | None = None
        self._make_room: MakeRoom | None = None
        try:
            place = (self._dtype, self._groups.device)
            kernels = te_layers.choose(config, *place, self._architecture.head_size)
            self._transformer = architecture.make_transformer_config(
                self._architecture, self._parallelism, *place, kernels
            )
            self._chunks = self._load_chunks()
            vocab_size = self._architecture.vocab_size
            self._exported = ExportedParts(self._chunks, self._transformer, vocab_size)
            self._whole = convert.WholeTensors(
                self._chunks, self._transformer, vocab_size, self._groups, self._dtype
            )
            self._updates: Updates | None = None
            self._state: TrainingState | None = None
            if is_frozen:
                wrapped = [chunk.requires_grad_(False) for chunk in self._chunks]
            else:
                wrapped = self._prepare_updates()
            self._schedule = make_schedule(wrapped, self._transformer, self._groups, config, model_path)
            self.shares_prompts = self._schedule.shares_prompts
            if kind == "policy" and not is_frozen:
                cut = self._architecture.experts
                self._schedule.router_factors = read_factors(config, sum(cut.layers) if cut else 0)
        except BaseException:  # a process without a learner must not stay in the groups
            self._groups.stop()
            raise

    @property
    def dp_rank(self) -> int:
        return self._groups.dp.rank()

    @property
    def dp_size(self) -> int:
        return self._groups.dp.size()

    @property
    def num_copies(self) -> int:
        return self._parallelism.num_copies

    @property
    def num_updates(self) -> int:
        return self._num_updates

    def set_lr(self, lr: float) -> None:
        self._lr = lr

    @property
    def max_tokens_per_microbatch(self) -> int:
        return self._max_tokens

    def set_max_tokens_per_microbatch(self, num_tokens: int) -> None:
        self._max_tokens = num_tokens

    def set_step_gate(self, gate: StepGate | None) -> None:
        self._gate = gate

    def set_memory_guard(self, make_room: MakeRoom | None) -> None:
        self._make_room = make_room

    def raise_offload(self) -> str:
        return "" if self._updates is None else self._updates.raise_offload()

    def reduce(self, metrics: Mapping[str, float], weight: float) -> dict[str, float]:
        return average_metrics(metrics, weight, self._groups, self.dp_size)

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        self._sync_parameters()
        return self._whole.read()

    def named_parts(self) -> tuple[Part, ...]:
        self._sync_parameters()
        return self._exported.read()

    def save_hf(self, folder: Path) -> None:
        self._sync_parameters()
        if dist.get_rank() == 0:
            save_merged(self._source, folder, self._whole.read(), self._dtype, self._lora)
        elif self._parallelism.ep > 1 or self.dp_rank == self._groups.cp.rank() == 0:
            for _ in self._whole.read():
                pass
        dist.barrier()

    def snapshot_state(self) -> Snapshot:
        assert self._state is not None, "a frozen model has no state of its own"
        progress = {"num_updates": self._num_updates, "lr": self._lr}
        return self._state.snapshot(progress | self._loss_scale.state())

    def save_state(self, folder: Path) -> None:
        self.snapshot_state().write(folder)
        dist.barrier()

    def load_state(self, folder: Path) -> None:
        assert self._state is not None, "a frozen model has no state of its own"
        extra = self._state.load(folder)
        self._training.restore_parameters()
        progress = msgspec.convert(extra, _Progress)
        self._num_updates, self._lr = progress.num_updates, progress.lr
        self._loss_scale.restore(extra)

    def close(self) -> None:
        self._groups.stop()

    def _forward(self, batch: PackedBatch, *, has_squares: bool = False) -> torch.Tensor:
        """Return the head's output [C, N] on the CPU, on every rank."""
        self._sync_parameters()
        num_columns = 2 + has_squares if self._kind == "policy" else 1
        if not batch.num_rows and self._parallelism.ep == 1:
            return torch.zeros(num_columns, 0)

        def run() -> tuple[Sequence[PackedBatch], list[torch.Tensor]]:
            parts = self._schedule.split(batch, self._max_tokens)
            return parts, self._schedule.forward(parts, has_squares=has_squares)

        parts, outputs = self._run_again(batch, run)
        output_CN = (
            restore_order(parts, outputs)
            if self._groups.is_last_stage
            else torch.empty(num_columns, batch.num_tokens, device=self._groups.device)
        )
        return self._groups.share_from(self._groups.pp.size() - 1, output_CN).cpu()

    def _train(self, minibatch: PackedBatch, loss_fn: ColumnsLoss) -> dict[str, float]:
        """Do one update; return the loss's metrics over the whole minibatch, and the optimizer's."""
        minibatch = dataclasses.replace(minibatch, totals=self._sum_totals(minibatch.totals))
        metrics: dict[str, float] = {}
        for scale in self._loss_scale.attempts():
            found = self._accumulate([minibatch], loss_fn, scale)
            metrics = found | self._step_optimizer(found, scale)
            if math.isfinite(metrics["actor/grad_norm"]):
                self._loss_scale.accept(scale)
                break
        self._num_updates += 1
        return metrics

    def _accumulate(
        self, parts: Sequence[PackedBatch], loss_fn: ColumnsLoss, scale: float = 1.0, is_last: bool = True
    ) -> dict[str, float]:
        """Add the gradient of the last of `parts`; return the loss's metrics of it over all ranks."""
        collected = self._add_gradients(parts, loss_fn, scale, is_last)
        reduced: dict[str, float] = {}
        if self._groups.is_last_stage:
            reduced = reduce_metrics(
                {name: [found[name] for found in collected] for name in collected[0]}, self._groups
            )
        shared = self._groups.share_table_from(self._groups.pp.size() - 1, reduced)
        assert isinstance(shared, dict)
        return shared

    def _add_gradients(
        self, parts: Sequence[PackedBatch], loss_fn: ColumnsLoss, scale: float, is_last: bool
    ) -> list[Mapping[str, torch.Tensor]]:
        """Add the gradient of the last of `parts` over all ranks; return each of its microbatches' metrics.

        Where memory runs out in it, all parts are computed anew.
        """
        todo = parts[-1:]

        def run() -> list[Mapping[str, torch.Tensor]]:
            nonlocal todo
            wanted, todo = todo, parts
            if len(wanted) == len(parts):
                self._training.zero_gradients()
            found: list[Mapping[str, torch.Tensor]] = []
            for part in wanted:
                reduces = is_last and part is parts[-1]
                microbatches = self._schedule.split(part, self._max_tokens)
                found = self._schedule.train(microbatches, loss_fn, scale, reduces=reduces)
            return found

        return self._run_again(parts[-1], run)

    def _run_again(self, batch: PackedBatch, run: Callable[[], T]) -> T:
        """Return what the pass `run` does; where memory runs out and no other rank waits, do it again.

        Data-parallel ranks meet only when gradients are reduced, unless that is overlapped: until then
        one may take longer than the others, and they wait for it.
        """
        is_alone = dist.get_world_size() == 1
        is_apart = self._parallelism.num_copies == self._parallelism.ep == 1 and not self._parallelism.overlap
        while True:
            try:
                return run()
            except (MemoryError, RuntimeError) as error:  # torch.OutOfMemoryError is a RuntimeError
                if self._make_room is None:
                    raise
                may_run_again = is_alone or (is_apart and not self._schedule.is_reducing)
                self._make_room(batch.row_lengths, error, may_run_again)

    @property
    def _training(self) -> Updates:
        assert self._updates is not None, "a frozen model is never updated"
        return self._updates

    def _load_chunks(self) -> list[torch.nn.Module]:
        # A policy has no value head, and that of a new value model starts at zero.
        head = {"score.weight": (1, self._architecture.hidden_size)} if self._kind == "value" else {}
        read: convert.ReadTensor = pretrained.PretrainedTensors(self._source, zeros=head).read
        if self._lora.rank:
            read = with_factors(read, self._lora, self._seed)
        chunks: list[torch.nn.Module] = []
        for index in range(self._parallelism.vpp):
            stage = index if self._parallelism.vpp > 1 else None
            place = (self._architecture, self._transformer, stage, self._groups.device)
            chunk = (
                heads.make_policy(*place, self._temperature)
                if self._kind == "policy"
                else heads.make_value_model(*place)
            )
            if self._lora.rank:
                add_adapters(chunk, self._transformer, self._lora, self._adapters)
            convert.load_parameters(chunk, self._transformer, read, self._groups.tp)
            chunks.append(chunk)
        return chunks

    def _prepare_updates(self) -> list[torch.nn.Module]:
        """Make gradient buffers and optimizer; return the chunks wrapped in them."""
        self._updates = Updates(self._chunks, self._transformer, self._config, self._dtype)
        self._state = TrainingState(
            self._chunks, self._updates.optimizers, self._transformer, self._architecture.vocab_size
        )
        return list(self._updates.chunks)

    def _sync_parameters(self) -> None:
        if self._updates is not None:
            self._updates.sync_parameters()

    def _step_optimizer(self, metrics: Mapping[str, float], scale: float) -> dict[str, float]:
        lr = schedule_lr(self._lr, self._num_updates // self._config.minibatches, self._config)

        def may_step(norm: float) -> bool:
            return self._gate is None or self._gate(norm, metrics)

        grad_norm, has_stepped = self._training.step(lr, self._config.grad_clip, may_step, scale)
        done = {"actor/grad_norm": grad_norm, "actor/lr": lr, "actor/skipped_updates": float(not has_stepped)}
        if self._kind == "policy":
            done |= experts.take_balance(self._chunks, self._architecture.experts, self._groups.device)
        return done

    def _sum_totals(self, totals: Totals) -> Totals:
        if self.dp_size == 1:
            return totals
        counts = torch.tensor(dataclasses.astuple(totals), dtype=torch.float64)
        return Totals(*self._groups.all_reduce(counts, dist.ReduceOp.SUM).tolist())
