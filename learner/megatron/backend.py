"""The learner backend on Megatron-core: model, data-parallel wrapper and distributed optimizer.

Runs over gloo on the CPU and NCCL on GPUs. The loss is already each token's share of the minibatch,
so gradients are summed over microbatches and ranks and never divided. Invariant: any cut into
microbatches or data-parallel shares gives the gradient of the whole. Must never read a clock or
draw from an unseeded generator: two runs from one seed are bit-equal on the CPU.

Shapes: N packed positions.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
import torch.distributed as dist

from asyncrl.config.tree import LearnerSection
from learner.backend import LossFn, Placement
from learner.batch import PackedBatch, Totals
from learner.megatron import cpu_adaptor

cpu_adaptor.install()  # before anything of Megatron is bound below

from megatron.core.distributed import (  # noqa: E402
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer  # noqa: E402
from megatron.core.transformer.module import Float16Module  # noqa: E402

from learner.megatron import architecture, convert, groups, packing, pretrained, state  # noqa: E402
from learner.megatron.logprob import vocab_parallel_logprobs  # noqa: E402

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class MegatronBackend:
    """A `LearnerBackend`.

    Example:
        backend = MegatronBackend(Path("model"), LearnerSection(lr=1e-4), Placement(), dtype="float32")
        logprobs_N, entropy_N = backend.logprobs(batch)
        metrics = backend.update(batch, loss_fn)
        backend.close()
    """

    def __init__(
        self,
        model_path: Path,
        config: LearnerSection,
        placement: Placement,
        *,
        dtype: str = "bfloat16",
        seed: int = 0,
        temperature: float = 1.0,
        sequence_parallel: bool = False,
    ) -> None:
        """Join the other ranks and load the model.

        Raises:
            ConfigError: The model is not supported, or cannot be cut over the ranks that there are.
        """
        self._source, self._config, self._placement = model_path, config, placement
        self._dtype, self._temperature = DTYPES[dtype], temperature
        self._architecture = architecture.read_architecture(model_path)
        parallelism = architecture.Parallelism(
            tp=config.tp, sequence_parallel=sequence_parallel and config.tp > 1
        )
        architecture.check_parallelism(self._architecture, parallelism)
        groups.start_groups(placement, config.tp, seed)
        self._tp_group, self._dp_group = groups.tensor_group(), groups.data_group()
        self._has_cuda = torch.cuda.is_available()
        self._device = groups.rank_device()
        self._lr, self._num_updates = config.lr, 0
        try:
            self._transformer = architecture.make_transformer_config(
                self._architecture, parallelism, self._dtype
            )
            self._model: torch.nn.Module = self._load_model()
            self._ddp, self._optimizer = self._wrap_model()
        except BaseException:  # a process without a learner must not stay in the groups
            groups.stop_groups()
            raise

    @property
    def dp_rank(self) -> int:
        return self._dp_group.rank()

    @property
    def dp_size(self) -> int:
        return self._dp_group.size()

    @property
    def num_updates(self) -> int:
        return self._num_updates

    @torch.no_grad()
    def logprobs(self, batch: PackedBatch) -> tuple[torch.Tensor, torch.Tensor]:
        parts = [self._forward(part) for part in self._microbatches(batch)]
        if not parts:
            return torch.zeros(0), torch.zeros(0)
        logprobs_N, entropy_N = (torch.cat(column).cpu() for column in zip(*parts, strict=True))
        return logprobs_N, entropy_N

    def update(self, minibatch: PackedBatch, loss_fn: LossFn) -> dict[str, float]:
        minibatch = dataclasses.replace(minibatch, totals=self._sum_totals(minibatch.totals))
        self._ddp.zero_grad_buffer()
        self._optimizer.zero_grad()
        collected: list[Mapping[str, torch.Tensor]] = []
        for microbatch in self._microbatches(minibatch):
            loss, metrics = loss_fn(*self._forward(microbatch), microbatch)
            loss.backward()  # type: ignore[no-untyped-call]
            collected.append(metrics)
        if not collected:  # an empty share: the names must be there for the reduction
            nothing = torch.zeros(0, device=self._device)
            collected.append(loss_fn(nothing, nothing, self._to_device(minibatch))[1])
        finalize_model_grads([self._ddp])
        reduced = self._reduce({name: [metrics[name] for metrics in collected] for name in collected[0]})
        return reduced | self._step_optimizer()

    def reduce(self, metrics: Mapping[str, float], weight: float) -> dict[str, float]:
        total = float(self._all_reduce(torch.tensor([weight], dtype=torch.float64), dist.ReduceOp.SUM)[0])
        share = weight / total if total else 1.0 / self.dp_size
        # A rank without weight adds nothing to a mean, even if its value is not a number.
        shares = {name: value * share if share else 0.0 for name, value in metrics.items()}
        shares |= {name: value for name, value in metrics.items() if _extreme(name)}
        return self._reduce({name: [torch.tensor(value)] for name, value in shares.items()})

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        return convert.export_parameters(
            self._model, self._transformer, self._architecture.vocab_size, self._tp_group
        )

    def save_state(self, folder: Path) -> None:
        tensors = dict(state.optimizer_tensors(self._optimizer.optimizer)) | state.generator_tensors()
        record = {"layout": self._layout(), "num_updates": self._num_updates, "lr": self._lr}
        state.write_state(folder, self._placement.rank, tensors, record)
        dist.barrier()

    def load_state(self, folder: Path) -> None:
        record = state.read_record(folder, self._placement.rank, self._layout())
        generators = state.generator_tensors()
        tensors = dict(state.optimizer_tensors(self._optimizer.optimizer)) | generators
        state.read_tensors(folder, self._placement.rank, tensors)
        state.restore_generators(generators)
        # As after an update: the float32 shards go into the model and are gathered over the ranks.
        self._optimizer._copy_main_params_to_model_params()
        self._ddp.start_param_sync(force_sync=True)
        self._num_updates, self._lr = record["num_updates"], record["lr"]

    def set_lr(self, lr: float) -> None:
        self._lr = lr

    def save_hf(self, folder: Path) -> None:
        if self._placement.rank == 0:
            pretrained.write_folder(self._source, folder, self.named_tensors(), self._dtype)
        elif self.dp_rank == 0:
            for _ in self.named_tensors():
                pass
        dist.barrier()

    def close(self) -> None:
        groups.stop_groups()

    def _load_model(self) -> torch.nn.Module:
        model = architecture.make_model(self._architecture, self._transformer, self._device)
        tensors = pretrained.PretrainedTensors(self._source)
        convert.load_parameters(model, self._transformer, tensors.read, self._tp_group)
        return model.to(self._device)

    def _wrap_model(self) -> tuple[DistributedDataParallel, DistributedOptimizer]:
        config = self._config
        model = (
            Float16Module(self._transformer, self._model) if self._dtype is torch.bfloat16 else self._model
        )
        ddp = DistributedDataParallel(
            self._transformer,
            DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True),
            model,
        )
        optimizer_config = OptimizerConfig(
            optimizer="adam",
            lr=config.lr,
            min_lr=0.0,
            weight_decay=config.weight_decay,
            adam_beta1=config.betas[0],
            adam_beta2=config.betas[1],
            adam_eps=1e-8,
            clip_grad=config.grad_clip,
            bf16=self._dtype is torch.bfloat16,
            params_dtype=self._dtype,
            use_distributed_optimizer=True,
        )
        with cpu_adaptor.cuda_type_names(list(self._model.parameters())):
            chain = get_megatron_optimizer(optimizer_config, [ddp], use_gloo_process_groups=False)
        (optimizer,) = chain.chained_optimizers
        inner = optimizer.optimizer
        assert isinstance(inner, torch.optim.AdamW), (
            f"{type(inner)} keeps its step elsewhere: state.py does not know it"
        )
        for group in inner.param_groups:
            group["fused"] = True  # one call for all parameters instead of a dozen each
        return ddp, optimizer

    def _forward(self, microbatch: PackedBatch) -> tuple[torch.Tensor, torch.Tensor]:
        num_tokens = microbatch.num_tokens
        tokens_N, cu_seqlens = microbatch.tokens_N, list(microbatch.cu_seqlens)
        if self._transformer.sequence_parallel and num_tokens % self._tp_group.size():
            # The sequence is cut over the ranks: one more row, whose outputs are dropped.
            num_padding = -num_tokens % self._tp_group.size()
            tokens_N = torch.nn.functional.pad(tokens_N, (0, num_padding))
            cu_seqlens.append(num_tokens + num_padding)
        rows = packing.describe_rows(cu_seqlens, self._device)
        logits_NV = self._ddp(tokens_N[None], None, None, packed_seq_params=rows)[0, :num_tokens]
        return vocab_parallel_logprobs(
            logits_NV,
            microbatch.labels_N,
            vocab_size=self._architecture.vocab_size,
            temperature=self._temperature,
            group=self._tp_group,
        )

    def _microbatches(self, batch: PackedBatch) -> Iterator[PackedBatch]:
        for microbatch in batch.split_microbatches(self._config.max_tokens_per_microbatch):
            yield self._to_device(microbatch)

    def _to_device(self, batch: PackedBatch) -> PackedBatch:
        if not self._has_cuda:
            return batch
        return batch.to(self._device)

    def _step_optimizer(self) -> dict[str, float]:
        lr = self._lr * self._warmup_factor()
        for group in self._optimizer.optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.prepare_grads()
        grad_norm = float(self._optimizer.clip_grad_norm(self._config.grad_clip))
        is_finite = math.isfinite(grad_norm)
        if is_finite:
            self._optimizer.step_with_ready_grads()
        self._num_updates += 1
        return {"actor/grad_norm": grad_norm, "actor/lr": lr, "actor/skipped_updates": float(not is_finite)}

    def _warmup_factor(self) -> float:
        """Rise linearly over `warmup_steps` learner steps; the first one already moves."""
        step = self._num_updates // self._config.minibatches
        return min(1.0, (step + 1) / self._config.warmup_steps) if self._config.warmup_steps else 1.0

    def _sum_totals(self, totals: Totals) -> Totals:
        if self.dp_size == 1:
            return totals
        counts = torch.tensor(dataclasses.astuple(totals), dtype=torch.float64)
        return Totals(*self._all_reduce(counts, dist.ReduceOp.SUM).tolist())

    def _reduce(self, metrics: Mapping[str, list[torch.Tensor]]) -> dict[str, float]:
        """Reduce values of microbatches, then of data-parallel ranks, each by its name's rule."""
        reduced: dict[str, float] = {}
        for op, combine in ((None, torch.sum), ("max", torch.amax), ("min", torch.amin)):
            names = sorted(name for name in metrics if _extreme(name) == op)
            if names:
                values = torch.stack(
                    [combine(torch.stack([v.detach() for v in metrics[name]])) for name in names]
                )
                reduce_op = {None: dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}[op]
                reduced.update(zip(names, self._all_reduce(values, reduce_op).tolist(), strict=True))
        return reduced

    def _all_reduce(self, values: torch.Tensor, op: dist.ReduceOp.RedOpType) -> torch.Tensor:
        values = values.to(self._device)
        if self.dp_size > 1:
            dist.all_reduce(values, op, group=self._dp_group)
        return values

    def _layout(self) -> dict[str, object]:
        return {
            "model_type": self._architecture.model_type,
            "world_size": self._placement.world_size,
            "tp": self._config.tp,
            "dtype": str(self._dtype),
        }


def _extreme(name: str) -> str | None:
    """Return "max" or "min" for a metric reduced that way, by verl's rule: the last part of the name."""
    last = name.rpartition("/")[2]
    return next((op for op in ("max", "min") if op in last.split("_")), None)
