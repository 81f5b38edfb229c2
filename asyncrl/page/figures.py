"""Numbers as the page writes them (pure)."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from asyncrl.core.config.plain import JsonValue

DASH = "\u2013"
"""Stands where there is no figure."""


def finite_values(value: JsonValue) -> JsonValue:
    """Return plain values with None for each number in them that no float holds, NaN among them.

    >>> finite_values({"a": [float("nan"), 10**400, 1.5]})
    {'a': [None, None, 1.5]}
    """
    if isinstance(value, Mapping):
        return {name: finite_values(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [finite_values(inner) for inner in value]
    if isinstance(value, int | float):
        return value if abs(value) <= sys.float_info.max else None
    return value


def duration_of(seconds: float) -> str:
    """Return a length of time in one or two units.

    >>> duration_of(8.2), duration_of(75), duration_of(3700), duration_of(200_000)
    ('8 s', '1 min 15 s', '1 h 2 min', '2 d 8 h')
    """
    whole = round(max(0.0, seconds))
    for size, unit, part_size, part in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= size:
            return f"{whole // size} {unit} {whole % size // part_size} {part}"
    return f"{whole} s"


def count_of(value: float | None) -> str:
    """Return a whole number with thin spaces between thousands."""
    return DASH if value is None else f"{round(value):,}".replace(",", "\u202f")


def share_of(value: float | None) -> str:
    """Return a share as a percentage, small ones with a digit behind the point."""
    return DASH if value is None else f"{100 * value:.1f} %" if 0 < value < 0.1 else f"{100 * value:.0f} %"


def seconds_of(value: float | None) -> str:
    """Return a short time in milliseconds or seconds."""
    if value is None:
        return DASH
    return f"{1000 * value:.0f} ms" if value < 1 else f"{value:.1f} s"


def figure_of(value: float | None) -> str:
    """Return a number with three digits that count, or more if it is large."""
    if value is None:
        return DASH
    return count_of(value) if abs(value) >= 100 else f"{value:.3g}"
