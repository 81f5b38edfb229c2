"""Functions of a user's file that look at rows: filters and the key of a curriculum."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Mapping
from pathlib import Path

from asyncrl.core.errors import ConfigError, DataError
from rollout_service.user_file import import_file

Row = Mapping[str, object]
RowFunction = Callable[[Row], object]
Key = str | int | numbers.Real
"""Sort key of a curriculum."""


def load_function(name: str) -> RowFunction:
    """Return the function `file.py:function`.

    Raises:
        ConfigError: There is no such file or function, or the file cannot be imported.
    """
    file, _, attribute = name.rpartition(":")
    path = Path(file)
    found = getattr(import_file(path, "the file", hint="Write file.py:function"), attribute, None)
    if not callable(found):
        raise ConfigError(f"{path} has no function '{attribute}'")
    return _guard(name, found)


def load_key(name: str) -> Callable[[Row], Key]:
    """Return what a curriculum sorts by: `file.py:function`, or a field such as `extra_info.level`.

    It returns a finite number or a text, and raises DataError where a row has neither.
    """
    file, _, _ = name.rpartition(":")
    read = load_function(name) if file.endswith(".py") else _field_reader(name)

    def key(row: Mapping[str, object]) -> Key:
        value = read(row)
        if isinstance(value, str) or (isinstance(value, numbers.Real) and math.isfinite(value)):
            return value
        raise DataError(f"the key '{name}' is {value!r:.60}, which is neither a finite number nor a text")

    return key


def _field_reader(name: str) -> RowFunction:
    def read(row: Mapping[str, object]) -> object:
        value: object = row
        for part in name.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return value

    return read


def _guard(name: str, function: RowFunction) -> RowFunction:
    def call(row: Mapping[str, object]) -> object:
        try:
            return function(row)
        except Exception as error:  # a user's function may raise anything
            raise DataError(f"{name} raised {type(error).__name__}: {error}") from error

    return call
