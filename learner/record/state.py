"""The state after a replayed step, beside the checkpoint that the run wrote there.

Owns the names of what differs. Weights that are published are one part of what training goes on with; the
float32 weights and AdamW's moments, the critic, the random generators and the controllers are the others, and
only a checkpoint holds them. Must never write into it. Invariant: every element is compared by one rank,
bit by bit, and all ranks return the same.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from asyncrl.core.errors import CheckpointError
from learner.algorithms.objective import Objective
from learner.backend import Models
from learner.checkpoint.reader import StateReader
from learner.checkpoint.snapshot import KINDS, PieceState, Snapshot
from learner.checkpoint.store import MANIFEST, CheckpointStore, ForeignFormatError
from learner.ranks import Ranks
from learner.record.comparison import Difference
from learner.trainer import CRITIC

OPTIMIZER = "optimizer"
GENERATORS = "generators"
CONTROLLERS = "controllers"
DAMAGED = "checkpoint"
NAMES = (OPTIMIZER, CRITIC, GENERATORS, CONTROLLERS, DAMAGED)
"""Parts that may differ, in the order of the report; the last where the checkpoint cannot be read."""


@dataclass(frozen=True)
class _Found:
    """Number of values that differ, and the first of them on both sides."""

    name: str
    count: int
    recorded: str
    replayed: str


def compare_state(
    store: CheckpointStore, step: int, token: int, models: Models, objective: Objective, ranks: Ranks
) -> tuple[Difference, ...] | None:
    """Return what differs from the checkpoint of `step`; None if there is none to compare with. Collective.

    Args:
        token: Of the learner that trained the step before. Another one's checkpoint is of another branch.
    """
    folder = store.folder(step)
    if not folder.is_dir():
        return None
    mine: dict[str, list[_Found]] = {name: [] for name in NAMES}
    try:
        controllers = store.cut(step).controllers.get("objective", {})
        if json.loads((folder / MANIFEST).read_text())["body"]["token"] != token:
            return None
        for found in _compare_rank(folder, controllers, models, objective, ranks.rank):
            mine[found.name].append(found)
    except ForeignFormatError:
        return None
    except CheckpointError as error:
        mine[DAMAGED].append(_Found(DAMAGED, 1, str(error), "not compared"))
    counts = ranks.add([sum(found.count for found in mine[name]) for name in NAMES])
    return tuple(_tell(name, mine[name], count) for name, count in zip(NAMES, counts, strict=True) if count)


def _tell(name: str, found: list[_Found], count: int) -> Difference:
    if not found:
        return Difference(name, "as another rank has it", f"other; {count} in all differ")
    return Difference(name, found[0].recorded, f"{found[0].replayed}; {count} in all differ")


def _compare_rank(
    folder: Path, controllers: Mapping[str, float], models: Models, objective: Objective, rank: int
) -> Iterator[_Found]:
    """Yield what differs of this rank's part."""
    snapshot = models.policy.snapshot_state()
    with StateReader(folder) as reader:
        yield from _compare_model(OPTIMIZER, snapshot, reader)
        if reader.layout == snapshot.layout:  # at another one they are not those of the run
            yield from _compare_generators(snapshot.generators, reader.generators(rank))
    if models.critic is not None:
        with StateReader(folder / CRITIC) as reader:
            yield from _compare_model(CRITIC, models.critic.snapshot_state(), reader)
    yield from _compare_values(CONTROLLERS, controllers, objective.read_controllers())


def _compare_model(name: str, snapshot: Snapshot, reader: StateReader) -> Iterator[_Found]:
    for state in snapshot.pieces:
        yield from _compare_piece(name, state, reader)
    yield from _compare_values(name, reader.extra, json.loads(json.dumps(snapshot.extra)))


def _compare_piece(name: str, state: PieceState, reader: StateReader) -> Iterator[_Found]:
    """Yield what differs in one piece: its values by their bits, and AdamW's counter."""
    piece = state.piece
    for kind in KINDS:
        replayed = state.values[kind]
        recorded = torch.empty(piece.num_elements, dtype=torch.float32)
        reader.read(piece, kind, recorded)
        places = (recorded.view(torch.int32) != replayed.view(torch.int32)).nonzero().view(-1)
        if len(places):
            row, column = divmod(int(places[0]), piece.num_columns)
            where = f"{kind} of {piece.name}[{piece.rows[0] + row}, {piece.columns[0] + column}]"
            values = (float(one[places[0]]) for one in (recorded, replayed))
            yield _Found(name, len(places), *(f"{where} {value!r}" for value in values))
    step = reader.step(piece)
    if step != state.step:
        yield _Found(name, 1, *(f"updates of {piece.name} {value:g}" for value in (step, state.step)))


def _compare_generators(
    replayed: Mapping[str, torch.Tensor], recorded: Mapping[str, torch.Tensor]
) -> Iterator[_Found]:
    for name in sorted({*replayed, *recorded}):
        one, other = recorded.get(name), replayed.get(name)
        if one is None or other is None or not torch.equal(one, other):
            yield _Found(GENERATORS, 1, f"a state of '{name}'", "another one")


def _compare_values(
    name: str, recorded: Mapping[str, object], replayed: Mapping[str, object]
) -> Iterator[_Found]:
    for key in sorted({*recorded, *replayed}):
        one, other = recorded.get(key), replayed.get(key)
        if one != other:
            yield _Found(name, 1, f"{key} {one!r}", f"{key} {other!r}")
