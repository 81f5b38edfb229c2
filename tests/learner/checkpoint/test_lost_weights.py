"""A publisher that lost the newest weights gets them again, though nobody trains meanwhile."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.learner.guard.guarded_run import Faults, running
from tests.weight_sync.cluster import Cluster, running_cluster
from weight_sync.memory import segments

NUM_STEPS, LOST_AT = 3, 1


@dataclass
class Losing:
    """The leader's way to the buffer; as it asks for the batch of `LOST_AT`, the publisher's host is lost."""

    client: Any
    cluster: Cluster
    has_lost: bool = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.client, name)

    def reserve(self, step: int, *given: Any, **named: Any) -> Any:
        if step != LOST_AT or self.has_lost:
            return self.client.reserve(step, *given, **named)
        self.has_lost = True
        self.cluster.publisher.kill()
        segments.unlink_all(self.cluster.shm_prefix)
        self.cluster.start("publisher.0")
        return None  # replicas wait for the weights, so that no batch is complete


def test_weights_that_the_publisher_has_lost_are_published_again(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sections = {"learner": {"steps": NUM_STEPS}, "checkpoint": {"every_steps": 10}}
    sockets = tmp_path / "s"
    sockets.mkdir()
    with running_cluster(services=("weight_sync.0", "publisher.0"), socket_dir=sockets) as cluster:
        faults = Faults(wrap=lambda client: Losing(client, cluster))
        with running(model, cluster, tmp_path, faults, {}, **sections) as run:
            run.go()
            book = run.store.ledger.state.versions
        assert [*map(book.step_of, range(1, book.last_number + 1))] == [0, 1, 1, 2, 3]
        assert cluster.publisher.status().version == (5, 3)
    assert "the publisher has lost the weights of step 1: they are published again" in caplog.text
