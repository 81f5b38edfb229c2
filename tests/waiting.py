"""Waiting for another thread or process: by a deadline, never for ever."""

from __future__ import annotations

import time
from collections.abc import Callable

POLL_S = 0.01


def wait_for(claim: Callable[[], object], what: str = "it", deadline_s: float = 60.0) -> None:
    """Wait until `claim` holds."""
    end = time.monotonic() + deadline_s
    while not claim():
        assert time.monotonic() < end, f"waited {deadline_s:g} s for {what}"
        time.sleep(POLL_S)
