"""Calls of a replica that come behind its later ones change nothing at its receiver."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from asyncrl.core.runtime.threads import ThreadEvent
from tests.runtimes import ManualRuntime
from tests.weight_sync.protocol.test_turns import Asked
from weight_sync import coordinator_session
from weight_sync.memory.staging_area import StagingArea
from weight_sync.protocol.messages import Withdraw
from weight_sync.receiving.receiver import ReceiverService


@pytest.fixture
def receiver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ReceiverService]:
    """One that no thread serves: each call is handled here."""
    monkeypatch.setattr(coordinator_session, "CALL_DEADLINE_S", 0.1)  # nobody answers its hello
    staging = StagingArea(f"asyncrl-test-late-{tmp_path.name}-", "a")
    nobody, here = f"ipc://{tmp_path}/nobody", f"ipc://{tmp_path}/r"
    runtime = ManualRuntime(100.0)
    found = ReceiverService(nobody, "receiver.0", "1", staging, _make_none, runtime, lost_s=60.0, bind=here)
    yield found
    over = ThreadEvent()
    over.set()
    found.run(over)


def _make_none() -> None:
    raise AssertionError("nothing is transferred")


def test_a_pin_behind_its_unpin_holds_nothing(receiver: ReceiverService) -> None:
    receiver.handle(Asked("unpin", incarnation="a", seq=2))
    receiver.handle(Asked("pin", incarnation="a", seq=1))
    receiver.end_turn()
    assert not receiver.status().pinned
    receiver.handle(Asked("pin", incarnation="a", seq=3))
    receiver.end_turn()
    assert receiver.status().pinned, "a new one is heard"


def test_a_load_that_is_told_behind_a_later_one_is_not_believed(receiver: ReceiverService) -> None:
    receiver.handle(Asked("loaded", incarnation="a", seq=4, number=1, ok=True, error=""))
    receiver.handle(Asked("loaded", incarnation="a", seq=2, number=1, ok=False, error="half loaded"))
    receiver.end_turn()
    status = receiver.status()
    assert status.version == 1 and status.counters["late_calls"] == 1


def test_a_receiver_whose_copy_is_withdrawn_says_that_no_replica_attends_until_one_polls(
    receiver: ReceiverService,
) -> None:
    receiver.handle(Asked("next_staged", incarnation="a", serving=0, wait_s=5.0))
    assert receiver._introduce().hello.attended
    receiver._obey(Withdraw(), b"")
    assert not receiver._introduce().hello.attended
    receiver.handle(Asked("next_staged", incarnation="a", serving=0, wait_s=5.0))
    assert receiver._introduce().hello.attended


def test_a_receiver_says_which_version_its_engine_holds_itself_until_that_fails_to_load(
    receiver: ReceiverService,
) -> None:
    receiver._staging.direct_base = 7
    assert receiver._introduce().hello.direct_base == 7
    receiver.handle(Asked("loaded", incarnation="a", seq=1, number=7, ok=False, error="half loaded"))
    assert receiver._introduce().hello.direct_base == 0


def test_a_poll_that_finds_no_copy_is_answered_when_its_wait_is_over(receiver: ReceiverService) -> None:
    poll = Asked("next_staged", incarnation="a", serving=0, wait_s=5.0)
    receiver.handle(poll)
    assert receiver._replica.poll_ends_at == 105.0
    receiver.tick(104.0)
    assert poll.answers == []
    receiver._replica._clock.advance(5.0)  # type: ignore[attr-defined]
    receiver.tick(105.0)
    ((answer, _),) = poll.answers
    assert answer["path"] == "" and receiver.wake_at() > 105.0
