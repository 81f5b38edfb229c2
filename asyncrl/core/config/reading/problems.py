"""Problems of a configuration: one problem, and the error that carries all of them."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from asyncrl.core.errors import ConfigError

KeyPath = tuple[str, ...]
"""Path of a value in the tree: `("learner", "lr")`; list items by index."""

ORIGIN = ":1:1"


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong.

    Attributes:
        what: Description of the problem, with the value found.
        hint: Value to write instead; may be empty.
        key: The key it is about, as `learner.lr`; may be empty.
        where: `file:line:col` (both from 1), or the `--set` option; empty until it is known.
    """

    what: str
    hint: str = ""
    key: str = ""
    where: str = ""

    def __str__(self) -> str:
        text = f"{self.where}: {self.what}" if self.where else self.what
        return f"{text}. {self.hint}" if self.hint else text


@dataclass(frozen=True)
class Places:
    """Remembers where each key and each value of a configuration was written.

    >>> places = Places("a.yaml", values={("learner",): "a.yaml:2:3"})
    >>> places.of_value(("learner", "lr")), places.of_value(("data",))
    ('a.yaml:2:3', 'a.yaml:1:1')
    """

    origin: str
    keys: dict[KeyPath, str] = field(default_factory=dict)
    values: dict[KeyPath, str] = field(default_factory=dict)

    def of_key(self, path: KeyPath) -> str:
        """Return where the key was written, or the nearest key above it."""
        return self._nearest(self.keys, path)

    def of_value(self, path: KeyPath) -> str:
        """Return where the value was written, or the nearest value above it."""
        return self._nearest(self.values, path)

    def of_written(self, path: KeyPath) -> str:
        """Return where the value, or the nearest one above it, was written; else the file alone."""
        is_written = any(path[:length] in self.values for length in range(1, len(path) + 1))
        return self.of_value(path) if is_written else self.origin

    def knows(self, path: KeyPath) -> bool:
        return path in self.values

    def _nearest(self, found: dict[KeyPath, str], path: KeyPath) -> str:
        for length in range(len(path), 0, -1):
            if path[:length] in found:
                return found[path[:length]]
        return self.origin + ORIGIN


class ConfigProblems(ConfigError):
    """All problems of one configuration, each on a line of the message."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), (self.problems,))

    def placed(self, places: Places) -> ConfigProblems:
        """Return the same problems, each with the place of its key where it had none."""
        return ConfigProblems(
            replace(problem, where=places.of_written(tuple(problem.key.split("."))))
            if problem.key and not problem.where
            else problem
            for problem in self.problems
        )


def suggest(word: str, known: Iterable[str]) -> str:
    """Return "Did you mean 'x'?" for the known word nearest to `word`, or nothing."""
    nearest = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"Did you mean '{nearest[0]}'?" if nearest else ""
