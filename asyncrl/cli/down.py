"""`asyncrl down`: ask a run to end and wait until it has."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncrl.cli.exits import say
from asyncrl.clock import Clock, SystemClock
from asyncrl.errors import DeadlineExceeded

if TYPE_CHECKING:
    from asyncrl.control.api.client import RunClient

DEADLINE_S = 240.0
POLL_S = 0.2


def down(client: RunClient, clock: Clock | None = None) -> None:
    """Return when the run has ended.

    Raises:
        DeadlineExceeded: It has not, in 240 s.
    """
    from asyncrl.control.api.client import NotRunning
    from asyncrl.control.launch.processes import is_alive
    from asyncrl.control.record.rundir import read_json

    clock = clock or SystemClock()
    end = clock.now() + DEADLINE_S
    live = read_json(client.folder.live) or {}
    try:
        client.stop()
    except NotRunning:
        pass  # it has ended between being found and being asked
    say(f"ending the run in {client.folder.path}")
    while is_alive(client.pid, live.get("run_id", "")):
        if clock.now() >= end:
            hint = f"See {client.folder.path / 'logs'}, then end process {client.pid}"
            raise DeadlineExceeded(f"the run did not end within {DEADLINE_S:g} s", hint=hint)
        clock.sleep(POLL_S)
    say("the run has ended")
