"""Plan of a replay: its recorded steps, their first checkpoint, their settings.

Owns the choice of where to begin. Must train nothing and write nothing. Invariant: every step of a plan is in
the record, and the checkpoint that it begins with is whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from asyncrl.core.config.tree import Config
from asyncrl.core.errors import CheckpointError, ConfigError, DataError
from learner.checkpoint.store import CheckpointStore
from learner.record.batch_store import FOLDER, BatchStore, name_steps
from learner.record.intervals import SettingsInterval

CHECKPOINTS = "checkpoints"


@dataclass(frozen=True)
class Plan:
    """Steps to train again, with their start and settings.

    Attributes:
        folder: The run's.
        began_at: Step of the checkpoint to begin with; 0 without one is the model of the start.
        first, end: The steps that were asked for; those from `began_at` on lead there.
        has_checkpoint: Whether `began_at` is a checkpoint.
        stops: Whether to end at the first step from `first` on that differs.
        sets_rate: Whether the configured learning rate holds, not the one that the checkpoint has.
        settings: Digest of those under which the steps were trained; "" takes the run's last ones.
        taken_from: Where the interval before has left its state, in place of a checkpoint; "" for none.
        left_in: Where this one is to leave its own; "" for nowhere.
    """

    folder: Path
    began_at: int
    first: int
    end: int
    has_checkpoint: bool
    stops: bool = False
    sets_rate: bool = False
    settings: str = ""
    taken_from: str = ""
    left_in: str = ""


def make_plan(
    folder: Path,
    config: Config,
    first: int | None,
    num_steps: int | None,
    say: Callable[[str], None],
) -> Plan:
    """Find where to begin.

    Raises:
        ConfigError: The run recorded nothing.
        DataError: A step is not in the record, or there is nothing to begin with.
    """
    batch_store = BatchStore(folder / FOLDER)
    steps = batch_store.steps()
    if not steps:
        raise ConfigError(
            f"run '{folder.name}' has recorded nothing", hint="Only with run.record: true does a run record"
        )
    starts = _starts(folder, config, set(steps), say)
    if first is None:
        first = min((step for step in starts if _is_unbroken(steps, step)), default=steps[0])
    if first not in steps:
        raise DataError(
            f"step {first} is not in the record of run '{folder.name}'", hint=_describe(steps, starts)
        )
    start = max((step for step in starts if step <= first), default=None)
    if start is None:
        raise DataError(
            f"run '{folder.name}' has no checkpoint at or before step {first}",
            hint=f"Its oldest checkpoint is of step {min(starts)}: checkpoint.keep says how many are kept"
            if starts
            else "Its checkpoints are gone, and the steps from 0 on are no longer recorded",
        )
    end = steps[-1] + 1 if num_steps is None else first + num_steps
    missing = sorted(set(range(start, end)) - set(steps))
    if missing:
        raise DataError(
            f"step {missing[0]} is not in the record of run '{folder.name}'", hint=_describe(steps, starts)
        )
    return Plan(folder, start, first, end, starts[start])


def _describe(steps: Sequence[int], starts: Mapping[int, bool]) -> str:
    """Return in words what is recorded, and what a replay can begin with."""
    checkpoints = sorted(step for step, has_checkpoint in starts.items() if has_checkpoint)
    places = [] if starts.get(0, True) else ["the model of the start"]
    if checkpoints:
        places.append(f"the checkpoint{'s' if len(checkpoints) > 1 else ''} of {name_steps(checkpoints)}")
    beginning = f"; a replay can begin with {' or '.join(places)}" if places else ""
    return f"Recorded are {name_steps(steps)}{beginning}"


def _is_unbroken(steps: Sequence[int], start: int) -> bool:
    """Tell whether the record has all steps from `start` to its last."""
    return start in steps and set(range(start, steps[-1] + 1)) <= set(steps)


def _starts(folder: Path, config: Config, steps: set[int], say: Callable[[str], None]) -> dict[int, bool]:
    """Return the steps that a replay can begin at, and whether there is a whole checkpoint of each."""
    starts = {0: False} if 0 in steps else {}
    root = folder / CHECKPOINTS
    if not root.is_dir():
        return starts
    store = CheckpointStore(root, config.checkpoint.keep, config.checkpoint.keep_best)
    for step in store.steps():
        try:
            store.verify_whole(step)
        except CheckpointError as error:
            say(str(error))
        else:
            starts[step] = True
    return starts


def cut_plan(plan: Plan, intervals: Sequence[SettingsInterval], between: Path) -> Iterator[Plan]:
    """Yield the plan of each interval; all but the first take up what the one before left in `between`."""
    for index, interval in enumerate(intervals):
        yield replace(
            plan,
            began_at=interval.first,
            end=interval.end,
            settings=interval.settings,
            taken_from=str(between / str(index)) if index else "",
            left_in=str(between / str(index + 1)) if index + 1 < len(intervals) else "",
        )
