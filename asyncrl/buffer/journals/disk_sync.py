"""Syncs of a journal's files, beside the thread that writes them: a slow disk delays no reply."""

from __future__ import annotations

import logging
import math
import os
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

from asyncrl.core.runtime.interface import Runtime, Task

log = logging.getLogger(__name__)

SYNC_EVERY_S = 1.0


class DiskSync:
    """Syncs a segment and the write-ahead log, once a second at most and only what is new.

    Payloads go first, so that no event is on the disk before the payloads that it names.

    Attributes:
        on_end: Called on the syncing thread when a sync has ended.
    """

    def __init__(
        self, runtime: Runtime, log_file: Path, sync: Callable[[int], None], counters: Counter[str]
    ) -> None:
        self.counters = counters
        self.on_end: Callable[[], None] = lambda: None
        self._runtime = runtime
        self._log_file = log_file
        self._sync = sync
        self._task: Task | None = None
        self._is_busy = False
        self._next = -math.inf
        self._unsynced_since: float | None = None
        self._synced_from: float | None = None
        self._has_succeeded = False
        self._unsynced: list[int] = []

    @property
    def unsynced_s(self) -> float:
        """Age of the oldest commit that may not be on the disk."""
        since = [at for at in (self._unsynced_since, self._synced_from) if at is not None]
        return self._runtime.now() - min(since) if since else 0.0

    @property
    def next_sync(self) -> float:
        """Time from which `sync_if_due` has work; infinite while nothing is new, or a sync is on its way."""
        return math.inf if self._is_busy or self._unsynced_since is None else self._next

    def note_commit(self) -> None:
        if self._unsynced_since is None:
            self._unsynced_since = self._runtime.now()

    def take_success(self) -> bool:
        """Tell, once, that the last sync that began is done."""
        found, self._has_succeeded = self._has_succeeded, False
        return found

    def sync_if_due(self, take_segments: Callable[[], list[int]]) -> bool:
        """Begin a sync unless one is on its way, nothing is new, or the last one is too recent."""
        if self._runtime.now() < self.next_sync:
            return False
        self._has_succeeded = False
        self._next = self._runtime.now() + SYNC_EVERY_S
        self._synced_from, self._unsynced_since = self._unsynced_since, None
        descriptors = [*take_segments(), os.open(self._log_file, os.O_RDONLY)]
        self._is_busy = True
        self._task = self._runtime.spawn("journal-sync", partial(self._run, descriptors))
        return True

    def sync_now(self, take_segments: Callable[[], list[int]]) -> bool:
        """Sync on the calling thread, whatever the pace; return whether all commits are on disk now.

        Segments that could not be synced are taken again by the next call.
        """
        self._unsynced = [*self._unsynced, *take_segments()]
        log_file = os.open(self._log_file, os.O_RDONLY)
        try:
            for descriptor in (*self._unsynced, log_file):
                self._sync(descriptor)
        except OSError as error:
            self._note_failure(error)
            return False
        finally:
            os.close(log_file)
        self._close_unsynced()
        if not self._is_busy:
            self._unsynced_since = None
        return True

    def _close_unsynced(self) -> None:
        while self._unsynced:
            os.close(self._unsynced.pop())

    def _note_failure(self, error: OSError) -> None:
        self.counters["failed_syncs"] += 1
        log.error("the journal could not be synced, a power cut may lose everything since then: %s", error)

    def _run(self, descriptors: list[int]) -> None:
        try:
            for descriptor in descriptors:
                self._sync(descriptor)
            self._has_succeeded = True
        except OSError as error:
            self._note_failure(error)
            self._unsynced_since = self._synced_from
        finally:
            self._synced_from = None
            for descriptor in descriptors:
                os.close(descriptor)
            self._is_busy = False
            self.on_end()

    def close(self) -> None:
        self._close_unsynced()
        if self._task is not None:
            self._task.join(30.0)
