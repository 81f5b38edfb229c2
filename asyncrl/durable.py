"""Forcing to the disk what was written."""

from __future__ import annotations

import os
from pathlib import Path


def sync_path(path: Path) -> None:
    """Wait until a file, or the entries of a folder, are on the disk.

    Raises:
        OSError: It is not there, or the disk fails.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
