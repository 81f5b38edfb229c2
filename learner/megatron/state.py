"""State of this rank's distributed optimizer, as pieces of the whole model.

Megatron's distributed optimizer cuts the tensor-parallel parameters of a rank's layers into flat
ranges, one per data-parallel rank. Owns the way from there to Hugging Face names, rows and columns and
back. Written instead of `dist_checkpointing` (docs/adr/0004). The optimizer's float32 parameters are
the model: the rest is gathered after loading. Invariants: every element of the model is written by
exactly one rank; at the same layout training goes on bit by bit as if it had not stopped.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.transformer import TransformerConfig

from learner.checkpoint.pieces import Piece, RowRun, pieces_of_range
from learner.checkpoint.reader import StateReader
from learner.checkpoint.snapshot import KINDS, HostCopies, PieceState, Snapshot
from learner.megatron import convert, rows
from learner.megatron.optimizer.host import held_values


@dataclass(frozen=True)
class Shard:
    """Optimizer state of one parameter on this rank: elements [start, end) of the local matrix.

    Attributes:
        values: The flat tensor of each kind, as the optimizer uses it.
        step: AdamW's counter, a tensor of its own.
        is_written: This rank, and no other, writes it.
    """

    runs: tuple[RowRun, ...]
    num_columns: int
    start: int
    end: int
    values: Mapping[str, torch.Tensor]
    step: torch.Tensor
    is_written: bool

    def pieces(self) -> Iterator[tuple[int, Piece]]:
        """Yield (first element of the shard, piece)."""
        return pieces_of_range(self.runs, self.num_columns, self.start, self.end)


class TrainingState:
    """Model, optimizer and generators of one rank.

    Args:
        chunks: The rank's parts of the model, without wrappers, one per virtual pipeline stage.
        vocab_size: Rows of the vocabulary that mean something; the padding below them stays zero.
    """

    def __init__(
        self,
        chunks: Sequence[torch.nn.Module],
        optimizers: Sequence[DistributedOptimizer],
        config: TransformerConfig,
        vocab_size: int,
    ) -> None:
        self._chunks = chunks
        self._optimizers = optimizers
        self._config = config
        self._vocab_size = vocab_size
        self._copies = HostCopies()

    def snapshot(self, extra: Mapping[str, object]) -> Snapshot:
        """Copy this rank's state to the host. The next snapshot overwrites it."""
        shards = [shard for shard in self.shards() if shard.is_written]
        copies = iter(self._copies.take(shard.values[kind] for shard in shards for kind in KINDS))
        pieces = [
            PieceState(piece, {kind: values[kind][at : at + piece.num_elements] for kind in KINDS}, step)
            for shard in shards
            for values, step in [({kind: next(copies) for kind in KINDS}, float(shard.step))]
            for at, piece in shard.pieces()
        ]
        rank = torch.distributed.get_rank()
        return Snapshot(rank, self.layout(), tuple(pieces), generator_states(), dict(extra))

    def load(self, folder: Path) -> Mapping[str, object]:
        """Restore what any layout of ranks wrote; return its plain values.

        Generators are exact at the same layout; at another one each rank gets some rank's.

        Raises:
            CheckpointError: The state is of another model or incomplete; part of it may be loaded.
        """
        with StateReader(folder) as reader, torch.no_grad():
            for shard in self.shards():
                for at, piece in shard.pieces():
                    for kind in KINDS:
                        reader.read(piece, kind, shard.values[kind][at : at + piece.num_elements])
                    shard.step.fill_(reader.step(piece))
            restore_generators(reader.generators(torch.distributed.get_rank()))
            return reader.extra

    def layout(self) -> dict[str, object]:
        """Return how the ranks cut the model."""
        return {
            "world_size": torch.distributed.get_world_size(),
            "tp": parallel_state.get_tensor_model_parallel_world_size(),
            "pp": parallel_state.get_pipeline_model_parallel_world_size(),
            "cp": parallel_state.get_context_parallel_world_size(),
            "ep": parallel_state.get_expert_model_parallel_world_size(),
            "etp": parallel_state.get_expert_tensor_parallel_world_size(),
        }

    def shards(self) -> Iterator[Shard]:
        """Yield what this rank's optimizer holds, parameter by parameter, always in the same order."""
        names = {
            parameter: (name, is_copy)
            for chunk in self._chunks
            for name, is_copy, parameter in convert.global_names(chunk)
        }
        held = ((optimizer, *found) for optimizer in self._optimizers for found in held_values(optimizer))
        for optimizer, parameter, main, state in held:
            name, is_copy = names[parameter]
            owned = optimizer._get_model_param_range_map(parameter)["param"]
            place = rows.tensor_rank(name)
            yield Shard(
                runs=rows.row_runs(name, parameter.shape, self._config, self._vocab_size, place),
                num_columns=parameter[0].numel(),
                start=owned.start,
                end=owned.end,
                is_written=not is_copy and self._is_owner(name),
                values=_values(main, state),
                step=state["step"],
            )

    def _is_owner(self, name: str) -> bool:
        """Whether this tensor-parallel rank writes `name`: each its part, rank 0 what all have alike."""
        return convert.cut_dimension(name) is not None or rows.tensor_rank(name)[0] == 0


def _values(main: torch.Tensor, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the optimizer's tensors of one main parameter by kind.

    One that was never stepped gets the `state` that AdamW would give it, on its device, where the fused
    kernel wants it. (Megatron's load_state_dict makes all parameters share one `step`, which breaks bias
    correction.)
    """
    if not state:
        state["step"] = torch.zeros((), dtype=torch.float32, device=main.device)
        state.update({moment: torch.zeros_like(main) for moment in KINDS[1:]})
    values = {"main": main.detach(), **{moment: state[moment] for moment in KINDS[1:]}}
    assert all(tensor.is_contiguous() for tensor in values.values())
    return {kind: tensor.view(-1) for kind, tensor in values.items()}


def generator_states() -> dict[str, torch.Tensor]:
    """Return the states of the random generators of torch and of Megatron's tensor parallelism."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    tracked = tensor_parallel.get_cuda_rng_tracker().get_states()
    return states | {f"tracker.{name}": state for name, state in tracked.items()}


def restore_generators(states: Mapping[str, torch.Tensor]) -> None:
    """Set the generators to what `generator_states` returned."""
    torch.set_rng_state(states["cpu"])
    if "cuda" in states and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(states["cuda"])
    prefix = "tracker."
    tracked = {name.removeprefix(prefix): states[name] for name in states if name.startswith(prefix)}
    if tracked:  # another backend has none
        tensor_parallel.get_cuda_rng_tracker().set_states(tracked)
