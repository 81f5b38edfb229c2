"""Watching a run until it ends. The terminal only watches: hanging up leaves the run alive.

consumes: snapshots of the run, a few times a second
waits for: the head process to end
unblocked by: its end, or Ctrl-C, which stops the run
produces: a live panel, or a line per step where stdout is no terminal
"""

from __future__ import annotations

from typing import Any, Protocol, TextIO

from asyncrl.cli.live import Snapshot, line_of, panel_of, resumed_line_of
from asyncrl.clock import Clock

POLL_S = 0.25


class Watched(Protocol):
    """What a view needs of a run handle."""

    def poll(self) -> dict[str, Any]: ...

    @property
    def is_over(self) -> bool: ...


class View(Protocol):
    """Shows one snapshot after the other."""

    def show(self, snapshot: Snapshot) -> None: ...

    def close(self) -> None: ...


class LineView:
    """A line whenever the step or the state has changed, and one that says where a run goes on."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._shown: tuple[Any, ...] = ()
        self._resumed = ""

    def show(self, snapshot: Snapshot) -> None:
        if not self._resumed and (resumed := resumed_line_of(snapshot)):
            self._resumed = resumed
            print(resumed, file=self._stream, flush=True)
        news = (snapshot.get("state"), snapshot.get("step"), bool(snapshot.get("metrics")))
        if news != self._shown:
            self._shown = news
            print(line_of(snapshot), file=self._stream, flush=True)

    def close(self) -> None:
        """A line is complete when it is printed."""


class PanelView:
    """A panel that is drawn again in place."""

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console
        from rich.live import Live

        self._live = Live(console=Console(file=stream), auto_refresh=False)
        self._live.start()

    def show(self, snapshot: Snapshot) -> None:
        self._live.update(panel_of(snapshot), refresh=True)

    def close(self) -> None:
        self._live.stop()


def view_on(stream: TextIO) -> View:
    """Return the view that suits `stream`."""
    return PanelView(stream) if stream.isatty() else LineView(stream)


def watch(run: Watched, view: View, clock: Clock) -> None:
    """Show the run's snapshots until it is over. Ends early only by an exception, as Ctrl-C is one."""
    try:
        while not run.is_over:
            view.show(run.poll())
            clock.sleep(POLL_S)
    finally:
        view.close()
