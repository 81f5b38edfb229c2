"""Store of objects at an fsspec URL: a shared folder, or an object store through the user's own package.

Owns the threads that wait for the store, and what is said of its errors. A call that hangs keeps a thread and
bytes of its own: who waits for it goes on at its deadline. Must never repeat a driver's message, which may
hold credentials. Invariant: an object is under its name whole or not at all.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Protocol

from asyncrl.core.config.secrets import hide_passwords
from asyncrl.core.errors import ConfigError, DeadlineExceeded, SyncError
from asyncrl.core.files.private import make_private
from asyncrl.core.runtime.interface import Event, Runtime

MAX_CALLS = 16
"""Under way at once; a store that has not answered so many is asked nothing more."""
DRAFT = ".part"
_OWN = re.compile(r"[0-9a-f]{32}(\.[0-9a-f]{8}\.part)?")
"""Names of objects and of their drafts: nothing else is ever removed."""


class StoreError(SyncError):
    """A store failed, or did not answer. Its message has no words of the store's driver."""


class Files(Protocol):
    """What is called of an fsspec file system."""

    protocol: str | tuple[str, ...]

    def makedirs(self, path: str, exist_ok: bool = False) -> None: ...

    def pipe_file(self, path: str, value: bytes) -> None: ...

    def cat_file(self, path: str, start: int, end: int) -> bytes: ...

    def mv(self, path1: str, path2: str) -> None: ...

    def find(self, path: str) -> list[str]: ...

    def rm_file(self, path: str) -> None: ...

    def rmdir(self, path: str) -> None: ...


def open_files(url: str) -> tuple[Files, str]:
    """Return the fsspec file system of a URL, without a cache of listings, and the path in it.

    Raises:
        ConfigError: fsspec or the package for such URLs is missing, or does not take it.
    """
    scheme, key = url.partition("://")[0], "weight_sync.folder"
    try:
        from fsspec.core import url_to_fs
    except ImportError as error:
        raise ConfigError(f"{key}: fsspec is not installed", hint="pip install fsspec") from error
    try:
        files, root = url_to_fs(url, use_listings_cache=False, skip_instance_cache=True)
    except ImportError as error:
        told = f"{key}: the fsspec package for {scheme}:// is not installed"
        hint = "Install it here and on every node, such as s3fs for s3:// and gcsfs for gs://"
        raise ConfigError(told, hint=hint) from error
    except Exception as error:  # of any kind: drivers raise their own
        known = "is no scheme that fsspec knows" if isinstance(error, ValueError) else explain(error)
        raise ConfigError(f"{key}: {scheme}:// {known}", hint="Write file:///a/shared/folder") from error
    return files, str(root).rstrip("/")


def explain(error: BaseException) -> str:
    """Return an error without words of a driver: its kind, and the system's text of its number."""
    if isinstance(error, ConfigError):
        return error.message
    number = error.errno if isinstance(error, OSError) else None
    return type(error).__name__ + (f" ({os.strerror(number)})" if isinstance(number, int) else "")


class Call:
    """One operation under way in a thread of its own."""

    def __init__(self, runtime: Runtime, what: str) -> None:
        self._runtime, self._what = runtime, what
        self._has_ended = runtime.event()
        self._result: bytes | None = None
        self._error: StoreError | None = None

    def end(self, result: bytes | None, error: StoreError | None) -> None:
        """Wake who waits for it."""
        self._result, self._error = result, error
        self._has_ended.set()

    @property
    def has_failed(self) -> bool:
        return self._has_ended.is_set() and self._error is not None

    def wait(self, until: float, patience_s: float, given_up: Event | None = None) -> bytes | None:
        """Return what was read; None if nothing is there, or nothing was asked for.

        Args:
            given_up: Ends the wait, not the call.

        Raises:
            StoreError: The store failed, or did not answer for `patience_s`.
            DeadlineExceeded: It did not until `until`.
            SyncError: It was given up.
        """
        left_s, woken = until - self._runtime.now(), self._runtime.event()
        for event in (self._has_ended, *([given_up] if given_up else [])):
            event.on_set(woken.set)
        woken.wait(max(0.0, min(left_s, patience_s)))
        if self._has_ended.is_set():
            if self._error is not None:
                raise self._error
            return self._result
        if given_up is not None and given_up.is_set():
            raise SyncError("the transfer was aborted")
        if patience_s >= left_s:
            raise DeadlineExceeded(f"the folder did not {self._what} in time")
        raise StoreError(f"the folder did not {self._what} within {patience_s:.1f} s")


