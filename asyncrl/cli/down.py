"""`asyncrl down`: ask a run to end, wait until it has, and say what took how long."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncrl.cli import exits
from asyncrl.cli.exits import say
from asyncrl.cli.watch import PhaseTimer, tell_failure
from asyncrl.core.errors import DeadlineExceeded
from asyncrl.core.runtime.clock import SystemClock

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
