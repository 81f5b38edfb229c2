"""Place of this rank's parameter rows in the Hugging Face tensors.

Owns the geometry of one rank: the layers of its pipeline stage, its tensor-parallel share, the parts
of fused weights. Tensors that all tensor-parallel ranks have alike belong to the first, a tied embedding to
the first stage, and ranks with the same parameters divide the bytes. Makes no collective and no copy.
Invariant: the parts of all ranks cover each element of each Hugging Face tensor exactly once.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence

import torch
from megatron.core import parallel_state
from megatron.core.transformer import TransformerConfig

from learner.checkpoint.pieces import RowRun
from learner.megatron import convert
from learner.megatron.model.experts import is_expert, tensor_group
from weight_sync.memory.parts import Part, split_parts


class ExportedParts:
    """The parts of the live parameters that this rank publishes, as views that are made once."""

    def __init__(self, chunks: Sequence[torch.nn.Module], config: TransformerConfig, vocab_size: int) -> None:
        self._chunks, self._config, self._vocab_size = chunks, config, vocab_size
        self._parameters: list[torch.nn.Parameter] = [p for chunk in chunks for p in chunk.parameters()]
        self._addresses: list[int] = []
        self._parts: tuple[Part, ...] = ()

    def read(self) -> tuple[Part, ...]:
        """Return the parts; the same ones as before while the parameters are where they were."""
        addresses = [parameter.data_ptr() for parameter in self._parameters]
        if addresses != self._addresses:
            owned = [part for is_owned, part in self.find_held() if is_owned]
            shared = [part for part in owned if not is_expert(part.name)]
            sharing = parallel_state.get_data_parallel_group(with_context_parallel=True)
            self._parts = tuple(split_parts(shared, sharing.rank(), sharing.size()))
            if len(shared) < len(owned):
                sharing = parallel_state.get_expert_data_parallel_group()
                experts = [part for part in owned if is_expert(part.name)]
                self._parts += tuple(split_parts(experts, sharing.rank(), sharing.size()))
            self._addresses = addresses
        return self._parts

    def find_held(self) -> Iterator[tuple[bool, Part]]:
        """Yield (whether this rank and those with the same parameters own it, part) of all parameters."""
        for chunk in self._chunks:
            for name, is_copy, parameter in convert.trained_names(chunk):
                place = tensor_rank(name)
                is_owned = not is_copy and (convert.cut_dimension(name) is not None or place[0] == 0)
                matrix_RC = parameter.detach().reshape(len(parameter), -1)
                for run in row_runs(name, parameter.shape, self._config, self._vocab_size, place):
                    values_RC = matrix_RC[run.local_row : run.local_row + run.num_rows]
                    yield is_owned, Part(run.name, run.shape, run.row, run.column, values_RC)


def row_runs(
    name: str,
    local_shape: Sequence[int],
    config: TransformerConfig,
    vocab_size: int,
    place: tuple[int, int],
) -> tuple[RowRun, ...]:
    """Return where the rows of one rank's share of the parameter `name` are in the Hugging Face tensors.

    Args:
        vocab_size: Rows of the vocabulary that mean something; the padding below them is nowhere.
        place: The rank among those that share one copy of the model, and their number.
    """
    rank, size = place
    dimension = convert.cut_dimension(name)
    shape = list(local_shape)
    if dimension is not None:
        shape[dimension] *= size
    if name in convert.VOCABULARY and shape[0] > vocab_size:
        shape[0] = vocab_size
    full = torch.empty(shape, device="meta")
    targets = [(hf, tuple(x.shape)) for hf, x in convert.parts_of(name, full, config)]
    num_rows = local_shape[0]
    if len(targets) > 1:
        half, runs = num_rows // 2, _qkv_runs(targets, config, rank, size)
        if len(targets) == 2:  # gate above up, each this rank's share
            runs = (RowRun(i * half, half, *target, rank * half) for i, target in enumerate(targets))
        fused = convert.fused_name(name, config)
        return tuple(runs if fused is None else _join(fused, targets, runs))
    ((hf, hf_shape),) = targets
    if dimension == 1:
        return (RowRun(0, num_rows, hf, hf_shape, 0, rank * local_shape[1]),)
    first = rank * num_rows if dimension == 0 else 0
    return (RowRun(0, max(0, min(num_rows, hf_shape[0] - first)), hf, hf_shape, first),)


def _join(
    name: str, parts: Sequence[tuple[str, tuple[int, ...]]], runs: Iterable[RowRun]
) -> Iterator[RowRun]:
    """Yield `runs` of `parts` as those of one tensor `name`, which has the parts one above the other."""
    num_rows = [shape[0] for _, shape in parts]
    firsts = dict(zip((part for part, _ in parts), itertools.accumulate(num_rows, initial=0), strict=False))
    shape = (sum(num_rows), *parts[0][1][1:])
    for run in runs:
        row = firsts[run.name] + run.row
        yield dataclasses.replace(run, name=name, shape=shape, row=row)


def tensor_rank(name: str) -> tuple[int, int]:
    """Return this rank's place among those that the parameter `name` is cut over, and how many there are."""
    group = tensor_group(name, parallel_state.get_tensor_model_parallel_group())
    return group.rank(), group.size()


def _qkv_runs(
    targets: Sequence[tuple[str, tuple[int, ...]]], config: TransformerConfig, rank: int, size: int
) -> Iterator[RowRun]:
    """Yield the runs of q, k and v, which are interleaved by key/value group."""
    num_groups = config.num_query_groups
    assert num_groups is not None
    local_row = 0
    for group in range(rank * num_groups // size, (rank + 1) * num_groups // size):
        for name, shape in targets:
            count = shape[0] // num_groups
            yield RowRun(local_row, count, name, shape, group * count)
            local_row += count
