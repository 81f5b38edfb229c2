"""Services of weight sync that have nothing to do sleep."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from tests.runtimes import CountingRuntime
from tests.threads import in_thread
from weight_sync.coordination.coordinator import CoordinatorService
from weight_sync.memory.pool import SegmentPool
from weight_sync.memory.staging_area import StagingArea
from weight_sync.protocol.protocol import Coordination
from weight_sync.protocol.rounds import Timing
from weight_sync.publisher import Endpoint, PublisherService
from weight_sync.receiving.receiver import ReceiverService

WATCHED_S, WAIT_S = 5.0, 30.0
TIMING = Timing.of(60.0)
"""As in a run: a peer polls once a second."""


def make_transport(group: Any) -> Any:
    raise AssertionError("nothing is sent")


def test_idle_services_wake_for_their_polls_and_their_guards_alone(tmp_path: Path) -> None:
    """Per second: the peers' polls (one each, answered later), and looks at silence and memory."""
    coordinators, publishers, receivers = (CountingRuntime() for _ in range(3))
    prefix = f"asyncrl-test-{tmp_path.name}-"
    coordinator = CoordinatorService(Coordination(TIMING, token=1), coordinators)
    address = coordinator.status().address
    pool = SegmentPool(f"{prefix}publisher-", "1")
    endpoint = Endpoint("127.0.0.1", 1)
    publisher = PublisherService(address, "1", pool, endpoint, make_transport, publishers)
    staging = StagingArea(f"{prefix}receiver.0-", "1")
    receiver = ReceiverService(address, "receiver.0", "1", staging, make_transport, receivers, lost_s=4.0)
    with in_thread(coordinator.run), in_thread(publisher.run), in_thread(receiver.run):
        end = time.monotonic() + WAIT_S
        while "receiver.0" not in coordinator.status().members:
            assert time.monotonic() < end
            time.sleep(0.05)
        time.sleep(2.0)
        began = time.monotonic()
        with coordinators.counting() as at_coordinator, publishers.counting() as at_publisher:
            with receivers.counting() as at_receiver:
                time.sleep(WATCHED_S)
        watched_s = time.monotonic() - began
    print(at_coordinator, at_publisher, at_receiver)
    assert 0 < at_coordinator.total() <= 12 * watched_s, at_coordinator
    assert 0 < at_publisher.total() <= 3 * watched_s, at_publisher
    assert 0 < at_receiver.total() <= 4 * watched_s, at_receiver
