"""Event log of a run, one line of JSON each, in runs/<name>/events.jsonl.

Owns the form of an event. The log is a record for people and pages: nothing decides by it. Several processes
may write at once, so a line is one write. Invariant: an event that cannot be written is counted and logged,
raises no error, and is written with the next event that can be.
"""

from __future__ import annotations

import json
import logging
from collections import deque
from pathlib import Path
from typing import Literal, get_args

from asyncrl.core.files.durable import append_lines, reserve_room
from asyncrl.core.runtime.interface import Runtime

log = logging.getLogger(__name__)

Kind = Literal[
    "start",
    "exit",
    "restart",
    "ready",
    "retire",
    "scale",
    "autoscale",
    "guard",
    "checkpoint",
    "journal",
    "stall",
    "obstacle",
    "pause",
    "finish",
]
KINDS: tuple[str, ...] = get_args(Kind)
EVENTS_FILE = "events.jsonl"
KEPT = 200
"""Newest events that are kept in memory."""
MAX_TEXT_CHARACTERS = 2000


class EventLog:
    """Appends events and remembers the newest. May be called from any thread.

    Args:
        path: The file; events that are in it already are remembered too.
        reserve_bytes: Room on the disk that is let go when it is full, so that this can still be told, and
            taken again once there is room.
    """

    def __init__(self, path: Path, runtime: Runtime, reserve_bytes: int = 0) -> None:
        self._runtime = runtime
        self._path = path
        self._lock = runtime.lock()
        self._newest: deque[dict[str, object]] = deque(load_events(path, KEPT), maxlen=KEPT)
        self._unwritten: list[str] = []
        self._reserve = path.with_suffix(".reserve")
        self._reserve_bytes = reserve_bytes
        self._has_reserve = False
        self._reserve_again()
        self.num_lost = 0

    def add(self, kind: Kind, service: str, text: str, **fields: object) -> None:
        """Record that `text` happened to `service` ("run" for the whole); `fields` are plain values."""
        assert kind in KINDS, f"there is no event of kind '{kind}'"
        event = {
            "time": self._runtime.wall_ns() / 1e9,
            "kind": kind,
            "service": service,
            "text": text[:MAX_TEXT_CHARACTERS],
            **fields,
        }
        with self._lock:
            self._newest.append(event)
            self._unwritten = [*self._unwritten, json.dumps(event, default=str) + "\n"][-KEPT:]
            try:
                self._write()
            except OSError as error:
                self.num_lost += 1
                log.warning("the event '%s' of %s could not be written yet: %s", kind, service, error)

    def _write(self) -> None:
        """Append events not written yet; on a full disk the reserve is freed first, and restored later."""
        text = "".join(self._unwritten)
        try:
            append_lines(self._path, text)
        except OSError:
            if not self._has_reserve:
                raise
            self._reserve.unlink(missing_ok=True)
            self._has_reserve = False
            append_lines(self._path, text)
        else:
            self._reserve_again()
        self._unwritten = []

    def _reserve_again(self) -> None:
        """Take room on the disk unless it is taken; a disk without room keeps what little it has."""
        if self._has_reserve or not self._reserve_bytes:
            return
        self._has_reserve = reserve_room(self._reserve, self._reserve_bytes)

    def close(self) -> None:
        """Let the reserve go; what could not be written yet stays so."""
        if self._has_reserve:
            self._reserve.unlink(missing_ok=True)

    def newest(self, number: int) -> list[dict[str, object]]:
        """Return the newest `number` events, oldest first."""
        with self._lock:
            return list(self._newest)[-number:] if number else []


def load_events(path: Path, number: int | None = None) -> list[dict[str, object]]:
    """Return the events in `path`, oldest first, the newest `number` only; torn lines are left out."""
    try:
        lines = path.read_text(errors="replace").splitlines()
    except FileNotFoundError:
        return []
    wanted = lines if number is None else lines[-number:]
    return [event for line in wanted if (event := _parse(line)) is not None]


def _parse(line: str) -> dict[str, object] | None:
    try:
        found = json.loads(line)
    except ValueError:  # the process died while it wrote
        return None
    return found if isinstance(found, dict) and "kind" in found else None
