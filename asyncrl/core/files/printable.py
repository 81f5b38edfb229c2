"""Text from outside, as text that neither steers a terminal nor begins a line of its own (pure).

Owns which characters are written out: all that Unicode does not call printable, except spaces, tabs and
newlines. These are the controls of C0 and C1 (an escape sequence begins with one), bidirectional overrides,
other invisible format characters and lone surrogates. Invariant: what is printable stays as it is, so that
applying the function again changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from unicodedata import category

INDENTED = "\n  "
"""For a line after the first one of a record: it cannot look like the beginning of another record."""
ESCAPED = "\\n"
"""For what has one line, such as a cell of a table."""


def printable(text: str, newline: str = "\n") -> str:
    r"""Return `text` with escapes in place of characters that steer a terminal or reverse its line.

    Args:
        newline: Replacement of a newline: itself, `INDENTED` or `ESCAPED`.

    >>> printable("a\x1b[2Jb\n2026-01-01 ERROR forged", INDENTED)
    'a\\x1b[2Jb\n  2026-01-01 ERROR forged'
    """
    if text.isprintable():
        return text
    return "".join(newline if letter == "\n" else _written(letter) for letter in text)


def printable_values(value: object) -> Any:
    """Return plain values with each text in them, names included, as `printable` returns it."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, Mapping):
        return {printable_values(name): printable_values(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [printable_values(inner) for inner in value]
    return value


def _written(letter: str) -> str:
    is_shown = letter == "\t" or letter.isprintable() or category(letter) == "Zs"
    return letter if is_shown else repr(letter)[1:-1]
