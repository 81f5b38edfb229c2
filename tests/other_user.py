"""Another user of the machine, as whom a test acts for a moment."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

NOBODY, SOMEBODY = 65_534, 1_234
"""A stranger, and an ordinary user who has a run: root may do everything, so that it meets no refusal."""


@contextmanager
def acting_as(uid: int) -> Iterator[None]:
    """Have the kernel treat this process as the user `uid`; skips the test where that is not allowed."""
    if os.geteuid() != 0:
        pytest.skip("only root can act as another user")
    os.setegid(uid)
    os.seteuid(uid)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)
