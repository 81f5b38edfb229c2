"""Registry of environments: found by name or by `file.py:Class`, with their arguments.

Invariant: all that can be known to be wrong before an episode is a ConfigError here.
"""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from asyncrl.core.config.reading.problems import suggest
from asyncrl.core.config.tree import EnvironmentSection
from asyncrl.core.errors import ConfigError
from rollout_service.declared import find_definition, is_imported, methods_of, names_in, parse, stand_in
from rollout_service.environments.adapters.gymnasium_text import GymnasiumText
from rollout_service.environments.adapters.verifiers_library import VerifiersLibrary
from rollout_service.environments.protocol import METHODS, Environment, EnvironmentFactory, is_restorable
from rollout_service.environments.tools.tool_use import ToolUse
from rollout_service.user_file import import_file


@dataclass(frozen=True)
class BuiltIn:
    """One registered environment.

    Attributes:
        make: Takes the arguments of the configuration.
        opens, is_restorable: As of `Episodes`.
        needs_library: Whether `make` imports a library, which a check of the arguments does without.
    """

    make: Callable[..., EnvironmentFactory]
    opens: bool = False
    is_restorable: bool = False
    needs_library: bool = False


BUILT_IN = {
    "tools": BuiltIn(ToolUse, is_restorable=True),
    "gymnasium": BuiltIn(GymnasiumText, opens=True, needs_library=True),
    "verifiers": BuiltIn(VerifiersLibrary, needs_library=True),
}

PACKAGE = "rollout_service.environments"
"""Package from which a user's file imports `Environment`."""


@dataclass(frozen=True)
class Episodes:
    """One kind of episodes.

    Attributes:
        make: Makes an episode's environment from its prompt and seed.
        max_turns: Most turns of the model.
        roles: Chat roles of observations, where prompts are chats.
        tools: JSON schemas of functions that chats describe to the model.
        opens: Whether an episode may begin with an observation. Chats are then tokenised without the
            beginning of an answer (`conversation.without_answer`): the opening comes before it.
        is_restorable: An episode can go on from its recorded turns elsewhere.
    """

    make: EnvironmentFactory
    max_turns: int = 8
    roles: Sequence[str] = ("user",)
    tools: Sequence[Mapping[str, object]] = ()
    opens: bool = False
    is_restorable: bool = False


def load_environment(environment: EnvironmentSection, folder: Path = Path()) -> Episodes:
    """Return what `rollout.environment` names; files are relative to `folder`.

    Raises:
        ConfigError: There is no such name, file or class, or it does not take these arguments.
    """
    name, arguments = environment.name, environment.arguments
    if name in BUILT_IN:
        _bind(name, arguments)
        make: EnvironmentFactory = BUILT_IN[name].make(**arguments)
        named: object = make
        opens, restores = BUILT_IN[name].opens, BUILT_IN[name].is_restorable
    else:
        named = cls = _find_class(name, folder)
        _check_arguments(name, cls, arguments)
        make = functools.partial(cls, **arguments)
        opens = getattr(cls, "start", Environment.start) is not Environment.start
        restores = is_restorable(cls)
    if environment.branches > 1 and not restores:
        raise ConfigError(
            f"rollout.environment.branches: episodes of '{name}' cannot go on from their recorded turns",
            hint="Write `restore`, or `is_deterministic = True`, in the class (docs/environments.md)",
        )
    return Episodes(
        make,
        environment.max_turns,
        getattr(named, "roles", ("user",)),
        getattr(named, "tools", ()),
        opens=opens,
        is_restorable=restores,
    )


def check_registered(environment: EnvironmentSection) -> None:
    """Return if `environment` names a registered one that takes its arguments, and tools that there are.

    Libraries are not imported for it, and no environment is made.

    Raises:
        ConfigError: It does not.
    """
    name, arguments = environment.name, environment.arguments
    if name not in BUILT_IN:
        raise _unknown(name)
    _bind(name, arguments)
    if not BUILT_IN[name].needs_library:
        try:
            BUILT_IN[name].make(**arguments)
        except (AttributeError, TypeError) as error:
            raise ConfigError(f"an argument of '{name}' is of another type than it takes: {error}") from error


def check_file(environment: EnvironmentSection) -> None:
    """Return unless the class of a file is written so that no episode can work; the file is not run.

    Classes with a base that is not `Environment` may inherit anything, and pass.

    Raises:
        ConfigError: A method is missing or not `async`, or the class does not take its arguments.
    """
    file, _, class_name = environment.name.rpartition(":")
    module = parse(Path(file))
    definition = find_definition(module, class_name)
    if module is None or not isinstance(definition, ast.ClassDef) or definition.keywords:
        return
    bases = [ast.unparse(base) for base in definition.bases]
    is_derived = bases == ["Environment"] and is_imported(module, "Environment", PACKAGE)
    if bases and not is_derived:
        return
    methods, bound = methods_of(definition), names_in(definition)
    wanted = ("step",) if is_derived else METHODS
    _refuse_methods(
        environment.name,
        missing=[method for method in wanted if method not in bound],
        plain=[method for method in METHODS if isinstance(methods.get(method), ast.FunctionDef)],
    )
    if "__init__" in methods and "__new__" not in bound:
        made = stand_in(methods["__init__"], is_method=True)
        _check_arguments(environment.name, made, environment.arguments)


def _unknown(name: str) -> ConfigError:
    hint = suggest(name, BUILT_IN) or f"Use one of {', '.join(sorted(BUILT_IN))}, or file.py:Class"
    return ConfigError(f"there is no environment '{name}'", hint=hint)


def _bind(name: str, arguments: Mapping[str, object]) -> None:
    try:
        inspect.signature(BUILT_IN[name].make).bind(**arguments)
    except TypeError as error:
        known = ", ".join(inspect.signature(BUILT_IN[name].make).parameters)
        raise ConfigError(f"rollout.environment '{name}': {error}", hint=f"It takes {known}") from error


def _find_class(name: str, folder: Path) -> Callable[..., Environment]:
    file, separator, class_name = name.rpartition(":")
    if not separator or not file.endswith(".py"):
        raise _unknown(name)
    cls: object = getattr(import_file(folder / file, "the environment's file"), class_name, None)
    if not callable(cls):
        raise ConfigError(f"{folder / file} has no class '{class_name}'")
    methods = {method: getattr(cls, method, None) for method in METHODS}
    _refuse_methods(
        name,
        missing=[method for method, found in methods.items() if not callable(found)],
        plain=[method for method, found in methods.items() if not inspect.iscoroutinefunction(found)],
    )
    return cls


def _refuse_methods(name: str, missing: Sequence[str], plain: Sequence[str]) -> None:
    if missing:
        raise ConfigError(
            f"the environment '{name}' has no {', '.join(missing)}",
            hint="Derive it from rollout_service.environments.Environment and write `step`",
        )
    if plain:
        raise ConfigError(f"of the environment '{name}' {', '.join(plain)} must be `async def`")


def _check_arguments(name: str, cls: Callable[..., object], arguments: Mapping[str, object]) -> None:
    try:
        inspect.signature(cls).bind(None, 0, **arguments)
    except TypeError as error:
        raise ConfigError(
            f"the environment '{name}' cannot be made: {error}",
            hint="It is called with (prompt, seed, **arguments)",
        ) from error
