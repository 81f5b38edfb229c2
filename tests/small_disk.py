"""A disk that is full: see the fixture `small_disk`."""

from __future__ import annotations

from pathlib import Path

import pytest


def fill(ballast: Path) -> None:
    """Write until the disk is full; unlink it and there is room."""
    with ballast.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
        file.writelines(bytes(4096) for _ in range(1 << 20))
