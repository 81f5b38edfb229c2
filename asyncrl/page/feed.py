"""Feed of server-sent events, computed once for all open pages.

A stream
  consumes: the supervisor's snapshot, new rows, the newest payloads
  waits for: its own pulse of `PULSE_S`     unblocked by: time, or the end of the API or of the run
  produces: server-sent events: `view`, `curves`, `rollouts`, `pulse`, at last `end`
Invariant: nothing is read while no page is open, and once per pulse however many are. Streams take the
supervisor's snapshot and hold none of its locks.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterator

import msgspec

from asyncrl.buffer.journals.kind import NewestGroups
from asyncrl.control.rows.metering import accuracy
from asyncrl.control.rows.row_files import is_evaluation
from asyncrl.control.snapshot import Snapshot
from asyncrl.core.errors import AsyncrlError
from asyncrl.core.states import RUN_ENDS
from asyncrl.page.pipeline import counters_of
from asyncrl.page.reading import RowTail
from asyncrl.page.rollouts import Decode, rollouts_of
from asyncrl.page.trends import STEP, Curves, FlowMeter
from asyncrl.page.view import view_of

log = logging.getLogger(__name__)

PULSE_S = 1.0
ROLLOUTS_EVERY_S = 5.0
RETRY_MS = 1000

Status = Callable[[], Snapshot]


class Feed:
    """Makes the events; see the module.

    Args:
        newest: Reads the newest groups; None of a run that keeps no journal.
        decoder: Called at the first look at rollouts.
    """

    def __init__(
        self,
        status: Status,
        rows: RowTail,
        newest: NewestGroups | None,
        decoder: Callable[[], Decode],
    ) -> None:
        self._status = status
        self._rows, self._curves, self._meter = rows, Curves(), FlowMeter()
        self._newest, self._decoder = newest, decoder
        self._decode: Decode | None = None
        self._lock = threading.Lock()
        self._made_at = self._rollouts_at = -1e9
        self._events: dict[str, bytes] = {}
        self._is_over = False

    def follow(self, is_closing: threading.Event) -> Iterator[bytes]:
        """Yield framed events, each when it has changed, until the API ends; `end` when the run does."""
        yield f"retry: {RETRY_MS}\n\n".encode()
        told: dict[str, bytes] = {}
        while not is_closing.is_set():
            events, is_over = self._refresh()
            for name, data in events.items():
                if told.get(name) is not data:
                    told[name] = data
                    yield frame(name, data)
            if is_over:
                yield frame("end", b"{}")
                return
            yield frame("pulse", b"{}")  # who has hung up is found out by writing
            is_closing.wait(PULSE_S)

    def _refresh(self) -> tuple[dict[str, bytes], bool]:
        with self._lock:
            now = time.monotonic()
            if now - self._made_at >= 0.9 * PULSE_S:
                self._made_at = now
                self._look(now)
            return dict(self._events), self._is_over

    def _look(self, now: float) -> None:
        snapshot = self._status()
        if snapshot.outcome is not None:  # all is over but the last word
            snapshot = msgspec.structs.replace(snapshot, state=snapshot.outcome)
        self._is_over = snapshot.state in RUN_ENDS
        rates = self._meter.update(now, counters_of(snapshot))
        self._set("view", view_of(snapshot, rates))
        if "curves" not in self._events or self._take_rows():
            self._take_rows()
            self._set("curves", self._curves.as_values())
        if now - self._rollouts_at >= ROLLOUTS_EVERY_S:
            self._rollouts_at = now
            self._set("rollouts", self._read_rollouts())

    def _set(self, name: str, value: object) -> None:
        data = json.dumps(value, separators=(",", ":"), allow_nan=False).encode()
        if self._events.get(name) != data:
            self._events[name] = data

    def _take_rows(self) -> bool:
        rows = self._rows.read()
        for row in rows:
            if not is_evaluation(row):
                self._curves.add(row)
            elif (found := accuracy(row)) is not None:
                self._curves.add_accuracy(int(row[STEP]), found)
        return bool(rows)

    def _read_rollouts(self) -> dict[str, object]:
        if self._newest is None:
            return {"groups": [], "note": "buffer.journal is none: no rollouts are kept"}
        try:
            groups = self._newest()
            if groups and self._decode is None:
                self._decode = self._decoder()
        except (AsyncrlError, OSError) as error:
            return {"groups": [], "note": f"the journal cannot be read: {type(error).__name__}"}
        return {"groups": rollouts_of(groups, self._decode or str), "note": ""}


def frame(name: str, data: bytes) -> bytes:
    """Return one server-sent event; `data` is JSON in one line."""
    return b"event: " + name.encode() + b"\ndata: " + data + b"\n\n"
