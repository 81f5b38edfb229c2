"""The publisher that a learner of these tests hands its weights to."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.weight_sync.cluster import Cluster, running_cluster


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with running_cluster() as started:
        yield started
