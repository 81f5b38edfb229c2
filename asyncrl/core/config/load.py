"""Configuration loader: reads YAML files and `--set` options and reports every error at once.

Relative paths in a configuration (model folders, data files, `run.dir`) are read from the current
directory, not from the folder of the file: what `up` does depends on where it is called, as with
any other command.
"""

from __future__ import annotations

import copy
import io
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError
from pydantic_core import ErrorDetails
from ruamel.yaml import YAML

from asyncrl.core.config.conflicts import CONFLICT, Conflict, has_no_critic, unused_critic
from asyncrl.core.config.explain import explain
from asyncrl.core.config.plain import JsonObject
from asyncrl.core.config.reading.document import Document, forget_below, overlay, read_document
from asyncrl.core.config.reading.problems import ORIGIN, ConfigProblems, Places, Problem
from asyncrl.core.config.rules.format import FORMAT, OLDEST, bring_up_to_date
from asyncrl.core.config.secrets import hide_in_option
from asyncrl.core.config.tree import Config, CriticSection
from asyncrl.core.errors import ConfigError, UnknownRun

REPAIR_ROUNDS = 4
OPTION = "--set "
WRITTEN_BY_RUNS = ("resolved.yaml", "asked.yaml")
"""Files that runs write. One without a `format` key was written before that key existed."""


@dataclass(frozen=True)
class Loaded:
    """A checked configuration, and where each of its values was written."""

    config: Config
    places: Places


def load_config(path: str | Path | Sequence[str | Path], overrides: Sequence[str] = ()) -> Config:
    """Return the configuration in the file `path`, changed by `overrides` (`"learner.lr=1e-5"`).

    Of several files each is laid over those before it.

    Raises:
        ConfigProblems: Everything that is wrong with the file and the overrides, each with its place.
        ConfigError: The file cannot be read.

    Example:
        >>> # load_config("configs/quickstart.yaml", ["learner.steps=10"]).learner.steps
    """
    return load(path, overrides).config


def load_resolved(folder: Path, overrides: Sequence[str] = ()) -> Config:
    """Return the configuration of the run in `folder`, changed by `overrides`.

    A `resolved.yaml` from an older asyncrl is migrated to the current format.

    Raises:
        ConfigProblems: The overrides are wrong.
        ConfigError: The run is of another asyncrl, or has no configuration.
    """
    resolved = folder / "resolved.yaml"
    try:
        return load(resolved, overrides, assumed_format=OLDEST).config
    except ConfigProblems:
        _refuse_other(resolved)
        raise


def _refuse_other(resolved: Path) -> None:
    try:
        load(resolved, assumed_format=OLDEST)
    except ConfigProblems as error:
        problem = error.problems[0]
        age = "a newer" if problem.key == "format" else "an older"
        what = f"the run in {resolved.parent} is of {age} asyncrl, whose {resolved.name} this one cannot read"
        hint = "Read it with the asyncrl that wrote it; for a new run choose another run.name"
        raise ConfigError(f"{what} ({problem.what})", hint=hint) from error


def load(
    path: str | Path | Sequence[str | Path], overrides: Sequence[str] = (), assumed_format: int = FORMAT
) -> Loaded:
    """Load like `load_config`, and also return the source location of each value.

    Args:
        assumed_format: Format of a file without a `format` key.
    """
    paths = [path] if isinstance(path, str | Path) else list(path)
    document = _read_files(paths, assumed_format)
    tree = document.values if isinstance(document.values, dict) else None
    values: JsonObject = {} if tree is None else tree
    for text in overrides:
        _override(document, values, text)
    config, problems = _check(values, document.places) if tree is not None else (None, [])
    if config is not None:
        problems = _find_unused(config, values, document.places)
    if document.problems or problems or config is None:
        found = [*document.problems, *problems]
        origins = [str(one) for one in paths]
        raise ConfigProblems(sorted(found, key=lambda problem: _position(problem, origins)))
    return Loaded(config, document.places)


def _find_unused(config: Config, values: JsonObject, places: Places) -> list[Problem]:
    """Return a problem if `critic` was set and has no effect; a dump, which sets every key, is exempt."""
    critic = values.get("critic")
    written = set(critic) if isinstance(critic, dict) else set()
    if not written or written == set(CriticSection.model_fields) or not has_no_critic(config):
        return []
    return _conflict_problems([unused_critic(config)], places, set())


def _read_files(paths: Sequence[str | Path], assumed_format: int) -> Document:
    """Return the files as one document, each laid over those before it."""
    document, *others = [_read_file(path, assumed_format) for path in paths]
    for other in others:
        if isinstance(document.values, dict) and isinstance(other.values, dict):
            overlay(document, other)
        else:
            document.problems.extend(other.problems)
    return document


def _read_file(path: str | Path, assumed_format: int) -> Document:
    document = read_document(_read_text(Path(path)), str(path))
    if not document.problems and document.values is None:
        document.problems.append(Problem("the file is empty", where=f"{path}{ORIGIN}"))
    elif not document.problems and not isinstance(document.values, dict):
        what = "the file must hold sections of keys and values"
        document.problems.append(Problem(what, where=f"{path}{ORIGIN}"))
    assumed = OLDEST if Path(path).name in WRITTEN_BY_RUNS else assumed_format
    if isinstance(document.values, dict) and not bring_up_to_date(document, assumed):
        document.values = None  # its keys mean something else
    return document


