"""Meaning of a service's status for the fleet."""

from __future__ import annotations

from msgspec.structs import replace

from asyncrl.control.fleet.messages import Cause, Gone
from asyncrl.control.reconciler.status_events import event_of, events_of
from tests.statuses import status_of, statuses_of


def test_what_cannot_be_cured_is_told_first_and_a_receiver_after_its_engine() -> None:
    gone = {"state": "DEAD", "error": "it was killed"}
    statuses = {
        "publisher.0": {"state": "READY"},
        "receiver.1": gone,
        "rollout.1": {"state": "FAILED", "error": "ServiceFailed: no receiver"},
        "buffer.0": gone,
        "learner.0": {"state": "FAILED", "error": "UnstableTraining: nan"},
    }
    order = [getattr(event, "name", "") for event in events_of("x", statuses_of(statuses))]
    assert order == ["learner.0", "buffer.0", "rollout.1", "receiver.1", "publisher.0"]


def test_an_error_of_the_configuration_is_never_tried_again() -> None:
    kinds = ["ConfigError", "ServiceFailed"]
    failed = status_of("rollout.0", state="FAILED", error="ServiceFailed: x", error_kinds=kinds)
    assert event_of("rollout.0", failed) == Gone("rollout.0", "failed: ServiceFailed: x", Cause.FINAL)
    failed = replace(failed, error_kinds=("ServiceFailed",))
    assert event_of("rollout.0", failed) == Gone("rollout.0", "failed: ServiceFailed: x", Cause.ERROR)
