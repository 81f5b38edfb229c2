"""One sharded model of a learner rank: what a policy and a value model have in common.

Owns loading, the export, and the state; `engine.py` computes. Invariant: every method is collective,
and a process whose model could not be loaded is in no group.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from asyncrl.core.config.tree import LearnerSection, LoraSection
from learner.attention import varlen
from learner.backend import Placement
from learner.batching.shared_prompts import SharedRows
from learner.batching.sharing import can_share
from learner.checkpoint.pretrained import PretrainedTensors
from learner.checkpoint.snapshot import Snapshot
from learner.fsdp2.engine import Engine
from learner.fsdp2.groups import RankGroup, join_group
from learner.fsdp2.model.language_model import Ways
from learner.fsdp2.model.modules import PolicyModule, ValueModule
from learner.fsdp2.model.routers import attach_routers
from learner.fsdp2.model.rows import Rows, lay_out_padded, lay_out_rows, lay_out_shared
from learner.fsdp2.model.stored_weights import StoredWeights
from learner.fsdp2.sharding import (
    ShardedParameter,
    Sharding,
    describe_parameters,
    gather_whole,
    shard_module,
)
from learner.guard.hooks import MakeRoom, StepGate
from learner.lora.factors import NO_ADAPTERS, with_factors
from learner.lora.folder import save_merged
from learner.numerics.precision import DTYPES
from learner.numerics.reduction import average_metrics
from weight_sync.encoding.low_rank import A, B
from weight_sync.memory.parts import Part

RootModule = PolicyModule | ValueModule


class Loaded(NamedTuple):
    """The root module, the layers that are cut one by one, and the weights, which the shards read."""

    root: RootModule
    layers: Sequence[torch.nn.Module]
    weights: StoredWeights


class RankedModel:
    """Base of the two backends; see `ModelBackend` for what its methods promise."""

    def __init__(
        self,
        source: Path,
        config: LearnerSection,
        placement: Placement,
        *,
        dtype: str,
        seed: int,
        is_frozen: bool,
        lora: LoraSection = NO_ADAPTERS,
    ) -> None:
        self._source, self._dtype, self._lora = source, DTYPES[dtype], lora
        self._parts: tuple[Part, ...] = ()
        self._part_addresses: list[int] = []
        self._group: RankGroup = join_group(placement, config.gpus, seed)
        try:
            root, layers, weights = self._load(source)
            routers = None
            if isinstance(root, PolicyModule):
                routers = attach_routers(
                    root.model, layers, is_packed=root.ways.is_packed, is_compiled=config.compile
                )
                if not is_frozen:
                    routers.read_losses(config, root.model)
            sharded = shard_module(root, layers, self._group, _make_sharding(config, self._dtype))
            named = root.named_hf_parameters()
            parameters = describe_parameters(named, self._group, weights.stored_names)
            weights.fill(parameters)
            self._kept = {} if lora.rank else weights.kept
            if lora.rank:
                parameters = _fill_factors(parameters, source, lora, seed)
            self._engine = Engine(
                sharded,
                parameters,
                self._group,
                config,
                dtype=self._dtype,
                lay_out=_make_lay_out(root.ways, self._group.device, self._dtype),
                lay_out_shared=_make_lay_out_shared(
                    config, source, root.ways, self._group.device, self._dtype
                ),
                is_frozen=is_frozen,
                routers=routers,
            )
        except BaseException:  # a process without a learner must not stay in the group
            self._group.stop()
            raise

    @property
    def dp_rank(self) -> int:
        return self._group.rank

    @property
    def dp_size(self) -> int:
        return self._group.size

    @property
    def num_copies(self) -> int:
        return 1

    @property
    def shares_prompts(self) -> bool:
        return self._engine.shares_prompts

    @property
    def num_updates(self) -> int:
        return self._engine.progress.num_updates

    def reduce(self, metrics: Mapping[str, float], weight: float) -> dict[str, float]:
        return average_metrics(metrics, weight, self._group, self._group.size)

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for parameter in self._engine.parameters:
            whole = gather_whole(parameter, self._group, self._dtype)
            yield from ((one.name, one.values) for one in parameter.split(whole, 0))
        yield from self._kept.items()

    @torch.no_grad()  # with gradients `to_local` is an operation of its own
    def named_parts(self) -> tuple[Part, ...]:
        """Return this rank's rows, in float32: they are converted while they are copied."""
        shards = [parameter.shard for parameter in self._engine.parameters]
        addresses = [shard.data_ptr() for shard in shards]
        if addresses != self._part_addresses:
            parts = [part for one in self._engine.parameters for part in _make_parts(one)]
            if self._group.rank == 0:
                parts += [_make_part(name, tuple(one.shape), 0, one) for name, one in self._kept.items()]
            self._parts, self._part_addresses = tuple(parts), addresses
        return self._parts

    def snapshot_state(self) -> Snapshot:
        return self._engine.snapshot_state()

    def save_state(self, folder: Path) -> None:
        self._engine.snapshot_state().write(folder)
        self._group.barrier()

    def load_state(self, folder: Path) -> None:
        self._engine.load_state(folder)

    def set_lr(self, lr: float) -> None:
        self._engine.progress.lr = lr

    @property
    def max_tokens_per_microbatch(self) -> int:
        """The token budget in use; see `learner.guard.hooks.TunableBackend`."""
        return self._engine.max_tokens_per_microbatch

    def set_max_tokens_per_microbatch(self, num_tokens: int) -> None:
        """Use another budget from the next call on; the gradient stays the same."""
        self._engine.max_tokens_per_microbatch = num_tokens

    def set_step_gate(self, gate: StepGate | None) -> None:
        """Ask `gate` before every optimizer step; a refused one counts as skipped."""
        self._engine.step_gate = gate

    def set_memory_guard(self, make_room: MakeRoom | None) -> None:
        """Ask `make_room` when a pass runs out of memory."""
        self._engine.make_room = make_room

    def save_hf(self, folder: Path) -> None:
        if self._group.rank == 0:
            save_merged(self._source, folder, self.named_tensors(), self._dtype, self._lora)
        else:
            for _ in self.named_tensors():  # the export is collective
                pass
        self._group.barrier()

    def close(self) -> None:
        self._group.stop()

    def _load(self, source: Path) -> Loaded:
        """Build the model on the CPU."""
        raise NotImplementedError


