"""Shared memory as plain files: made, mapped, size-checked and unlinked by their owner.

Owns the form of segments, and where they lie: those of a run in its private folder in /dev/shm, so that no
file of another user's is one. Never uses `multiprocessing.shared_memory`, whose tracker may unlink what it
does not own. A file's pages are reserved when it is made, so a full /dev/shm is an error here and not a bus
error in the middle of a copy.

Processes of a node share a segment without a message between them: its owner gives it a second name
(`share`), a reader maps it under that name and gives it a third one (`map_shared`), and the lock of a mapping
lasts as long as the mapping does. The kernel ends it with its process, so a dead reader keeps no segment, and
one that stands still keeps its own bytes only: the owner takes another segment.
Invariants: whoever maps a segment knows its size before and checks it; a segment that `is_read` is not
written to.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import mmap
import os
import re
from pathlib import Path

from asyncrl.core.errors import SegmentGone, SyncError

log = logging.getLogger(__name__)

SHM_DIR = Path("/dev/shm")
NODE_MARK = "node"
"""Name of the mark of a node, in a run's folder of segments."""
_SHARED = re.compile(r"-\d+\.\d+$")
"""The end of a name that `share` has given."""


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
    """Map the segment at `path`, which must have `num_bytes`; `MAP_PRIVATE` is a reader's: copy on write.

    The mapping lives as long as something refers to it, also after the file was unlinked; a reader's keeps
    the segment from being written to for so long (`is_read`).

    Raises:
        SegmentGone: It is not there, or its owner is about to write to it.
        SyncError: It is of another size, or there is no memory to map it.
    """
    try:
        fd = os.open(path, (os.O_RDONLY if flags & mmap.MAP_PRIVATE else os.O_RDWR) | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise SegmentGone(f"the segment {path} is gone") from error
    except OSError as error:
        raise SyncError(f"cannot open the segment {path}: {error.strerror}") from error
    try:
        if flags & mmap.MAP_PRIVATE:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)  # of the open file, which the mapping keeps open
            if not os.path.samestat(os.fstat(fd), os.stat(path)):  # taken back before it was locked
                raise SegmentGone(f"the segment {path} is gone")
        size = os.fstat(fd).st_size
        if size != num_bytes:
            raise SyncError(f"the segment {path} has {size} bytes, wanted {num_bytes}")
        return mmap.mmap(fd, num_bytes, flags, mmap.PROT_READ | mmap.PROT_WRITE)
    except BlockingIOError as error:
        raise SegmentGone(f"the segment {path} is taken back by its owner") from error
    except FileNotFoundError as error:
        raise SegmentGone(f"the segment {path} is gone") from error
    except OSError as error:
        raise SyncError(f"cannot map the segment {path}: {error.strerror}") from error
    finally:
        os.close(fd)


def share(path: str, number: int) -> str:
    """Return a second name of the segment at `path`, under which others of the node may map version `number`.

    Empty if there can be none. No name is used twice: a path holds each number once.
    """
    shared = f"{path}.{number}"
    try:
        with contextlib.suppress(FileExistsError):
            os.link(path, shared)
    except OSError as error:
        log.warning("the segment %s cannot be shared: %s", path, error)
        return ""
    return shared


def map_shared(shared: str, own: str, num_bytes: int) -> mmap.mmap:
    """Map the segment that another process shares as `shared`, and give it the name `own` too.

    The lock comes before the look at the name: an owner that has withdrawn the name by then shares nothing,
    one that withdraws it later finds the lock.

    Raises:
        SegmentGone: It is shared no more.
        SyncError: It cannot be mapped, or is of another size.
    """
    mapping = attach(shared, num_bytes, mmap.MAP_PRIVATE)
    try:
        os.link(shared, own)
    except FileNotFoundError as error:
        raise SegmentGone(f"the segment {shared} is shared no more") from error
    except OSError as error:
        raise SyncError(f"cannot map the segment {shared}: {error.strerror}") from error
    return mapping


def is_read(path: str, num_names: int = 1) -> bool:
    """Tell whether somebody reads the segment at `path`, or has a name for it and may come to read.

    Args:
        num_names: That its owner has given it.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return True  # somebody has removed it: nobody can tell
    try:
        if os.fstat(fd).st_nlink > num_names:
            return True
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def mark_node(folder: str, mark: str) -> str:
    """Return the mark of the node in whose shared memory `folder` lies: the first that a process left there.

    Processes that find the same mark see the same files, whatever their hosts are called; an empty one says
    that this process can share nothing.

    Args:
        mark: That nobody else would leave.
    """
    path, draft = SHM_DIR / folder / NODE_MARK, SHM_DIR / folder / f"{NODE_MARK}-{mark}"
    try:
        draft.write_text(mark)
        with contextlib.suppress(FileExistsError):
            os.link(draft, path)
        return path.read_text()
    except OSError as error:
        log.warning("the copies of this node cannot be shared: %s", error)
        return ""
    finally:
        draft.unlink(missing_ok=True)


def unlink(path: str) -> None:
    """Remove the segment at `path` if it is there; mappings stay valid."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def find(prefix: str) -> list[str]:
    """Return the paths of all segments whose names start with `prefix`, without further names of theirs."""
    return [path for path in find_names(prefix) if not _SHARED.search(path)]


def find_names(prefix: str) -> list[str]:
    """Return the paths of all segments, each of their names counted, that start with `prefix`."""
    assert prefix.startswith("asyncrl-"), f"'{prefix}' is not a prefix of ours"
    folder, _, start = f"{SHM_DIR}/{prefix}".rpartition("/")
    try:
        names = [name for name in os.listdir(folder) if name.startswith(start) and name != NODE_MARK]
    except FileNotFoundError:
        return []
    return sorted(f"{folder}/{name}" for name in names)


def unlink_all(prefix: str) -> int:
    """Remove all segments whose names start with `prefix`; return the number of their names."""
    paths = find_names(prefix)
    for path in paths:
        unlink(path)
    return len(paths)
