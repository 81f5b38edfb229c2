"""A prefix of shared-memory segments for a test of its own."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest

from weight_sync.memory import segments


@pytest.fixture
def prefix() -> Iterator[str]:
    made = f"asyncrl-{uuid.uuid4().hex[:8]}-"
    yield made
    segments.unlink_all(made)
