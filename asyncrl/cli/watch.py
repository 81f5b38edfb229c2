"""Watch loop of a terminal: shows a run until it ends, and can end it. A hangup leaves the run alive.

consumes: snapshots of the run, a few times a second
waits for: the head process to end
unblocked by: its end, or Ctrl-C, which stops the run
produces: a panel, or lines where stdout is no terminal (see `views`); how the run ended
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Protocol

from asyncrl.cli import exits
from asyncrl.cli.exits import say, show
from asyncrl.cli.live import table_of
from asyncrl.cli.views import View, view_on
from asyncrl.control.snapshot import HeadWord, Snapshot
from asyncrl.core.errors import DeadlineExceeded
from asyncrl.core.runtime.clock import Clock, SystemClock
from asyncrl.core.states import RUN_ENDS, RunState

if TYPE_CHECKING:
    from asyncrl.control.record.outcome import Outcome
    from asyncrl.control.record.rundir import RunDir


POLL_S = 0.25
STOP_DEADLINE_S = 240.0
ASKED = "the run is asked to stop"


class Watched(Protocol):
    """Part of a run handle that the watch loop uses."""

    @property
    def folder(self) -> RunDir: ...

    @property
    def is_over(self) -> bool: ...

    def poll(self) -> Snapshot: ...

    def stop(self, deadline_s: float, show: Callable[[Snapshot], None] = ...) -> None: ...

    def clear(self) -> None: ...

    def result(self) -> Outcome: ...


class PhaseTimer:
    """Says what a run is busy with while it ends, and for how long it was.

    >>> timer = PhaseTimer(SystemClock(), lambda sentence: None)
    >>> from asyncrl.control.snapshot import Snapshot
    >>> timer.show(Snapshot(state=RunState.STOPPING, phase="ending Ray"))
    >>> timer.summary()
    'ending Ray 0.0 s'
    """

    def __init__(self, clock: Clock, tell: Callable[[str], None]) -> None:
        self._clock = clock
        self._tell = tell
        self._began = clock.now()
        self._phases: dict[str, float] = {}
        self._phase = ""

    @property
    def elapsed_s(self) -> float:
        return self._clock.now() - self._began

    def show(self, snapshot: Snapshot) -> None:
        is_ending = snapshot.state in (RunState.STOPPING, *RUN_ENDS)
        phase = (snapshot.phase if is_ending else "") or self._phase or ASKED
        if phase == self._phase:
            return
        begins_s = self.elapsed_s
        self._phases.setdefault(phase, begins_s)
        self._phase = phase
        self._tell(f"  {begins_s:4.1f} s: {phase}")

    def summary(self) -> str:
        """Return each phase with its seconds, the last one until now."""
        starts = [*self._phases.values(), self.elapsed_s]
        spans = zip(self._phases, starts, starts[1:], strict=False)
        return ", ".join(f"{phase} {end - start:.1f} s" for phase, start, end in spans)


def watch(
    run: Watched, view: View, clock: Clock, is_enough: Callable[[Snapshot], bool] = lambda snapshot: False
) -> None:
    """Show the run's snapshots until it is over or one is enough. An exception, as Ctrl-C, ends it early."""
    try:
        while not run.is_over:
            snapshot = run.poll()
            view.show(snapshot)
            if is_enough(snapshot):
                return
            clock.sleep(POLL_S)
    finally:
        view.close()


def follow(run: Watched) -> int:
    """Watch a run to its end and return the exit code; Ctrl-C and SIGTERM stop it."""
    try:
        with sigterm_as_interrupt():
            say(f"the run writes to {run.folder.path}; Ctrl-C stops it, hanging up leaves it running")
            watch(run, view_on(sys.stdout), SystemClock())
    except KeyboardInterrupt:
        stop(run)
        return exits.INTERRUPTED
    return report(run)


def follow_until_up(run: Watched, view: View, clock: Clock) -> bool:
    """Watch a run until its supervisor answers; return whether it does. Ctrl-C stops the run."""
    found: list[Snapshot] = []

    def is_up(snapshot: Snapshot) -> bool:
        found.extend([] if isinstance(snapshot, HeadWord) else [snapshot])
        return bool(found)

    try:
        with sigterm_as_interrupt():
            watch(run, view, clock, is_up)
    except KeyboardInterrupt:
        stop(run)
        raise
    return bool(found)


def stop(run: Watched) -> None:
    """End the run in order, saying what takes how long and what failed; a second Ctrl-C ends it at once."""
    say("stopping the run; Ctrl-C again ends it at once")
    timer = PhaseTimer(SystemClock(), say)
    outcome: Outcome | None = None
    try:
        run.stop(STOP_DEADLINE_S, timer.show)
        outcome = run.result()
    except KeyboardInterrupt:
        run.stop(0.0)
    say(f"stopped in {timer.elapsed_s:.1f} s ({timer.summary()})")
    if not tell_failure(run.folder, outcome):
        from asyncrl.cli.run.ending import next_start_of

        say(next_start_of(run.folder))


def tell_failure(folder: RunDir, outcome: Outcome | None) -> bool:
    """Print to stderr what a run failed of, if it did, perhaps while it was being stopped; return whether."""
    if outcome is None or outcome.state != RunState.FAILED:
        return False
    from asyncrl.cli.run.ending import paragraph

    say(paragraph(folder, outcome))
    return True


def report(run: Watched) -> int:
    """Print the run's figures to stdout, and a failure to stderr."""
    run.clear()
    outcome = run.result()
    if tell_failure(run.folder, outcome):
        return exits.FAILED
    print_summary(run.folder)
    say(f"the run is {outcome.state}; see {run.folder.path}")
    return exits.OK


def print_summary(folder: RunDir) -> None:
    """Print what is in the run's `summary.json`, if there is one."""
    from asyncrl.control.record.rundir import read_json

    summary = read_json(folder.summary)
    if summary:
        show(*table_of(summary))


@contextmanager
def sigterm_as_interrupt() -> Iterator[None]:
    """Let SIGTERM stop the run as Ctrl-C does, so that no wrapper leaves one behind."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


if TYPE_CHECKING:
    from asyncrl.control.record.rundir import RunDir

DEADLINE_S = 240.0


def down(folder: RunDir, deadline_s: float = DEADLINE_S) -> int:
    """Return the exit code when the run has ended and left nothing. Ctrl-C leaves it ending.

    Raises:
        DeadlineExceeded: It has not ended in time.
    """
    from asyncrl.cli.run.handle import attach

    handle = attach(folder)
    if handle is None:
        say("the run has ended")  # between being found and being asked
        return exits.OK
    say(f"ending the run in {folder.path}")
    timer = PhaseTimer(SystemClock(), say)
    if not handle.await_end(deadline_s, timer.show):
        hint = f"See {folder.path / 'logs'}, then end process {handle.pid}"
        raise DeadlineExceeded(f"the run did not end within {deadline_s:g} s", hint=hint)
    handle.clear()
    say(f"the run has ended after {timer.elapsed_s:.1f} s ({timer.summary()})")
    return exits.FAILED if tell_failure(folder, handle.result()) else exits.OK
