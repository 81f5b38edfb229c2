"""Names in the configuration to functions: built in, or `module:function` of the user."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TypeVar

from asyncrl.errors import ConfigError

F = TypeVar("F")


def resolve(name: str, built_in: Mapping[str, F], what: str) -> F:
    """Return what `name` stands for.

    Args:
        name: A key of `built_in`, or "module:attribute" to import.
        built_in: The known ones.
        what: The key of the configuration, for the message.

    Raises:
        ConfigError: The name is not known, or cannot be imported.
    """
    if name in built_in:
        return built_in[name]
    module_name, colon, attribute = name.partition(":")
    if not colon:
        raise ConfigError(
            f"{what}: '{name}' is not known", hint=f"Known: {', '.join(built_in)}; or module:function"
        )
    try:
        found: F = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"{what}: '{name}' cannot be imported: {error}", hint="Is it on PYTHONPATH?"
        ) from error
    return found
