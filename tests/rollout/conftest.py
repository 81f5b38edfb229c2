"""An event loop in a thread, for tests of the real engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.rollout.engine.engine_parts import LoopThread


@pytest.fixture(scope="module")
def loop() -> Iterator[LoopThread]:
    from tests.rollout.engine.engine_parts import LoopThread

    thread = LoopThread()
    yield thread
    thread.close()
