"""The coordinator's files in the run's folder: its fencing token and the journal of its rounds.

`weight_sync.token` holds the token of the newest coordinator. `weight_sync.jsonl` holds the entries of
`weight_sync.sync_records`; those of the fences are for the next coordinator.
Invariants: a token is never given twice, also if the clock was set back; the journal stays under
`MAX_BYTES`, its oldest lines go first, the fences never; who is no longer the newest coordinator writes
nothing.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from asyncrl.core.files.durable import append_lines
from weight_sync.sync_records import JOURNAL_FILE, Entry, FencesRecord, StartRecord, parse_entry

log = logging.getLogger(__name__)

TOKEN_FILE = "weight_sync.token"
MAX_BYTES = 1 << 20


def take_token(folder: Path, wall_ns: Callable[[], int] = time.time_ns) -> int:
    """Return a token larger than every one before, kept durably in `folder`.

    Without such a folder nothing is kept, and it is the wall clock's alone.
    """
    now_ms = wall_ns() // 1_000_000
    if not folder.is_dir():
        return now_ms
    fd = os.open(folder / TOKEN_FILE, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
    with os.fdopen(fd, "r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        token = max(now_ms, _as_token(file.read()) + 1)
        file.seek(0)
        file.write(f"{token}\n")
        file.flush()
        os.fsync(fd)
    return token


def newest_token(folder: Path) -> int:
    """Return the newest coordinator's token, 0 if there was none."""
    try:
        return _as_token((folder / TOKEN_FILE).read_text())
    except OSError:
        return 0


def read_fences(folder: Path) -> dict[str, int]:
    """Return the version number that each fenced member must serve first, as last journalled in `folder`.

    To be read after a token was taken: from then on no older coordinator writes.
    """
    try:
        lines = (folder / JOURNAL_FILE).read_bytes().splitlines()
    except OSError:
        return {}
    for line in reversed(lines):
        if b'"fences"' in line and isinstance(entry := parse_entry(line), FencesRecord):
            return dict(entry.fences)
    return {}


def _as_token(text: str) -> int:
    return int(text) if text.strip().isdigit() else 0


class Journal:
    """Appends lines; without a folder it keeps nothing. `fences` are those that are written down already."""

    def __init__(
        self,
        folder: Path | None,
        token: int,
        max_bytes: int = MAX_BYTES,
        fences: Mapping[str, int] | None = None,
        wall_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self._path = folder / JOURNAL_FILE if folder is not None and folder.is_dir() else None
        self._token = token
        self._max_bytes = max_bytes
        self._fences = dict(fences or {})
        self._wall_ns = wall_ns
        self.note(StartRecord(token))

    def note_fences(self, fences: dict[str, int]) -> None:
        """Write down which members are fenced, and until which version number, if that has changed."""
        if fences != self._fences:
            self._fences = fences
            self.note(FencesRecord(fences))

    def note(self, entry: Entry) -> None:
        """Append an entry, unless a newer coordinator writes here; one that would not fit is left out."""
        if self._path is None or newest_token(self._path.parent) > self._token:
            return
        text = self._line_of(entry)
        if len(text) > self._max_bytes // 2:
            log.warning("a line of %d bytes does not fit the journal of weight sync", len(text))
            return
        try:
            num_bytes = append_lines(self._path, text)
            if num_bytes > self._max_bytes:
                self._shorten()
        except OSError as error:  # a full disk must not end weight sync
            log.warning("the journal of weight sync was not written: %s", error)

    def _shorten(self) -> None:
        assert self._path is not None, "only what is written grows"
        lines = self._path.read_text(errors="replace").splitlines(keepends=True)
        fences = self._line_of(FencesRecord(self._fences))  # which may have been in what goes
        kept: deque[str] = deque()
        room = self._max_bytes // 2 - len(fences)
        while lines and (room := room - len(lines[-1].encode())) >= 0:
            kept.appendleft(lines.pop())
        temporary = self._path.with_name(f".{JOURNAL_FILE}.{os.getpid()}")
        temporary.write_text("".join([*kept, fences]))
        temporary.replace(self._path)

    def _line_of(self, entry: Entry) -> str:
        timed = msgspec.structs.replace(entry, time=self._wall_ns() / 1e9)
        return json.dumps(msgspec.to_builtins(timed)) + "\n"
