"""Plugin for `make test`: a teardown that hangs ends the run, as a test that hangs does.

pytest's own watch (`faulthandler_timeout`) and the time limit of a test both end with the first error; what
a failed test has left is taken down without any limit.
"""

from __future__ import annotations

import faulthandler
import os
from collections.abc import Generator

import pytest

_STDERR = os.dup(2)  # before anything captures it


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, object, object]:
    if limit_s := float(item.config.getini("faulthandler_timeout") or 0.0):
        faulthandler.dump_traceback_later(limit_s, exit=True, file=_STDERR)  # pytest cancels it at the end
    return (yield)
