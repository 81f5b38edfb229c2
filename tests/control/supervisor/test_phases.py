"""Phases of a run, in words."""

from __future__ import annotations

import pytest

from asyncrl.control.phases import ANSWERS_WAIT, phase_of
from asyncrl.core.states import RunState
from tests.statuses import statuses_of

LEARNER = {"state": "READY", "step": 100, "resumed_step": 100}
READY = {"state": "READY"}
SAMPLED = "the first batch is sampled"
DROPPED = f"{SAMPLED}; groups are dropped (zero_variance), see 'asyncrl inspect rollouts --dropped'"
UP = {"buffer.0": {"state": "READY"}, "learner.0": LEARNER, "rollout.0": {"state": "READY"}}


@pytest.mark.parametrize(
    ("statuses", "phase"),
    [
        ({}, "starting the services"),
        ({**UP, "buffer.0": {"state": "STARTING"}}, "the buffer reads its journal"),
        ({**UP, "learner.0": {"state": "STARTING"}}, "the learner loads its weights"),
        (
            {**UP, "learner.0": {"state": "STARTING"}, "rollout.1": {"state": "STARTING"}},
            "the learner loads its weights, 1 of 2 engines load and compile",
        ),
        ({**UP, "learner.0": {"state": "SILENT"}}, "the learner loads its weights"),
        ({**UP, "rollout.0": {"state": "SYNCING"}}, "the first weights go to the replicas"),
        (UP, SAMPLED),
        ({**UP, "rollout.0": {**READY, "in_flight_groups": 2, "in_flight_requests": 1}}, SAMPLED),
        ({**UP, "rollout.0": {**READY, "in_flight_groups": 2, "in_flight_requests": 0}}, ANSWERS_WAIT),
        ({**UP, "buffer.0": {**READY, "dropped": {"zero_variance": 9, "data_error": 0}}}, DROPPED),
        ({**UP, "buffer.0": {**READY, "dropped": {"zero_variance": 9}, "trained": 1}}, SAMPLED),
        ({**UP, "learner.0": {**LEARNER, "step": 101}}, ""),
        (
            {"learner.0": {**LEARNER, "step": 9, "resumed_step": 0}, "rollout.0": {"state": "STARTING"}},
            "",
        ),
        (
            {
                "learner.0": {"state": "ENDED", "step": 101, "resumed_step": 100},
                "buffer.0": {"state": "READY", "evaluations_pending": 3},
            },
            "the last evaluation",
        ),
    ],
)
def test_each_phase_of_a_start_has_words_and_training_has_none(statuses: dict, phase: str) -> None:  # type: ignore[type-arg]
    assert phase_of(RunState.RUNNING, statuses_of(statuses)) == phase
    assert phase_of(RunState.STARTING, statuses_of(statuses)) == phase


def test_a_run_that_stops_first_writes_a_checkpoint_and_then_ends_its_services() -> None:
    saving = "the learner ends its step and writes a checkpoint"
    assert phase_of(RunState.STOPPING, statuses_of(UP), is_saving=True) == saving
    for state in ("ENDED", "SILENT", "READY"):  # whatever a service last said, it does not begin again
        ended = statuses_of({**UP, "learner.0": {"state": state}})
        assert phase_of(RunState.STOPPING, ended) == "ending the services"
    assert phase_of(RunState.FINISHED, statuses_of(UP)) == ""
