"""The intervals of a run in its record: steps in a row that were trained under the same settings.

Owns where one ends, and what goes from one to the next: the whole state, as a resume takes it from
a checkpoint. So each interval is trained by models that were made for it. Must never write into the run's
folder. Invariant: an interval takes up what the one before has left, bit by bit at the same layout of ranks.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from learner.algorithms.objective import Objective
from learner.backend import Models
from learner.record.batch_store import BatchStore, name_steps
from learner.record.settings import describe_change
from learner.trainer import CRITIC, Trainer

CONTROLLERS_FILE = "controllers.json"
OLD_RECORD = (
    "no configuration was recorded with {}, as by an older asyncrl: that of resolved.yaml is used, which "
    "a resume may have changed since"
)


@dataclass(frozen=True)
class SettingsInterval:
    """Steps `first` to `end - 1`, and the digest of their settings, "" where they were not recorded."""

    first: int
    end: int
    settings: str


def find_intervals(batch_store: BatchStore, first: int, end: int) -> list[SettingsInterval]:
    """Cut steps `first` to `end - 1` where the settings change.

    Raises:
        DataError: Share 0 of a step is not in the record.
        CheckpointError: A step is torn or altered.
    """
    return [
        SettingsInterval((steps := list(group))[0], steps[-1] + 1, digest)
        for digest, group in itertools.groupby(range(first, end), batch_store.settings_digest)
    ]


def cut_intervals(intervals: Sequence[SettingsInterval], step: int) -> Iterator[SettingsInterval]:
    """Yield `intervals`, the one that `step` is within cut in two: one begins at `step`."""
    for interval in intervals:
        if interval.first < step < interval.end:
            yield replace(interval, end=step)
            yield replace(interval, first=step)
        else:
            yield interval


def describe_intervals(batch_store: BatchStore, intervals: Sequence[SettingsInterval]) -> Iterator[str]:
    """Yield what is to be known of the settings of `intervals`, in words."""
    for interval in intervals:
        if not interval.settings:
            yield OLD_RECORD.format(name_steps(range(interval.first, interval.end)))
    for before, after in itertools.pairwise(intervals):
        old, new = (batch_store.read_settings(interval.settings) for interval in (before, after))
        if old is not None and new is not None:
            yield f"from step {after.first} on the run had {describe_change(old, new)}"


def leave_state(folder: Path, models: Models, objective: Objective, rank: int) -> None:
    """Write into `folder` what the next interval takes up. Collective."""
    models.policy.save_state(folder)
    if models.critic is not None:
        models.critic.save_state(folder / CRITIC)
    if rank == 0:
        (folder / CONTROLLERS_FILE).write_text(json.dumps(objective.read_controllers()))


def take_up_state(folder: Path, trainer: Trainer) -> None:
    """Load what `leave_state` wrote, as a resume loads a checkpoint. Collective."""
    controllers: Mapping[str, float] = json.loads((folder / CONTROLLERS_FILE).read_text())
    trainer.restore(folder, controllers)
