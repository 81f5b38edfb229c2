"""Waiting for another thread or process, by a deadline, and telling one by a file."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

POLL_S = 0.01


def wait_for(claim: Callable[[], object], what: str = "it", deadline_s: float = 60.0) -> None:
    """Wait until `claim` holds."""
    end = time.monotonic() + deadline_s
    while not claim():
        assert time.monotonic() < end, f"waited {deadline_s:g} s for {what}"
        time.sleep(POLL_S)


def tell(file: Path, text: str) -> None:
    """Let `file` appear with its text: who waits for it never reads half of it."""
    new = file.with_name(f"{file.name}.new")
    new.write_text(text)
    new.rename(file)
