"""Mutants: a guard of production code that is taken out while seeds are played.

Invariant: what is patched belongs to a module of production, never to one of the tests.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

PRODUCTION = ("asyncrl", "learner", "rollout_service", "weight_sync")


@dataclass(frozen=True)
class Patch:
    """`target.name` is `value` while a mutant lives."""

    target: Any
    name: str
    value: Any

    @property
    def module(self) -> str:
        """Return the name of the module that defines the target."""
        return str(getattr(self.target, "__module__", None) or self.target.__name__)


@dataclass(frozen=True)
class Mutant:
    """One guard, or guards that cover each other, taken out.

    Attributes:
        guard: The sentence that no longer holds.
        faults: The class of scenarios that is aimed at it.
    """

    name: str
    guard: str
    faults: str
    patches: tuple[Patch, ...]


@contextlib.contextmanager
def mutated(mutant: Mutant | None) -> Iterator[None]:
    """Patch production code until the end of the block."""
    patches = mutant.patches if mutant is not None else ()
    before = [(one, vars(one.target).get(one.name)) for one in patches]
    for one in patches:
        assert one.module.split(".")[0] in PRODUCTION, f"{one.module} is not of production"
        assert one.module in sys.modules, one.module
        assert hasattr(one.target, one.name), one
        setattr(one.target, one.name, one.value)
    try:
        yield
    finally:
        for one, value in before:
            if value is None:  # it is inherited
                delattr(one.target, one.name)
            else:
                setattr(one.target, one.name, value)


def always(value: Any) -> Callable[..., Any]:
    """Return a function that returns `value`, whatever it is called with."""
    return lambda *_, **__: value
