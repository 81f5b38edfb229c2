"""A look at files that may vanish meanwhile."""

from __future__ import annotations

import os
from pathlib import Path

MAX_NAMED = 20
"""Files that are named in an advice."""


def look_at(path: str | Path) -> os.stat_result | None:
    """Return what `lstat` says, None if the file was removed meanwhile."""
    try:
        return os.lstat(path)
    except OSError:
        return None
