"""The bounded queue and the thread between the run and one sink.

Owns what is dropped. A sink may raise, be slow or never return: `put` does not wait for it, and `close`
at most for its deadline. Invariant: a row is delivered, dropped and counted, or still in the queue.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

from asyncrl.control.record.sinks.protocol import Sink
from asyncrl.core.metrics.metric import Row
from asyncrl.core.runtime.clock import Clock, SystemClock

log = logging.getLogger(__name__)

CAPACITY_ROWS = 512
REOPEN_S = 30.0
"""Between two tries to open a sink; rows that come meanwhile are dropped."""

_Item = tuple[dict[str, float], int]


class Outbox:
    """ServiceActuator rows to a sink, one after another, from a thread of its own.

    Example:
        outbox = Outbox(TensorBoardSink(folder))
        outbox.put({"actor/lr": 1e-6}, step=1)      # at once
        outbox.close(5.0)                           # within 5 s
    """

    def __init__(self, sink: Sink, capacity: int = CAPACITY_ROWS, clock: Clock | None = None) -> None:
        self.name = sink.name
        self._sink = sink
        self._capacity = capacity
        self._clock = clock or SystemClock()
        self._rows: deque[_Item] = deque()
        self._changed = threading.Condition()
        self._is_closing = False
        self._num_in_hand = 0
        self._num_dropped = 0
        self._is_open = False
        self._opened_last: float | None = None
        self._said: set[str] = set()
        self._thread = threading.Thread(target=self._run, name=f"sink-{sink.name}", daemon=True)
        self._thread.start()

    def put(self, row: Row, step: int) -> None:
        """Queue the numbers of `row`; with a full queue the row is dropped. Never waits for the sink."""
        numbers = {name: value for name, value in row.items() if isinstance(value, int | float)}
        values = {name: float(value) for name, value in numbers.items() if "/" in name}
        with self._changed:
            if self._is_closing or len(self._rows) >= self._capacity:
                self._drop(1, "its queue is full")
                return
            self._rows.append((values, step))
            self._changed.notify()

    def metrics(self) -> dict[str, float]:
        """Return the number of dropped rows, and of waiting ones."""
        with self._changed:
            return {
                f"metrics/sink_dropped/{self.name}": float(self._num_dropped),
                f"metrics/sink_waiting/{self.name}": float(len(self._rows) + self._num_in_hand),
            }

    def begin_close(self) -> None:
        """Take no more rows; those that wait are still delivered."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()

    def close(self, deadline_s: float) -> bool:
        """Wait until all is delivered and the sink closed, at most `deadline_s`; return whether it is.

        A sink that hangs is left to its daemon thread, and its rows are counted as dropped.
        """
        self.begin_close()
        self._thread.join(deadline_s)
        if not self._thread.is_alive():
            return True
        with self._changed:
            num_left = len(self._rows) + self._num_in_hand
            self._rows.clear()
            self._num_in_hand = 0
            self._drop(num_left, f"it did not end within {deadline_s:.1f} s")
        return False

    def _run(self) -> None:
        while (item := self._next()) is not None:
            is_delivered = self._deliver(*item)
            with self._changed:
                # `close` may have given the row up meanwhile, and counted it.
                self._num_dropped += self._num_in_hand if not is_delivered else 0
                self._num_in_hand = 0
        if self._is_open:
            self._try("close", self._sink.close)

    def _next(self) -> _Item | None:
        with self._changed:
            self._changed.wait_for(lambda: bool(self._rows) or self._is_closing)
            if not self._rows:
                return None
            self._num_in_hand = 1
            return self._rows.popleft()

    def _deliver(self, values: dict[str, float], step: int) -> bool:
        if not self._is_open and not self._open():
            return False
        return self._try("write", lambda: self._sink.write(values, step))

    def _open(self) -> bool:
        now = self._clock.now()
        if self._opened_last is not None and now - self._opened_last < REOPEN_S:
            return False
        self._opened_last = now
        self._is_open = self._try("open", self._sink.open)
        return self._is_open

    def _try(self, what: str, call: Callable[[], None]) -> bool:
        try:
            call()
        except (
            BaseException
        ) as error:  # the border to other people's code: whatever it raises ends no more than this row
            self._say_once(what, f"{type(error).__name__}: {error}")
            return False
        return True

    def _drop(self, number: int, why: str) -> None:
        self._num_dropped += number
        if number:
            self._say_once("drop", f"{why}; {self._num_dropped} rows dropped so far")

    def _say_once(self, what: str, why: str) -> None:
        if what not in self._said:
            self._said.add(what)
            log.warning(
                "metrics do not all reach %s (%s): %s; metrics.jsonl has them all", self.name, what, why
            )
