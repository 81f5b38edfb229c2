"""Aligned columns of text (pure)."""

from __future__ import annotations

from collections.abc import Sequence

from asyncrl.core.files.printable import ESCAPED, printable


def align(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return rows of equal length as lines whose columns are aligned."""
    if not rows:
        return []
    rows = [[printable(cell, ESCAPED) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
