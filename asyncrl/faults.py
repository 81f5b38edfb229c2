"""Named points at which a test can kill the process, exactly and not by luck of timing.

`ASYNCRL_FAULT=learner.updated@3` kills the process with SIGKILL when it passes the point
`learner.updated` at step 3; without `@3`, when it first passes the point.
"""

from __future__ import annotations

import os
import signal

VARIABLE = "ASYNCRL_FAULT"


def is_wanted(name: str, step: int | None = None) -> bool:
    """Tell whether the environment asks for the death of this process here."""
    wanted = os.environ.get(VARIABLE)
    return wanted is not None and wanted in (name, f"{name}@{step}")


def fault_point(name: str, step: int | None = None) -> None:
    """Kill this process here if the environment asks for it; do nothing otherwise."""
    if is_wanted(name, step):
        os.kill(os.getpid(), signal.SIGKILL)
