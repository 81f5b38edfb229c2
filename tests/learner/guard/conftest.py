"""Cluster of weight-sync services, against which the guard's tests run a learner."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.weight_sync.cluster import Cluster, running_cluster


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with running_cluster() as started:
        yield started