class Store:
    """See the module; any thread may call it.

    Raises:
        ConfigError: See `open_files`.
    """

    def __init__(self, runtime: Runtime, url: str) -> None:
        self._runtime = runtime
        self._files, self._root = open_files(url)
        self.url = hide_passwords(url)
        self._lock, self._num_calls = runtime.lock(), 0

    def claim(self, folder: str) -> Call:
        """Start to make `folder`, for this user alone if the store has users, and to remove what is in it."""
        return self._start("give a folder", partial(self._claim, self._path(folder)))

    def put(self, name: str, data: bytes) -> Call:
        """Start to store `data`; what was there under that name is replaced at once."""
        return self._start("store an object", partial(self._put, self._path(name), data))

    def get(self, name: str, num_bytes: int) -> Call:
        """Start to read an object, at most its first `num_bytes`."""
        return self._start("give an object", partial(self._get, self._path(name), num_bytes))

    def clear(self, folder: str) -> Call:
        """Start to remove the objects below `folder`, and the folder."""
        return self._start("remove objects", partial(self._clear, self._path(folder), is_whole=True))

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _start(self, what: str, work: Callable[[], bytes | None]) -> Call:
        with self._lock:
            if self._num_calls >= MAX_CALLS:
                raise StoreError(f"{self.url}: {MAX_CALLS} calls have no answer")
            self._num_calls += 1
        call = Call(self._runtime, what)
        self._runtime.spawn("store", partial(self._work, call, work))
        return call

    def _work(self, call: Call, work: Callable[[], bytes | None]) -> None:
        result, failure = None, None
        try:
            result = work()
        except Exception as error:  # of any kind: who waits for the call raises it
            failure = StoreError(f"{self.url}: {explain(error)}")
        with self._lock:
            self._num_calls -= 1
        call.end(result, failure)

    def _claim(self, path: str) -> None:
        protocol = self._files.protocol
        if "file" in ((protocol,) if isinstance(protocol, str) else protocol):
            make_private(Path(path))
        else:
            self._files.makedirs(path, exist_ok=True)
        self._clear(path, is_whole=False)

    def _put(self, path: str, data: bytes) -> None:
        draft = f"{path}.{self._runtime.new_id()[:8]}{DRAFT}"
        try:
            self._files.makedirs(path.rpartition("/")[0], exist_ok=True)
            self._files.pipe_file(draft, data)
            self._files.mv(draft, path)
        except Exception:
            with contextlib.suppress(Exception):  # of any kind: the first failure is told
                self._files.rm_file(draft)
            raise

    def _get(self, path: str, num_bytes: int) -> bytes | None:
        try:
            return bytes(self._files.cat_file(path, start=0, end=num_bytes))
        except FileNotFoundError:
            return None

    def _clear(self, folder: str, *, is_whole: bool) -> None:
        found: list[str] = []
        with contextlib.suppress(FileNotFoundError):
            found = [str(path) for path in self._files.find(folder)]
        own = [path for path in found if _OWN.fullmatch(path.rpartition("/")[2])]
        for path in own:
            with contextlib.suppress(FileNotFoundError):
                self._files.rm_file(path)
        places = {path.rpartition("/")[0] for path in own}
        above = {place.rpartition("/")[0] for place in places}
        for place in (*places, *above, folder):
            if (place != folder or is_whole) and place.startswith(folder):
                with contextlib.suppress(Exception):  # not empty, or no folder: object stores have none
                    self._files.rmdir(place)
