"""Files that are written whole or not at all, and forced to the disk where that is asked for."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from pathlib import Path

log = logging.getLogger(__name__)


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


def replace_text(path: Path, text: str, mode: int = 0o644, is_synced: bool = False) -> None:
    """Write a file so that a reader sees the old one or the new one, never a part.

    Args:
        mode: Of the new file, whatever the old one had.
        is_synced: Also after the machine has died: the text is on the disk before it takes the old one's
            place, and its name is when this returns. Costs two waits for the disk.

    Raises:
        OSError: The disk is full or fails; the old file is as it was, and nothing else is left.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_native_id()}")  # a writer's own
    temporary.unlink(missing_ok=True)  # the mode of one that another process left would stay
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            if is_synced:
                os.fsync(descriptor)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    if is_synced:
        sync_path(path.parent)


def is_read_only(folder: Path) -> bool:
    """Tell whether the file system of a folder takes no writes."""
    return bool(os.statvfs(folder).f_flag & os.ST_RDONLY)


def reserve_room(path: Path, num_bytes: int) -> bool:
    """Make a file whose room on the disk is had by removing it; return whether there was room for it."""
    try:
        path.write_bytes(bytes(num_bytes))
    except OSError as error:
        path.unlink(missing_ok=True)
        log.warning("no room could be reserved in %s: %s", path, error)
        return False
    return True


def append_lines(path: Path, text: str) -> int:
    """Add whole lines to a file that may not exist yet, in one write; return its size in bytes afterwards.

    Several processes may do so at once. A last line that a dead writer tore is ended first: it takes no other
    with it.

    Raises:
        OSError: The disk is full or fails. What it took of the lines is taken back, unless another process
            has written meanwhile.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        size = os.fstat(descriptor).st_size
        is_torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
        data = memoryview((b"\n" if is_torn else b"") + text.encode())
        done = 0
        try:
            while done < len(data):  # a disk with room for a part takes that without a word
                done += os.write(descriptor, data[done:])
        except OSError:
            if os.fstat(descriptor).st_size == size + done:
                with contextlib.suppress(OSError):
                    os.ftruncate(descriptor, size)
            raise
        return size + done
    finally:
        os.close(descriptor)