@torch.no_grad()
def _fill_factors(
    parameters: Sequence[ShardedParameter], source: Path, lora: LoraSection, seed: int
) -> list[ShardedParameter]:
    """Give this rank's rows of the adapters' factors their first values; return the factors."""
    read = with_factors(PretrainedTensors(source).read, lora, seed)
    factors = [parameter for parameter in parameters if parameter.name.endswith((A, B))]
    for factor in factors:
        shard = factor.shard
        shard.copy_(read(factor.name)[factor.start : factor.start + len(shard)])
    return factors


def _make_parts(parameter: ShardedParameter) -> Iterator[Part]:
    for one in parameter.split(parameter.shard, parameter.start):
        yield _make_part(one.name, one.shape, one.start, one.values)


def _make_part(name: str, shape: tuple[int, ...], start: int, values: torch.Tensor) -> Part:
    return Part(name, shape, start, 0, values.reshape(-1, math.prod(shape[1:])))


def _make_lay_out(ways: Ways, device: torch.device, dtype: torch.dtype) -> Callable[[Sequence[int]], Rows]:
    if not ways.is_packed:
        return functools.partial(lay_out_padded, device=device)
    is_varlen = varlen.can_run(device, dtype, ways.head_sizes)
    return functools.partial(lay_out_rows, device=device, is_varlen=is_varlen)


def _make_lay_out_shared(
    config: LearnerSection, source: Path, ways: Ways, device: torch.device, dtype: torch.dtype
) -> Callable[[SharedRows], Rows] | None:
    """Return the layout of rows that share prompts; None where they do not."""
    is_varlen = varlen.can_run(device, dtype, ways.head_sizes)
    if not can_share(config, source, device, is_varlen=is_varlen, problem=ways.no_tree):
        return None
    return functools.partial(lay_out_shared, device=device, is_varlen=is_varlen)


def _make_sharding(config: LearnerSection, dtype: torch.dtype) -> Sharding:
    return Sharding(
        dtype=dtype,
        is_offloaded=config.offload,
        is_recomputed=config.recompute == "full",
        is_compiled=config.compile,
    )
