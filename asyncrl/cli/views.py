"""Views of a watched run: lines where stdout is no terminal, else a panel that is painted in place.

Invariant: a complete line is never taken back; of the panel only the lines that have changed are
written, at most once per `PAINT_S`.
"""

from __future__ import annotations

from typing import Protocol, TextIO

from msgspec.structs import replace

from asyncrl.cli.bulletin import Bulletin
from asyncrl.cli.live import LEGEND, PANEL_WIDTH, fields_of, panel_of, state_line_of
from asyncrl.control.snapshot import HeadWord, Snapshot
from asyncrl.core.files.printable import INDENTED, printable
from asyncrl.core.runtime.clock import Clock, SystemClock
from asyncrl.page.figures import DASH
from asyncrl.page.view import resumed_of

LINE_S = 10.0
PAINT_S = 1.0


class View(Protocol):
    """Shows one snapshot after the other."""

    def show(self, snapshot: Snapshot) -> None: ...

    def close(self) -> None: ...


class LineView:
    """A line for each state and phase; in training one per `LINE_S`, with the fields that have changed.

    A field that has ended is a dash.
    """

    def __init__(self, stream: TextIO, clock: Clock | None = None) -> None:
        self._stream = stream
        self._clock = clock or SystemClock()
        self._state = self._resumed = ""
        self._bulletin = Bulletin()
        self._fields: dict[str, str] = {}
        self._printed_at: float | None = None
        self._last = Snapshot()

    def show(self, snapshot: Snapshot) -> None:
        if (resumed := resumed_of(snapshot)) and not self._resumed:
            self._resumed = resumed
            self._print(resumed)
        for line in self._bulletin.lines(snapshot):
            self._print(line)
        if (state := state_line_of(snapshot)) != self._state:
            self._state = state
            self._print(state)
        self._last = snapshot
        now = self._clock.now()
        if self._printed_at is None or now - self._printed_at >= LINE_S:
            self._print_fields(now)

    def close(self) -> None:
        """Print what is new since the last line."""
        self._print_fields(self._clock.now())

    def _print_fields(self, now: float) -> None:
        if not self._last.metrics:
            return
        fields = fields_of(self._last)
        changed = [text for name, text in fields.items() if self._fields.get(name) != text]
        changed += [f"{name} {DASH}" for name in self._fields if name not in fields]
        if fields["step"] not in changed:
            return
        if not self._fields:
            self._print(LEGEND)
        self._print("  ".join(changed))
        self._fields, self._printed_at = fields, now

    def _print(self, line: str) -> None:
        print(printable(line, INDENTED), file=self._stream, flush=True)


class PanelView:
    """A panel at the bottom of a terminal."""

    def __init__(self, stream: TextIO, clock: Clock | None = None) -> None:
        from rich.console import Console

        self._stream = stream
        self._clock = clock or SystemClock()
        self._console = Console(file=stream)
        self._lines: list[str] = []
        self._width = 0
        self._painted_at: float | None = None
        self._last: Snapshot | None = None

    def show(self, snapshot: Snapshot) -> None:
        if isinstance(snapshot, HeadWord) and self._last is not None:  # the last figures stay
            told = {"run": snapshot.run, "state": snapshot.state, "phase": snapshot.phase}
            snapshot = replace(self._last, **told)
        self._last = snapshot
        now = self._clock.now()
        if self._painted_at is None or now - self._painted_at >= PAINT_S:
            self._painted_at = now
            self._paint(snapshot)

    def close(self) -> None:
        """Leave the newest snapshot behind."""
        if self._last is not None:
            self._paint(self._last)

    def _paint(self, snapshot: Snapshot) -> None:
        width = min(PANEL_WIDTH, self._console.width)
        with self._console.capture() as captured:
            self._console.print(panel_of(snapshot, width))
        lines = captured.get().splitlines()[: max(1, self._console.height - 1)]
        known = self._lines if width == self._width else []
        parts = [f"\x1b[{len(self._lines)}A\r"] if self._lines else []
        parts += ["\x1b[J"] if not known else []
        for number, line in enumerate(lines):
            is_same = number < len(known) and known[number] == line
            parts.append("\n" if is_same else f"\x1b[2K{line}\n")
        parts += ["\x1b[J"] if len(lines) < len(known) else []
        self._lines, self._width = lines, width
        self._stream.write("".join(parts))
        self._stream.flush()


def view_on(stream: TextIO) -> View:
    """Return the view that suits `stream`."""
    return PanelView(stream) if stream.isatty() else LineView(stream)
