"""Shared memory as plain files: made, mapped, size-checked and unlinked by their owner.

Owns the form of segments. Never uses `multiprocessing.shared_memory`, whose tracker may unlink what
it does not own. A file's pages are reserved when it is made, so a full /dev/shm is an error here and
not a bus error in the middle of a copy.
Invariant: whoever maps a segment knows its size before and checks it.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from pathlib import Path

from asyncrl.errors import SyncError

SHM_DIR = Path("/dev/shm")


def create(name: str, num_bytes: int) -> str:
    """Make the segment `name` with `num_bytes` reserved bytes and return its path; 0 reserves nothing.

    Raises:
        SyncError: It exists already, or there is no room for it.
    """
    path = str(SHM_DIR / name)
    try:
        fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise SyncError(f"cannot make the segment {path}: {error.strerror}") from error
    try:
        if num_bytes:
            os.posix_fallocate(fd, 0, num_bytes)
    except OSError as error:
        os.unlink(path)
        raise SyncError(
            f"no room for {num_bytes} bytes in {SHM_DIR}: {error.strerror}",
            hint="Give the host or the container a larger /dev/shm",
        ) from error
    finally:
        os.close(fd)
    return path


def attach(path: str, num_bytes: int, is_private: bool = False) -> mmap.mmap:
    """Map the segment at `path`, which must have `num_bytes`; private means copy on write.

    The mapping lives as long as something refers to it, also after the file was unlinked.

    Raises:
        SyncError: It is gone or of another size.
    """
    try:
        fd = os.open(path, (os.O_RDONLY if is_private else os.O_RDWR) | os.O_CLOEXEC)
    except OSError as error:
        raise SyncError(f"cannot open the segment {path}: {error.strerror}") from error
    try:
        size = os.fstat(fd).st_size
        if size != num_bytes:
            raise SyncError(f"the segment {path} has {size} bytes, wanted {num_bytes}")
        flags = mmap.MAP_PRIVATE if is_private else mmap.MAP_SHARED
        return mmap.mmap(fd, num_bytes, flags, mmap.PROT_READ | mmap.PROT_WRITE)
    finally:
        os.close(fd)


def unlink(path: str) -> None:
    """Remove the segment at `path` if it is there; mappings stay valid."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def find(prefix: str) -> list[str]:
    """Return the paths of all segments whose names start with `prefix`."""
    assert prefix.startswith("asyncrl-"), f"'{prefix}' is not a prefix of ours"
    return sorted(str(path) for path in SHM_DIR.iterdir() if path.name.startswith(prefix))


def unlink_all(prefix: str) -> int:
    """Remove all segments whose names start with `prefix`; return their number."""
    paths = find(prefix)
    for path in paths:
        unlink(path)
    return len(paths)
