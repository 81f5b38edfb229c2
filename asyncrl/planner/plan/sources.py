"""Data sources of a configuration: checked before the start, and resolved to paths here.

Owns the look at files of functions, which are parsed and never run. Rows are read by the rollout service's
code.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from asyncrl.core.config.tree import DataSection, SourceSection
from asyncrl.core.service_function import function


def check_sources(
    data: DataSection, model: Path, is_made: Callable[[str], bool], has_environment: bool = False
) -> Iterator[str]:
    """Yield what is wrong with the data and the functions that are to read it.

    Args:
        model: Folder of the policy, whose tokenizer counts prompts.
        is_made: Tells whether a path is one that is made before the start.
        has_environment: Whether episodes may add to a prompt.
    """
    look = function("rollout_service.data.inspection:find_problem")
    for key, source in _sources(data):
        for name in source.filter:
            if problem := missing_function(name):
                yield f"{key}: {problem}"
        if is_made(source.path):
            continue
        if problem := look(source, data.max_prompt_tokens, model, has_environment):
            yield f"{key}: {problem}"
    if data.curriculum is not None:
        yield from _check_curriculum(data.curriculum, [one for one in data.train if not is_made(one.path)])


def _check_curriculum(name: str, sources: Sequence[SourceSection]) -> Iterator[str]:
    if is_file_function(name):
        problems = [missing_function(name)]
    else:
        find_bad_key = function("rollout_service.data.inspection:find_bad_key")
        problems = [find_bad_key(source, name) for source in sources]
    yield from (f"data.order: {problem}" for problem in problems if problem)


def resolve_sources(data: DataSection, find: Callable[[str, str], str]) -> DataSection:
    """Return the section with absolute paths.

    Args:
        find: Returns the absolute path that `train` or `eval` (first) means by a path (second).
    """

    def resolve(name: str, source: SourceSection) -> SourceSection:
        filters = tuple(resolve_function(one) for one in source.filter)
        return source.model_copy(update={"path": find(name, source.path), "filter": filters})

    changes: dict[str, object] = {
        name: None if sources is None else tuple(resolve(name, source) for source in sources)
        for name, sources in (("train", data.train), ("eval", data.eval))
    }
    if data.curriculum is not None:
        changes["order"] = resolve_function(data.curriculum)
    return data.model_copy(update=changes)


def resolve_function(name: str) -> str:
    """Return `file.py:function` with an absolute file; any other name as it is."""
    file, _, function = name.rpartition(":")
    return f"{Path(file).absolute()}:{function}" if file.endswith(".py") else name


def is_file_function(name: str) -> bool:
    """Tell whether `name` reads as `file.py:function`."""
    return name.rpartition(":")[0].endswith(".py") and "://" not in name


def missing_function(name: str) -> str:
    """Say what is wrong with `file.py:function`; nothing is wrong with any other name."""
    if not is_file_function(name):
        return ""
    file, _, attribute = name.rpartition(":")
    if not Path(file).is_file():
        return f"there is no file '{file}'"
    return _missing_in(Path(file), attribute)


def missing_import(name: str) -> str:
    """Say what is wrong with `module:attribute`, which is looked for and not imported."""
    module, _, attribute = name.partition(":")
    found = _find_module(module)
    if found is None:
        return f"there is no module '{module}'; put its folder on PYTHONPATH"
    is_source = found.origin is not None and found.origin.endswith(".py")
    return _missing_in(Path(found.origin or ""), attribute.partition(".")[0]) if is_source else ""


def _find_module(module: str) -> ModuleSpec | None:
    """Return where `module` is, as the services find it: their path begins with the current directory."""
    first, *rest = module.split(".")
    try:
        found = PathFinder.find_spec(first, [str(Path.cwd())]) or importlib.util.find_spec(first)
    except (ImportError, ValueError):
        return None
    for number, _ in enumerate(rest, 2):
        if found is None or found.submodule_search_locations is None:
            return None
        name = ".".join(module.split(".")[:number])
        found = PathFinder.find_spec(name, list(found.submodule_search_locations))
    return found


def _missing_in(file: Path, attribute: str) -> str:
    try:
        # Parsed and not run: what it imports may need packages that only the service's process loads.
        module = ast.parse(file.read_bytes(), filename=str(file))
    except (SyntaxError, ValueError) as error:
        return f"'{file}' is no Python file: {error}"
    is_there = not {attribute, "*"}.isdisjoint(names_of(module))
    return "" if is_there else f"'{file}' defines no function '{attribute}'"


def names_of(module: ast.Module) -> Iterator[str]:
    """Yield the names that a module binds anywhere, `*` for a star import: it could bind any."""
    for node in ast.walk(module):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.alias):
            yield node.asname or node.name


def _sources(data: DataSection) -> Iterator[tuple[str, SourceSection]]:
    for name, sources in (("train", data.train), ("eval", data.eval or ())):
        for number, source in enumerate(sources):
            yield (f"data.{name}" if len(sources) == 1 else f"data.{name}.{number}"), source
