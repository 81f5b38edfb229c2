"""The coordinator's files in the run's folder: its fencing token and the journal of its rounds.

`weight_sync.token` holds the token of the newest coordinator. `weight_sync.jsonl` holds one JSON object
a line: `start`, `round`, `blame`, `members`; `asyncrl inspect weights` reads it.
Invariants: a token is never given twice, also if the clock was set back; the journal stays under
`MAX_BYTES`, its oldest half goes first; who is no longer the newest coordinator writes nothing.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from weight_sync.protocol.records import Record, RoundRecord

log = logging.getLogger(__name__)

TOKEN_FILE, JOURNAL_FILE = "weight_sync.token", "weight_sync.jsonl"
MAX_BYTES = 1 << 20


def take_token(folder: Path) -> int:
    """Return a token larger than every one before, kept durably in `folder`.

    Without such a folder nothing is kept, and it is the wall clock's alone.
    """
    now_ms = time.time_ns() // 1_000_000
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


def _as_token(text: str) -> int:
    return int(text) if text.strip().isdigit() else 0


class Journal:
    """Appends lines; without a folder it keeps nothing."""

    def __init__(self, folder: Path | None, token: int, max_bytes: int = MAX_BYTES) -> None:
        self._path = folder / JOURNAL_FILE if folder is not None and folder.is_dir() else None
        self._token = token
        self._max_bytes = max_bytes
        self.write({"kind": "start", "token": token})

    def note(self, record: Record, **fields: Any) -> None:
        """Write down a record of the protocol."""
        kind = "round" if isinstance(record, RoundRecord) else "blame"
        self.write({"kind": kind, **asdict(record), **fields})

    def write(self, line: dict[str, Any]) -> None:
        """Append one line, unless a newer coordinator writes here."""
        if self._path is None or newest_token(self._path.parent) > self._token:
            return
        try:
            with self._path.open("a") as file:
                file.write(json.dumps({"time": time.time(), **line}) + "\n")
                num_bytes = file.tell()
            if num_bytes > self._max_bytes:
                self._shorten()
        except OSError as error:  # a full disk must not end weight sync
            log.warning("the journal of weight sync was not written: %s", error)

    def _shorten(self) -> None:
        assert self._path is not None, "only what is written grows"
        lines = self._path.read_text().splitlines(keepends=True)
        temporary = self._path.with_name(f".{JOURNAL_FILE}.{os.getpid()}")
        temporary.write_text("".join(lines[len(lines) // 2 :]))
        temporary.replace(self._path)
