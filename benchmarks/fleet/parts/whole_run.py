"""A whole run of a configuration: started as `asyncrl up` starts it, and awaited until it ends by itself."""

from __future__ import annotations

import time
from collections.abc import Callable

from asyncrl.cli.run import start as run
from asyncrl.control.record.rundir import RunDir
from asyncrl.core.config.tree import Config
from asyncrl.core.errors import ServiceFailed

DEADLINE_S, STOP_S, POLL_S = 1200.0, 60.0, 0.5


def run_to_end(config: Config, say: Callable[[str], None]) -> RunDir:
    """Run `config` to its end and return its folder.

    Raises:
        ServiceFailed: The run failed, or was not over after `DEADLINE_S` seconds.
    """
    handle = run.start(config, say)
    end_s = time.monotonic() + DEADLINE_S
    try:
        while not handle.is_over:
            if time.monotonic() > end_s:
                raise ServiceFailed(f"the run in {handle.folder.path} was not over after {DEADLINE_S:g} s")
            time.sleep(POLL_S)
    finally:
        handle.stop(STOP_S)
    outcome = handle.result()
    if outcome.state != "finished":
        raise ServiceFailed(f"the run '{config.run.name}' is {outcome.state}: {outcome.error}")
    return handle.folder
