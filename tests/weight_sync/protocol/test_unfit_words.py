"""Commands, orders, calls and reports that a service of weight sync can do nothing with."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from asyncrl.core.errors import ConfigError, SyncError, WireError
from asyncrl.core.runtime.threads import ThreadEvent
from asyncrl.core.service_command import Drain, Pause, Standing
from asyncrl.core.states import ServiceState
from tests.runtimes import ManualRuntime
from tests.weight_sync.protocol.test_late_calls import receiver
from tests.weight_sync.protocol.test_turns import Asked, serving
from tests.weight_sync.sides import manifest_of
from weight_sync import coordinator_session
from weight_sync.coordinator_session import Reset
from weight_sync.memory.pool import SegmentPool
from weight_sync.memory.staging_area import Copy
from weight_sync.protocol.lanes.stripes import WHOLE
from weight_sync.protocol.members import PublisherInfo
from weight_sync.protocol.messages import Instruction, MapCopy, Offer, Transfer, Withdraw
from weight_sync.publisher import SUPERSEDED, Endpoint, PublisherService
from weight_sync.receiving.receiver import ReceiverService
from weight_sync.transfer_executor import TransferOrder

__all__ = ["receiver"]
TRANSFER = Transfer(
    round=7,
    number=3,
    membership=1,
    rank=0,
    world=2,
    store_host="",
    store_port=0,
    live=(),
    deadline_s=1.0,
    base=2,
)


class Strange(Instruction, frozen=True):
    """An order of a newer coordinator."""

    kind = "strange"


@pytest.fixture
def publisher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PublisherService]:
    """One that no thread serves: each call is handled here."""
    monkeypatch.setattr(coordinator_session, "CALL_DEADLINE_S", 0.1)  # nobody answers its hello
    pool = SegmentPool(f"asyncrl-{uuid.uuid4().hex[:8]}-publisher-", "1")
    nobody, here = f"ipc://{tmp_path}/nobody", f"ipc://{tmp_path}/p"
    endpoint, runtime = Endpoint("", 0), ManualRuntime(100.0)
    found = PublisherService(nobody, "1", pool, endpoint, _make_none, runtime, bind=here)
    yield found
    over = ThreadEvent()
    over.set()
    found.run(over)


def _make_none() -> None:
    raise AssertionError("nothing is transferred")


def test_a_service_refuses_commands_that_are_none_for_it(
    tmp_path: Path, publisher: PublisherService, receiver: ReceiverService
) -> None:
    with serving(tmp_path) as (coordinator, _, _):
        for service in (coordinator, publisher, receiver):
            with pytest.raises(ConfigError, match="knows no command 'pause'"):
                service.command(Pause())
    assert receiver.command(Drain()) == Standing(ServiceState.DRAINING)


def test_a_publisher_counts_an_order_that_is_none_for_it(publisher: PublisherService) -> None:
    publisher._obey(Withdraw())
    assert publisher.counters["unknown_orders"] == 1


def test_a_publisher_gives_up_its_rounds_before_it_says_hello_again(publisher: PublisherService) -> None:
    publisher._rounds.begin(5, needs_offer=False)
    publisher._obey(Reset())
    assert publisher._rounds.open_rounds == []


def test_a_publisher_that_is_told_twice_to_send_does_so_once(publisher: PublisherService) -> None:
    publisher._obey(TRANSFER)
    publisher._obey(TRANSFER)
    assert publisher.counters[SUPERSEDED] == 1, "it has no such version"


def test_a_commit_without_a_manifest_is_refused(publisher: PublisherService) -> None:
    with pytest.raises(WireError, match="without a manifest"):
        publisher.handle(Asked("commit", token=1, path="/dev/shm/none"))


def test_a_publisher_that_finds_no_room_says_so_once_and_looks_no_more(
    publisher: PublisherService, monkeypatch: pytest.MonkeyPatch
) -> None:
    def find_none() -> bool:
        raise SyncError("no room for 4096 bytes in /dev/shm")

    monkeypatch.setattr(publisher._pool, "prepare", find_none)
    for _ in range(2):
        publisher.tick(100.0)
    assert publisher.counters["no_room"] == 1


def test_a_receiver_refuses_an_order_that_is_none_for_it(receiver: ReceiverService) -> None:
    with pytest.raises(WireError, match="a receiver does not take the order 'strange'"):
        receiver._carry_out(Strange(), b"")
    receiver._obey(Strange(), b"")
    assert receiver.counters["refused_orders"] == 1, "and it goes on"


def test_an_offer_behind_its_abort_is_not_accepted(receiver: ReceiverService) -> None:
    receiver._rounds.abort(9)
    receiver._carry_out(Offer(round=9, number=1), b"")
    receiver._carry_out(MapCopy(round=9, number=1, path="/dev/shm/none"), b"")
    assert receiver._session._reports.empty()


def test_a_receiver_that_lacks_the_base_of_differences_counts_that(receiver: ReceiverService) -> None:
    manifest = manifest_of(3)
    copy = Copy(manifest, "", torch.zeros(manifest.total_bytes, dtype=torch.uint8))
    receiver._rounds._carry_bucket(TransferOrder.of(TRANSFER), copy, WHOLE)
    assert receiver.counters["missing_bases"] == 1


def test_a_version_that_is_published_without_a_manifest_is_refused(tmp_path: Path) -> None:
    publisher = {"name": "publisher", "incarnation": "1"}
    with serving(tmp_path) as (coordinator, coordination, clock):
        coordination.publisher_hello(PublisherInfo("1", "", 1, clock.now()), None, clock.now())
        with pytest.raises(WireError, match="without a manifest"):
            coordinator.handle(Asked("report", **publisher, event="published", fields={}, seq=1))
