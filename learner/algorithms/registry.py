"""Names in the configuration to functions: built in, or `module:function` of the user."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TypeVar, cast

from asyncrl.core.config.reading.problems import suggest
from asyncrl.core.errors import ConfigError
from asyncrl.core.variants import function

F = TypeVar("F")


def check_name(name: str, known: Collection[str], what: str) -> None:
    """Return if `name` is one of `known`, or has the form of a function of the user's.

    Args:
        what: The key of the configuration, for the message.

    Raises:
        ConfigError: It is neither.
    """
    module, colon, attribute = name.partition(":")
    if name in known:
        return
    if not colon:
        hint = suggest(name, known) or f"Known: {', '.join(known)}; or module:function"
        raise ConfigError(f"{what}: '{name}' is not known", hint=hint)
    if module.endswith(".py"):
        stem = module.removesuffix(".py").replace("/", ".").lstrip(".")
        raise ConfigError(
            f"{what}: '{name}' names a file, and a module is imported here",
            hint=f"Write {stem}:{attribute}, with its folder on PYTHONPATH",
        )


def resolve(name: str, built_in: Mapping[str, F], what: str) -> F:
    """Return what `name` stands for.

    Args:
        name: A key of `built_in`, or "module:attribute" to import.
        built_in: The known ones.
        what: The key of the configuration, for the message.

    Raises:
        ConfigError: The name is not known, or cannot be imported.
    """
    check_name(name, built_in, what)
    if name in built_in:
        return built_in[name]
    try:
        found = cast(F, function(name))
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"{what}: '{name}' cannot be imported: {error}", hint="Is it on PYTHONPATH?"
        ) from error
    return found
