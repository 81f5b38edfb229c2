"""Shared memory as plain files: made, mapped, size-checked and unlinked by their owner.

Owns the form of segments, and where they lie: those of a run in its private folder in /dev/shm, so that no
file of another user's is one. Never uses `multiprocessing.shared_memory`, whose tracker may unlink what it
does not own. A file's pages are reserved when it is made, so a full /dev/shm is an error here and not a bus
error in the middle of a copy.
Invariant: whoever maps a segment knows its size before and checks it.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from pathlib import Path

from asyncrl.core.errors import SegmentGone, SyncError

SHM_DIR = Path("/dev/shm")


def create(name: str, num_bytes: int, *, is_reserved: bool = True) -> str:
    """Make the segment `name` with `num_bytes` and return its path.

    Args:
        is_reserved: Take the memory at once; else `reserve` does so piece by piece.

    Raises:
        SyncError: It exists already, or there is no room for it.
    """
    path = str(SHM_DIR / name)
    try:
        fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise SyncError(f"cannot make the segment {path}: {error.strerror}") from error
    os.close(fd)
    try:
        if is_reserved:
            reserve(path, 0, num_bytes)
        else:
            os.truncate(path, num_bytes)
    except OSError as error:
        os.unlink(path)
        raise _no_room(num_bytes, error) from error
    except SyncError:
        os.unlink(path)
        raise
    return path


def reserve(path: str, offset: int, num_bytes: int) -> None:
    """Let the segment at `path` have its bytes from `offset` on, zeros; it grows if it ends before.

    They are touched too: the first write of 100 MB took 46 ms in a segment that was not, and 10 ms in one
    that was. Both numbers are multiples of `mmap.ALLOCATIONGRANULARITY`, or the bytes are the last ones.

    Raises:
        SyncError: It is gone, or there is no room for them.
    """
    if num_bytes == 0:
        return
    fd = -1
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        os.posix_fallocate(fd, offset, num_bytes)
        mmap.mmap(fd, num_bytes, mmap.MAP_SHARED | mmap.MAP_POPULATE, offset=offset).close()
    except OSError as error:
        raise _no_room(num_bytes, error) from error
    finally:
        if fd >= 0:
            os.close(fd)


def _no_room(num_bytes: int, error: OSError) -> SyncError:
    return SyncError(
        f"no room for {num_bytes} bytes in {SHM_DIR}: {error.strerror}",
        hint="Give the host or the container a larger /dev/shm",
    )


def attach(path: str, num_bytes: int, flags: int = mmap.MAP_SHARED) -> mmap.mmap:
    """Map the segment at `path`, which must have `num_bytes`; `MAP_PRIVATE` means copy on write.

    The mapping lives as long as something refers to it, also after the file was unlinked.

    Raises:
        SegmentGone: It is not there.
        SyncError: It is of another size, or there is no memory to map it.
    """
    try:
        fd = os.open(path, (os.O_RDONLY if flags & mmap.MAP_PRIVATE else os.O_RDWR) | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise SegmentGone(f"the segment {path} is gone") from error
    except OSError as error:
        raise SyncError(f"cannot open the segment {path}: {error.strerror}") from error
    try:
        size = os.fstat(fd).st_size
        if size != num_bytes:
            raise SyncError(f"the segment {path} has {size} bytes, wanted {num_bytes}")
        return mmap.mmap(fd, num_bytes, flags, mmap.PROT_READ | mmap.PROT_WRITE)
    except OSError as error:
        raise SyncError(f"cannot map the segment {path}: {error.strerror}") from error
    finally:
        os.close(fd)


def unlink(path: str) -> None:
    """Remove the segment at `path` if it is there; mappings stay valid."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def find(prefix: str) -> list[str]:
    """Return the paths of all segments whose names start with `prefix`; no folder holds none."""
    assert prefix.startswith("asyncrl-"), f"'{prefix}' is not a prefix of ours"
    folder, _, start = f"{SHM_DIR}/{prefix}".rpartition("/")
    try:
        return sorted(f"{folder}/{name}" for name in os.listdir(folder) if name.startswith(start))
    except FileNotFoundError:
        return []


def unlink_all(prefix: str) -> int:
    """Remove all segments whose names start with `prefix`; return their number."""
    paths = find(prefix)
    for path in paths:
        unlink(path)
    return len(paths)
