"""Differences between a configuration and that of a run, with the keys that may change at a resume.

Owns no rule: `resume_rules` knows the keys that a run's journal and checkpoints depend on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from asyncrl.cli.run.resume import relocate
from asyncrl.cli.run.resume_rules import find_breaks
from asyncrl.control.record.rundir import RunDir
from asyncrl.core.config.load import load_config, load_resolved
from asyncrl.core.config.tree import Config

OTHER_RUN = ("run.name", "run.dir")
"""Another of these is another run."""


@dataclass(frozen=True)
class Change:
    """A key whose value differs.

    Attributes:
        was: In the run, None where it had no such key.
        becomes: In the configuration at hand.
        at_resume: Whether a resume takes it; if not, `why`.
    """

    key: str
    was: object
    becomes: object
    at_resume: bool = True
    why: str = ""


def compare_with_run(folder: RunDir, config: Config) -> list[Change]:
    """Return the keys in which `config`, as it was loaded, differs from what the run was asked for.

    Raises:
        ConfigError: The run is of another asyncrl, or has no configuration.
    """
    before = load_config(folder.config) if folder.config.exists() else load_resolved(folder.path)
    run = config.run.model_copy(update={"dir": str(Path(config.run.dir).absolute())})
    return find_changes(relocate(before, folder.path.parent), config.model_copy(update={"run": run}))


def find_changes(before: Config, after: Config) -> list[Change]:
    """Return the keys whose values differ, and whether a resume takes them."""
    old, new = _flatten(before.model_dump(mode="json")), _flatten(after.model_dump(mode="json"))
    keys = [*old, *(key for key in new if key not in old)]
    breaks = dict(find_breaks(before, after)) | dict.fromkeys(OTHER_RUN, "that is another run")
    return [
        _judge(Change(key, old.get(key), new.get(key)), breaks)
        for key in keys
        if old.get(key) != new.get(key)
    ]


def _judge(change: Change, breaks: Mapping[str, str]) -> Change:
    """Return `change` as refused if a resume complains of its key or its section."""
    for key, why in breaks.items():
        if change.key == key or change.key.startswith(f"{key}."):
            return Change(change.key, change.was, change.becomes, False, why.rpartition("; ")[2])
    return change


def _flatten(tree: Mapping[str, object]) -> dict[str, object]:
    found: dict[str, object] = {}
    for section, values in tree.items():
        if isinstance(values, Mapping):
            found |= {f"{section}.{name}": value for name, value in values.items()}
        else:
            found[section] = values
    return found
