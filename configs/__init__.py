"""The shipped configurations. `asyncrl up quickstart` finds them by name, also from a wheel."""

from __future__ import annotations

import re
from pathlib import Path


def shipped() -> dict[str, Path]:
    """Return every shipped configuration by name."""
    return {path.stem: path for path in sorted(Path(__file__).parent.glob("*.yaml"))}


def overlays() -> dict[str, Path]:
    """Return by name the files that are laid over a shipped configuration: `asyncrl up one_gpu dapo_17k`."""
    return {path.stem: path for path in sorted(Path(__file__).parent.glob("overlays/*.yaml"))}


def find_recipe(text: str, path: str) -> str:
    """Return what the head of a configuration says of where its data file comes from; nothing if it does not.

    >>> find_recipe("# data/a.parquet: made with a program\\nrun: {}\\n", "data/a.parquet")
    'data/a.parquet: made with a program'
    """
    found = re.search(rf"^# ({re.escape(path)}: .+)$", text, re.MULTILINE)
    return found[1] if found else ""