def dump_resolved(config: Config) -> str:
    """Return `config` as YAML with every default written out; `load_config` reads it back equal."""
    yaml = YAML(typ="safe", pure=True)
    yaml.default_flow_style = False
    yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment]
    stream = io.StringIO()
    yaml.dump(config.model_dump(mode="json"), stream)
    return stream.getvalue()


def _position(problem: Problem, origins: Sequence[str]) -> tuple[int, int, int]:
    """Order problems as they stand in the files, one after the other, and those of options last."""
    origin, *line_and_column = problem.where.rsplit(":", 2)
    if origin not in origins or len(line_and_column) < 2:
        return len(origins), 0, 0
    return origins.index(origin), int(line_and_column[0]), int(line_and_column[1])


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path} is not UTF-8 text (byte {error.start})", hint="Save it as UTF-8"
        ) from error
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {path}: {error.strerror}") from error


def _override(document: Document, values: JsonObject, text: str) -> None:
    """Put one `--set` into `values`; add its problems to `document.problems`."""
    where = OPTION + hide_in_option(text)
    key, equals, value_text = text.partition("=")
    path = tuple(key.strip().split("."))
    if not equals or not all(path):
        document.problems.append(
            Problem("an option has the form key=value", f"For example: {OPTION}learner.steps=10", where=where)
        )
        return
    given = read_document(value_text, where, is_file=False)
    if given.problems:
        document.problems.extend(given.problems)
        return
    parent = values
    for part in path[:-1]:
        if parent.get(part) is None:
            parent[part] = {}
        section = parent[part]
        if not isinstance(section, dict):
            return  # not a mapping: `_check` reports it at its own location
        parent = section
    parent[path[-1]] = given.values
    for length in range(1, len(path) + 1):
        if length == len(path) or not document.places.knows(path[:length]):
            document.places.keys[path[:length]] = document.places.values[path[:length]] = where
    forget_below(document.places, path)


def _check(values: JsonObject, places: Places) -> tuple[Config | None, list[Problem]]:
    """Return the configuration, or all problems: field errors first, then conflicts between sections.

    Conflicts can only be checked in a tree whose fields are valid. So the tree is checked again
    without the wrong fields, and conflicts between the others are reported too.
    """
    values = {
        key: {} if value is None and key in Config.model_fields else value for key, value in values.items()
    }
    config, errors = _validate(values)
    wrong = [error for error in errors if error["type"] != CONFLICT]
    for _ in range(REPAIR_ROUNDS):
        if not any(error["type"] != CONFLICT for error in errors):
            break
        values = _without(values, errors)
        errors = _validate(values)[1]
    problems = [explain(error, places) for error in wrong]
    touched = {problem.key for problem in problems}
    for error in errors:
        if error["type"] == CONFLICT:
            problems += _conflict_problems(error["ctx"]["conflicts"], places, touched)
    return config, problems


def _validate(values: JsonObject) -> tuple[Config | None, list[ErrorDetails]]:
    """Validate strictly: JSON's rules take a list for a tuple, but never text for a number."""
    try:
        return Config.model_validate_json(json.dumps(values), strict=True), []
    except ValidationError as error:
        return None, error.errors(include_url=False)


def _without(values: JsonObject, errors: Iterable[ErrorDetails]) -> JsonObject:
    """Return `values` with each wrong field removed, and each missing one filled in."""
    repaired = copy.deepcopy(values)
    for error in errors:
        path = [str(part) for part in error["loc"][:2]]
        section = repaired if len(path) < 2 else repaired.get(path[0])
        if not path or not isinstance(section, dict):
            continue
        if error["type"] == "missing" and len(error["loc"]) <= 2:
            section[path[-1]] = {} if len(path) == 1 else "?"
        else:
            section.pop(path[-1], None)
    return repaired


def _conflict_problems(conflicts: Iterable[Conflict], places: Places, touched: set[str]) -> list[Problem]:
    problems = []
    for conflict in conflicts:
        if touched.intersection(conflict.keys):
            continue  # about a value that is wrong by itself
        paths = [tuple(key.split(".")) for key in conflict.keys]
        written = next((path for path in paths if places.knows(path)), paths[0])
        where = places.of_value(written)
        problems.append(Problem(conflict.what, hint=conflict.hint, key=".".join(written), where=where))
    return problems


def find_run_folder(run: str, runs_dir: str) -> Path:
    """Return the folder of a run by name or path. Raises UnknownRun if there is none."""
    for folder in (Path(runs_dir) / run, Path(run)):
        if (folder / "resolved.yaml").is_file():
            return folder
    names = sorted(path.parent.name for path in Path(runs_dir).glob("*/resolved.yaml"))
    hint = f"There are: {', '.join(names)}" if names else "Say where the runs are with --dir"
    raise UnknownRun(f"there is no run '{run}' in {runs_dir}", hint=hint)
