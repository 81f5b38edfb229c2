"""Training state of this rank, its shards and their AdamW, as pieces of the whole model.

A shard is some rows of one parameter under its Hugging Face name, which is one piece of the checkpoint
format. Invariants: every element of the model is written by exactly one rank; at the same layout
training goes on bit by bit as if it had not stopped.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from learner.checkpoint.pieces import Piece, whole
from learner.checkpoint.reader import StateReader
from learner.checkpoint.snapshot import KINDS, HostCopies, PieceState, Snapshot
from learner.fsdp2.groups import RankGroup
from learner.fsdp2.sharding import ShardedParameter


@dataclass(frozen=True)
class _Held:
    """One piece and its live tensors, flat, by kind; `step` is AdamW's counter, a tensor of its own."""

    piece: Piece
    values: Mapping[str, torch.Tensor]
    step: torch.Tensor


class TrainingState:
    """Model, optimizer and generators of one rank."""

    def __init__(
        self, parameters: Sequence[ShardedParameter], optimizer: torch.optim.AdamW, group: RankGroup
    ) -> None:
        self._parameters, self._optimizer, self._group = parameters, optimizer, group
        self._copies = HostCopies()

    def snapshot(self, extra: Mapping[str, object]) -> Snapshot:
        """Copy this rank's state to the host. The next snapshot overwrites it."""
        held = list(self._held())
        copies = iter(self._copies.take(one.values[kind] for one in held for kind in KINDS))
        pieces = [
            PieceState(one.piece, {kind: next(copies) for kind in KINDS}, float(one.step)) for one in held
        ]
        layout: dict[str, object] = {"backend": "fsdp2", "world_size": self._group.size}
        return Snapshot(self._group.rank, layout, tuple(pieces), _generator_states(), dict(extra))

    def load(self, folder: Path) -> Mapping[str, object]:
        """Restore what any layout of ranks wrote; return its plain values.

        Generators are exact at the same layout; at another one each rank gets some rank's.

        Raises:
            CheckpointError: The state is of another model or incomplete; part of it may be loaded.
        """
        with StateReader(folder) as reader, torch.no_grad():
            for one in self._held():
                for kind in KINDS:
                    reader.read(one.piece, kind, one.values[kind])
                one.step.fill_(reader.step(one.piece))
            _restore_generators(reader.generators(self._group.rank))
            return reader.extra

    def _held(self) -> Iterator[_Held]:
        """Yield what this rank holds, always in the same order; of a short parameter it may hold nothing."""
        for parameter in self._parameters:
            shard, moments = parameter.shard, self._optimizer.state[parameter.tensor]
            if not shard.numel():
                continue
            tensors = {kind: moments[kind].to_local() for kind in KINDS[1:]} | {KINDS[0]: shard}
            split = {kind: parameter.split(tensors[kind], parameter.start) for kind in KINDS}
            for parts in zip(*split.values(), strict=True):
                one = parts[0]
                everything = whole(one.name, one.shape)
                rows = (one.start, one.start + len(one.values))
                yield _Held(
                    Piece(everything.name, everything.shape, rows, everything.columns),
                    {kind: part.values.view(-1) for kind, part in zip(KINDS, parts, strict=True)},
                    moments["step"],
                )


def _generator_states() -> dict[str, torch.Tensor]:
    states = {"cpu": torch.get_rng_state()}
    return states | ({"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_initialized() else {})


def _restore_generators(states: Mapping[str, torch.Tensor]) -> None:
    torch.set_rng_state(states["cpu"])
    if "cuda" in states and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(states["cuda"])
