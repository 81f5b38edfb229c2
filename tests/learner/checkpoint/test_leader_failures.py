"""A leader whose buffer, publisher or disk fails."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from asyncrl.core.errors import CheckpointError, ConfigError, DeadlineExceeded, LedgerError
from learner.batch_fetcher import BatchFetcher
from learner.leader.leader import Leader
from learner.orders import Publish, StepOutcome, Wait
from tests.control.supervisor.test_operations import Driver, buffer_of, clients_of


@pytest.fixture
def leader(tmp_path: Path) -> Iterator[Leader]:
    """One that is about to publish the weights of the start."""
    with buffer_of(tmp_path) as service, clients_of(service) as (learner, _):
        driver = Driver(learner, tmp_path)
        next(driver.orders)
        yield driver.leader


def refusing(error: Exception) -> Any:
    """A client whose buffer refuses."""

    def refuse(*_: Any, **__: Any) -> None:
        raise error

    return SimpleNamespace(resume=refuse, reserve=refuse)


def test_a_way_back_that_the_journal_does_not_know_is_said_with_what_is_torn(leader: Leader) -> None:
    leader._client = refusing(LedgerError("no committed checkpoint of step 0"))
    with pytest.raises(LedgerError):
        leader._resume(0, [])
    with pytest.raises(ConfigError, match="can be loaded: step 3 is torn"):
        leader._resume(0, ["step 3 is torn"])


def test_a_buffer_that_stays_away_longer_than_a_start_takes_ends_the_run(leader: Leader) -> None:
    batches = leader._batches
    batches._client = refusing(DeadlineExceeded("no answer"))
    assert leader._next_batch() == Wait()
    batches._away_since -= leader._config.launcher.start_deadline_s
    with pytest.raises(DeadlineExceeded):
        leader._next_batch()


def test_weights_that_the_publisher_did_not_take_stay_due(leader: Leader) -> None:
    assert [type(order) for order in leader._publish()] == [Publish]
    assert leader.publishing._rules.is_due(0)


def test_last_weights_that_find_no_buffer_are_told(
    leader: Leader, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("learner.leader.publishing.LAST_PUBLISH_S", 0.0)
    assert [type(order) for order in leader.publishing.publish_last(0, [])] == [Publish]  # nobody takes them
    assert "the weights of step 0 found no free buffer in 0 s" in caplog.text


def test_a_checkpoint_that_is_not_written_in_time_is_an_error(
    leader: Leader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("learner.leader.checkpoints.WRITE_DEADLINE_S", 0.01)
    goes_on = threading.Event()
    writing = threading.Thread(target=goes_on.wait)
    writing.start()
    monkeypatch.setattr(leader.checkpoints.keeper, "_thread", writing)
    try:
        with pytest.raises(CheckpointError, match=r"not written within 0\.01 s"):
            leader.checkpoints.finish()
    finally:
        goes_on.set()
        writing.join()


def test_a_checkpoint_that_finds_no_room_is_put_off(leader: Leader, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> bool:
        raise CheckpointError("the disk is full")

    monkeypatch.setattr(leader.checkpoints.keeper, "has_room", refuse)
    assert list(leader.checkpoints.write_if(True, 0)) == []
    assert str(leader.checkpoints._unwritten) == "the disk is full"


def test_a_rollback_without_any_checkpoint_ends_the_run(leader: Leader) -> None:
    with pytest.raises(type(leader._watch.no_checkpoint(3)), match="checkpoint"):
        list(leader._roll_back(3, 2))


def test_a_rank_that_gets_no_group_asks_for_none() -> None:
    assert BatchFetcher(refusing(LedgerError("no ticket is reserved"))).fetch(1, []) == []


def test_a_group_that_changed_no_weights_is_dropped_for_the_first_reason_that_it_met() -> None:
    outcome = StepOutcome(stale_tickets=[1], oversized_tickets=[2], refused_tickets=[2, 3, 1])
    assert dict(outcome.dropped) == {1: "stale", 2: "oversized", 3: "guard"}
    assert outcome.num_untrainable == 2
