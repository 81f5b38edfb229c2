"""Resume of a run: keys that must not change, files that are kept, the checkpoint it continues from.

Reads and rearranges a run's folder while nothing of the run runs. It never loses a checkpoint: those
of an abandoned branch are put aside.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from asyncrl.cli.run.resume_rules import find_breaks
from asyncrl.control.record.rundir import RunDir
from asyncrl.control.rows.row_files import is_evaluation, keep_rows
from asyncrl.core.config.load import load_resolved
from asyncrl.core.config.plain import JsonValue
from asyncrl.core.config.tree import Config, CriticSection, ModelSection, RewardPart
from asyncrl.core.errors import CheckpointError, ConfigError, NoJournal
from asyncrl.core.metrics.metric import Row
from asyncrl.core.variants import function, journal_facts
from asyncrl.models.weight_files import read_shapes
from asyncrl.planner.plan import prepare

FetchedSection = ModelSection | CriticSection
"""The sections whose `path` may be a hub id."""
ABANDONED = "abandoned"
"""The folder in `checkpoints/` of those that `--resume STEP` has left behind."""


def refuse_other_lineage(folder: RunDir, config: Config) -> None:
    """Raise ConfigError if `config` changes what the journal and the checkpoints in `folder` depend on."""
    if not folder.resolved.exists():
        return
    before = load_resolved(folder.path)
    moved = dict(find_breaks(relocate(before, folder.path.parent), config))
    changed = [sentence for key, sentence in find_breaks(before, config) if key in moved]
    if changed:
        raise ConfigError(
            f"the run in {folder.path} cannot be resumed with other values:\n" + "\n".join(changed),
            hint="Give them as they were to go on. Choose another run.name for a new run",
        )


def refuse_lost_past(folder: RunDir, model: Path) -> None:
    """Raise ConfigError if no start can go on from what the run's folder holds.

    A journal that cannot be read from here says so itself, when the buffer opens it.

    Args:
        model: The folder of the policy's model.
    """
    if not _keeps_past(folder):
        return
    from asyncrl.cli.audit.report import committed_steps  # here: `up` must be quick otherwise

    try:
        known = committed_steps(folder.path)
    except NoJournal:
        known = []
    except (CheckpointError, ConfigError):
        return
    there = [step for step in known if step in _steps_on_disk(folder)]
    if not known:
        _refuse_lost_journal(folder)
        return
    if not there and 0 not in known:
        what = f"the journal in {folder.path} knows the checkpoints of {_list(known)}"
        raise ConfigError(
            f"run.name: {what}, and none of them is in {folder.checkpoints}",
            hint="The groups before them are gone: put one of them back there, or choose another run.name",
        )
    if there:
        _refuse_other_model(folder, there[-1], model)


def _refuse_lost_journal(folder: RunDir) -> None:
    """Raise ConfigError if steps were trained: the run would begin again at step 0 beside them."""
    steps = _steps_on_disk(folder)
    if steps:
        what = f"the journal of {folder.path} is gone, and there are checkpoints of {_list(steps)}"
        raise ConfigError(
            f"run.name: {what}",
            hint="Put the journal back, or choose another run.name",
        )


def _refuse_other_model(folder: RunDir, step: int, model: Path) -> None:
    """Raise ConfigError if the parameters in `model` have other shapes than those in a checkpoint."""
    try:
        store = function("learner.checkpoint.store:CheckpointStore")(folder.checkpoints, 1)
        saved, found = store.shapes(step), read_shapes(model)
    except CheckpointError:  # the learner takes an older one, and says why
        return
    for name in (name for name in saved if name in found and saved[name] != found[name]):
        what = f"the checkpoint of step {step} in {folder.path} has {name} as {saved[name]}"
        raise ConfigError(
            f"model.path: {model} is another model than the run's: {what}, the model as {found[name]}",
            hint="Put the run's model back there, or choose another run.name for this one",
        )


def relocate(before: Config, runs_dir: Path) -> Config:
    """Return the configuration of a run as it would be if its `run.dir` had always been `runs_dir`.

    A project that was moved, or copied, takes its run, model and data along: paths below what was moved are
    those below where it is now.

    >>> # run.dir /old/project/runs, found in /new/project/runs: /old/project/m becomes /new/project/m
    """
    old, new = Path(before.run.dir), runs_dir.absolute()
    if old == new:
        return before
    while old.name == new.name and old != old.parent:
        old, new = old.parent, new.parent

    def move(value: JsonValue) -> JsonValue:
        if isinstance(value, dict):
            return {key: move(part) for key, part in value.items()}
        if isinstance(value, list):
            return [move(part) for part in value]
        if isinstance(value, str) and (value == str(old) or value.startswith(f"{old}/")):
            return f"{new}{value[len(str(old)) :]}"
        return value

    return type(before).model_validate(move(before.model_dump(mode="json")))


def keep_revisions(config: Config) -> Config:
    """Return `config` with the revisions that an earlier start of the run fetched, where it names none.

    The hub may have moved on since; a run goes on from the models that it began with.
    """
    resolved = RunDir(Path(config.run.dir).absolute() / config.run.name).resolved
    if not resolved.exists():
        return config
    before = load_resolved(resolved.parent)
    rewards = tuple(_keep_reward_revision(part, before.reward.fn) for part in config.reward.fn)
    kept = {
        "reward": config.reward.model_copy(update={"fn": rewards}),
        "model": _keep_revision(config.model, before.model),
        "critic": _keep_revision(config.critic, before.critic),
    }
    return config.model_copy(update=kept)


def _keep_revision(section: FetchedSection, before: FetchedSection) -> FetchedSection:
    if section.path is None or not prepare.is_hub_id(section.path):
        return section
    return section.model_copy(update={"path": prepare.pin_revision(section.path, before.path or "")})


def _keep_reward_revision(part: RewardPart, before: Sequence[RewardPart]) -> RewardPart:
    path = prepare.reward_model(part)
    if path is None or not prepare.is_hub_id(path):
        return part
    for earlier in before:
        path = prepare.pin_revision(path, prepare.reward_model(earlier) or "")
    return RewardPart.model_validate(part.model_dump() | {"path": path})


def differences(before: Config, after: Config) -> list[str]:
    """Return a line for each key whose value differs: `learner.lr: 0.0001 there, 1e-05 here`."""
    old, new = _flatten(before.model_dump(mode="json")), _flatten(after.model_dump(mode="json"))
    keys = [*old, *(key for key in new if key not in old)]
    return [
        f"{key}: {_show(old, key)} there, {_show(new, key)} here"
        for key in keys
        if _show(old, key) != _show(new, key)
    ]


def _flatten(tree: Mapping[str, object]) -> dict[str, object]:
    sections = {section: values for section, values in tree.items() if isinstance(values, Mapping)}
    return {
        f"{section}.{name}": value for section, values in sections.items() for name, value in values.items()
    }


def _show(values: Mapping[str, object], key: str) -> str:
    return json.dumps(values[key]) if key in values else "nothing"


def refuse_earlier_life(folder: RunDir) -> None:
    """Raise ConfigError if there is anything to go on from in `folder`: nothing of it is ever removed."""
    if not _keeps_past(folder):
        return
    steps = _steps_on_disk(folder)
    what = f"checkpoints of {_list(steps)}" if steps else "a journal"
    raise ConfigError(
        f"--resume never: {folder.path} holds an earlier start of the run, with {what}",
        hint="For a fresh start remove that folder, or choose another run.name; --resume auto resumes it",
    )


def check_step(folder: RunDir, step: int, verify: Callable[[int], None]) -> None:
    """Say whether the run in `folder` can go on from the checkpoint of `step`; 0 is its beginning.

    Args:
        verify: Raises CheckpointError unless the checkpoint of a step is whole.

    Raises:
        ConfigError: The journal knows no checkpoint of that step.
        CheckpointError: It is torn or altered.
    """
    from asyncrl.cli.audit.report import committed_steps  # here: `up` must be quick otherwise

    try:
        known = committed_steps(folder.path) if folder.resolved.exists() else []
    except CheckpointError as error:
        raise ConfigError(f"--resume {step}: {error.message}", hint=error.hint) from error
    if step not in known:
        has = f"it can from {_list(known)}" if known else "it has no past"
        raise ConfigError(f"--resume {step}: the run in {folder.path} cannot be resumed from there; {has}")
    if step:
        verify(step)


def rewind(folder: RunDir, step: int) -> Path | None:
    """Let the next start go on from the checkpoint of `step`; return where the later ones are, if any.

    The learner goes on from the newest checkpoint that is whole, so the later ones are put aside, the
    newest first: if this is interrupted, the run still goes on from one that it knows.
    """
    for rows in (folder.metrics, *folder.learner_rows):
        keep_rows(rows, partial(_is_kept, step=step))
    later = [found for found in _steps_on_disk(folder) if found > step]
    aside = folder.checkpoints / ABANDONED
    for found in reversed(later):
        name = checkpoint_name(found)
        shutil.rmtree(aside / name, ignore_errors=True)
        aside.mkdir(exist_ok=True)
        (folder.checkpoints / name).rename(aside / name)
    return aside if later else None


def checkpoint_name(step: int) -> str:
    """Return the name of a checkpoint's folder."""
    return f"step-{step:08d}"


def _steps_on_disk(folder: RunDir) -> list[int]:
    return sorted(int(found.name.removeprefix("step-")) for found in folder.checkpoints.glob("step-*"))


def _keeps_past(folder: RunDir) -> bool:
    return folder.resolved.exists() and journal_facts(load_resolved(folder.path).buffer.journal).keeps_past


def _list(steps: Sequence[int]) -> str:
    return f"step {steps[0]}" if len(steps) == 1 else f"steps {', '.join(map(str, steps))}"


def _is_kept(row: Row, step: int) -> bool:
    """Tell whether a row is of the branch that goes on, as the curves and the summary are to be."""
    return is_evaluation(row) or bool(row["training/global_step"] <= step)
