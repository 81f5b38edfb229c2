"""The coordinator's files in the run's folder: its fencing token and the journal of its rounds.

`weight_sync.token` holds the token of the newest coordinator. `weight_sync.jsonl` holds one JSON object
a line: `start`, `round`, `blame`, `load_failure`, `members`; `asyncrl inspect weights` reads it. `fences` is
for the next coordinator: who takes no leases before which version.
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
from dataclasses import asdict
from pathlib import Path

from asyncrl.core.files.durable import append_lines
from weight_sync.protocol.records import BlameRecord, LoadFailureRecord, Record, RoundRecord

log = logging.getLogger(__name__)

TOKEN_FILE, JOURNAL_FILE = "weight_sync.token", "weight_sync.jsonl"
MAX_BYTES = 1 << 20
KINDS = {RoundRecord: "round", BlameRecord: "blame", LoadFailureRecord: "load_failure"}


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
        lines = (folder / JOURNAL_FILE).read_text(errors="replace").splitlines()
    except OSError:
        return {}
    for line in reversed(lines):
        if '"fences"' in line and (fences := _as_fences(line)) is not None:
            return fences
    return {}


def _as_fences(text: str) -> dict[str, int] | None:
    try:
        line = json.loads(text)
        return {str(name): int(number) for name, number in dict(line["fences"]).items()}
    except (ValueError, TypeError, KeyError):  # a torn line, or another kind of line that names them
        return None


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
        self.write({"kind": "start", "token": token})

    def note(self, record: Record, **fields: object) -> None:
        """Write down a record of the protocol."""
        self.write({"kind": KINDS[type(record)], **asdict(record), **fields})

    def note_fences(self, fences: dict[str, int]) -> None:
        """Write down which members are fenced, and until which version number, if that has changed."""
        if fences != self._fences:
            self._fences = fences
            self.write(self._fences_line())

    def write(self, line: Mapping[str, object]) -> None:
        """Append one line, unless a newer coordinator writes here; one that would not fit is left out."""
        if self._path is None or newest_token(self._path.parent) > self._token:
            return
        text = json.dumps({"time": self._wall_ns() / 1e9, **line}) + "\n"
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
        fences = json.dumps(self._fences_line()) + "\n"  # which may have been in what goes
        kept: deque[str] = deque()
        room = self._max_bytes // 2 - len(fences)
        while lines and (room := room - len(lines[-1].encode())) >= 0:
            kept.appendleft(lines.pop())
        temporary = self._path.with_name(f".{JOURNAL_FILE}.{os.getpid()}")
        temporary.write_text("".join([*kept, fences]))
        temporary.replace(self._path)

    def _fences_line(self) -> Mapping[str, object]:
        return {"kind": "fences", "fences": self._fences}
