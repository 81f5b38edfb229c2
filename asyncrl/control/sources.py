"""What a configuration says of its data: checked before anything starts, and resolved to paths here.

Owns the look at files and folders from outside; the rows themselves are read by the replicas.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from asyncrl.config.tree import DataSection, SourceSection

DATASET_MARK = "state.json"
"""What `save_to_disk` of the `datasets` library writes into the folder of a split."""
SPLITS_MARK = "dataset_dict.json"
"""What it writes into a folder of several splits."""


def check_sources(data: DataSection, is_made: Callable[[str], bool]) -> Iterator[str]:
    """Yield what is wrong with the data and the functions that are to read it.

    Args:
        is_made: Tells whether a path is one that is made before the start.
    """
    for key, source in _sources(data):
        if not is_made(source.path) and (problem := _unreadable(Path(source.path))):
            yield f"{key}: {problem}"
        for name in source.filter:
            if problem := missing_function(name):
                yield f"{key}: {problem}"
    if data.curriculum is not None and (problem := missing_function(data.curriculum)):
        yield f"data.order: {problem}"


def resolve_sources(data: DataSection, find: Callable[[str, str], str]) -> DataSection:
    """Return the section with absolute paths.

    Args:
        find: Returns the absolute path that `train` or `eval` (first) means by a path (second).
    """

    def resolve(name: str, source: SourceSection) -> SourceSection:
        filters = tuple(resolve_function(one) for one in source.filter)
        return source.model_copy(update={"path": find(name, source.path), "filter": filters})

    changes: dict[str, Any] = {
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


def missing_function(name: str) -> str:
    """Say what is wrong with `file.py:function`; nothing is wrong with any other name."""
    file, _, function = name.rpartition(":")
    if not file.endswith(".py"):
        return ""
    if not Path(file).is_file():
        return f"there is no file '{file}'"
    try:
        # Parsed and not run: what it imports may need packages that only the service's process loads.
        module = ast.parse(Path(file).read_bytes(), filename=file)
    except (SyntaxError, ValueError) as error:
        return f"'{file}' is no Python file: {error}"
    return "" if function in set(names_of(module)) else f"'{file}' defines no function '{function}'"


def names_of(module: ast.Module) -> Iterator[str]:
    """Yield the names that a module binds anywhere; a star import could bind any."""
    for node in ast.walk(module):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.alias):
            yield node.asname or node.name


def _sources(data: DataSection) -> Iterator[tuple[str, SourceSection]]:
    for name, sources in (("train", data.train), ("eval", data.eval or ())):
        for number, source in enumerate(sources):
            yield (f"data.{name}" if len(sources) == 1 else f"data.{name}.{number}"), source


def _unreadable(path: Path) -> str:
    if path.is_dir():
        return _unreadable_folder(path)
    if not path.is_file():
        return f"there is no file '{path}'"
    if path.suffix == ".parquet":
        return _unreadable_parquet(path)
    if path.suffix in (".jsonl", ".json"):
        with path.open(encoding="utf-8") as file:
            try:
                row = json.loads(file.readline())
            except ValueError as error:
                return f"'{path}' line 1 is not JSON: {error}"
        return "" if isinstance(row, dict) and "prompt" in row else f"'{path}' line 1 has no 'prompt'"
    return f"'{path}' is neither .parquet nor .jsonl"


def _unreadable_folder(path: Path) -> str:
    if (path / DATASET_MARK).is_file():
        return ""
    splits = sorted(found.parent.name for found in path.glob(f"*/{DATASET_MARK}"))
    if splits or (path / SPLITS_MARK).is_file():
        return (
            f"'{path}' holds the splits {', '.join(splits)}: name one, as {path / (splits or ['train'])[0]}"
        )
    return f"'{path}' is no folder of the datasets library (no {DATASET_MARK})"


def _unreadable_parquet(path: Path) -> str:
    import pyarrow
    import pyarrow.parquet

    try:
        names = pyarrow.parquet.ParquetFile(path).schema_arrow.names
    except (pyarrow.ArrowInvalid, OSError) as error:
        return f"'{path}' is not a readable Parquet file: {error}"
    return "" if "prompt" in names else f"'{path}' has no column 'prompt', only {', '.join(names)}"
