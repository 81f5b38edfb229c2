"""Wait chain of a run, and the detection of a stall."""

from __future__ import annotations

from typing import Any

import pytest

from asyncrl.control.diagnosis.waits import waiting_edges
from asyncrl.control.diagnosis.watchdog import AT_LEAST_S, FIRST_STEP_S, Stall, Watchdog
from tests.statuses import statuses_of

WELL: dict[str, dict[str, Any]] = {
    "learner.0": {"state": "READY", "step": 7},
    "buffer.0": {"state": "READY", "stored_groups": 0, "leases": {}, "pending": {}},
    "weight_sync.0": {"state": "READY"},
    "publisher.0": {"state": "READY"},
    "receiver.0": {"state": "READY"},
    "rollout.0": {"state": "READY", "step": 7},
}


def ends_at(changes: dict[str, dict[str, Any]]) -> tuple[str, str, str]:
    """Return the last edge when a well run has these changes."""
    statuses = {name: {**WELL.get(name, {}), **changes.get(name, {})} for name in {**WELL, **changes}}
    edge = waiting_edges(statuses_of(statuses), groups_per_step=4)[-1]
    return edge.waiter, edge.whom, edge.why


@pytest.mark.parametrize(
    ("changes", "edge"),
    [
        ({"learner.0": {"state": "DEAD"}}, ("the run", "learner.0", "it is DEAD")),
        ({"buffer.0": {"state": "SILENT"}}, ("learner.0", "buffer.0", "it is SILENT")),
        (
            {"buffer.0": {"pending": {"reserved": 4}}},
            ("the run", "learner.0", "it has 4 groups to train on, and is not done"),
        ),
        ({"buffer.0": {"leases": {"rollout.0": 3}}}, ("buffer.0", "rollout.0", "it holds 3 groups")),
        ({"rollout.0": {"state": "STARTING"}}, ("buffer.0", "rollout.0", "it is STARTING")),
        (
            {"rollout.0": {"state": "SYNCING"}, "publisher.0": {"state": "DEAD"}},
            (
                "rollout.0",
                "publisher.0",
                "it has no weights that it may serve, and publisher.0 is DEAD",
            ),
        ),
        (
            {"rollout.0": {"step": 2}, "publisher.1": {"state": "STARTING"}},
            ("rollout.0", "publisher.1", "it serves step 2, and publisher.1 is STARTING"),
        ),
        ({"rollout.0": {"step": 2}}, ("rollout.0", "weight_sync.0", "it serves step 2")),
        ({}, ("rollout.0", "buffer.0", "it is granted no lease")),
    ],
)
def test_the_one_that_does_not_move_is_named(
    changes: dict[str, dict[str, Any]], edge: tuple[str, str, str]
) -> None:
    assert ends_at(changes) == edge


def test_the_whole_way_to_it_is_named_too_and_who_stands_by_is_left_out() -> None:
    statuses = {**WELL, "rollout.1": {"state": "SYNCING", "standby": True}}
    statuses["buffer.0"] = {**WELL["buffer.0"], "leases": {"rollout.0": 2}}
    assert [str(edge) for edge in waiting_edges(statuses_of(statuses), 4)] == [
        "learner.0 waits for buffer.0: 0 of 4 groups are stored",
        "buffer.0 waits for rollout.0: it holds 2 groups",
    ]
    without = {name: status for name, status in WELL.items() if name != "rollout.0"}
    assert waiting_edges(statuses_of(without), 4)[-1].why == "there is no replica"


class Watched:
    """A run whose learner takes steps when it is told to."""

    def __init__(self) -> None:
        self.dog = Watchdog(4)
        self.now = 0.0
        self.step = 0

    def look(self, seconds: float, *, steps: int = 0, is_meant_to_train: bool = True) -> Stall | None:
        self.now += seconds
        self.step += steps
        statuses = {**WELL, "learner.0": {"state": "READY", "step": self.step}}
        return self.dog.look(self.now, statuses_of(statuses), is_meant_to_train=is_meant_to_train)


def test_a_stall_is_told_after_ten_usual_steps_and_again_when_it_has_doubled() -> None:
    run = Watched()
    for _ in range(5):
        assert run.look(20.0, steps=1) is None
    assert run.look(199.0) is None
    stall = run.look(2.0)
    assert stall is not None and run.dog.is_stalled
    assert stall.text.startswith("no step was finished for 201 s, usually one takes 20.0 s: learner.0 waits")
    assert stall.who == "weight_sync.0" or stall.who == "buffer.0"
    assert run.look(100.0) is None
    assert run.look(120.0) is not None
    run.look(1.0, steps=1)
    assert not run.dog.is_stalled


def test_quick_steps_do_not_make_it_impatient() -> None:
    run = Watched()
    for _ in range(5):
        run.look(0.1, steps=1)
    assert run.look(AT_LEAST_S - 1.0) is None
    assert run.look(2.0) is not None


def test_the_first_step_may_take_long_but_not_for_ever() -> None:
    run = Watched()
    run.look(0.0)
    assert run.look(FIRST_STEP_S - 1.0) is None
    assert run.look(2.0) is not None


def test_a_run_that_is_not_to_train_does_not_stall_nor_count_the_time() -> None:
    run = Watched()
    for _ in range(3):
        run.look(1.0, steps=1)
    for _ in range(5):
        assert run.look(100.0, is_meant_to_train=False) is None
    assert run.look(1.0) is None
    assert run.look(AT_LEAST_S - 1.0) is None


def test_steps_that_are_taken_again_are_no_measure_of_a_step() -> None:
    run = Watched()
    for _ in range(2):
        run.look(8.0, steps=1)
    run.look(50.0, steps=-2)
    assert run.dog.limit_s == 80.0
