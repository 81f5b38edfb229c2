"""A replica whose restarts are spent, as users see it: statuses, events, and the way back."""

from __future__ import annotations

from pathlib import Path

from asyncrl.control.diagnosis.obstacles import gather
from asyncrl.control.fleet.messages import Heard
from asyncrl.control.reconciler.status_events import event_of
from asyncrl.control.record.outcome import Outcome
from asyncrl.core.states import RunState
from tests.control.supervisor.test_repair import Run
from tests.statuses import status_of

STOPPED = Outcome(state=RunState.STOPPED)


def test_a_replica_that_dies_once_too_often_is_retired_and_shown_so_until_it_is_scaled_back(
    tmp_path: Path,
) -> None:
    run = Run(tmp_path)
    run.begin()
    for _ in range(6):
        run.launcher.gone.add("receiver.1")
        statuses = run.pulse()
        run.pulse(9.0)
        run.pulse()
    assert run.upkeep.given_up is None and run.upkeep.is_degraded and run.upkeep.num_ready == 1
    shown = statuses["rollout.1"]
    assert (shown.state, shown.error) == ("RETIRED", "gone: it was killed")
    assert [one.service for one in gather(statuses)] == ["receiver.1", "rollout.1"]
    assert not any(one.blocks for one in gather(statuses)), "the other one works"
    (told,) = [one for one in gather(statuses) if one.service == "rollout.1"]
    assert told.reason == (
        "gone: it was killed; retired, with no restarts left; started again in 120 s, "
        "or by 'asyncrl scale rollout=2'"
    )
    run.launcher.gone.add("rollout.0")
    assert all(one.blocks for one in gather(run.pulse())), "no replica works"
    run.pulse()
    facts = run.upkeep.report.facts("rollout.1")
    assert (facts.stage, facts.reason) == ("RETIRED", "gone: it was killed")
    assert facts.back_in_s is not None and 100.0 < facts.back_in_s <= 120.0
    (event,) = [event for event in run.events.newest(99) if event["kind"] == "retire"]
    assert (event["service"], event["back_in_s"]) == ("rollout.1", 120.0)
    assert event["text"].startswith("receiver.1 gone: it was killed; it was restarted 5 times already")
    run.launcher.started.clear()
    assert run.upkeep.scale(2).started == ("rollout.1",)
    run.pulse()
    assert run.launcher.started == ["rollout.1", "receiver.1"]
    assert run.upkeep.report.facts("rollout.1").reason == "" and not run.upkeep.is_degraded
    run.upkeep.stop(5.0, STOPPED)


def test_what_an_engine_has_done_is_its_answers_and_what_others_have_done_their_step() -> None:
    replica, learner = status_of("rollout.0", step=7, trajectories=90), status_of("learner.0", step=7)
    assert event_of("rollout.0", replica) == Heard("rollout.0", "READY", 90)
    assert event_of("learner.0", learner) == Heard("learner.0", "READY", 7)


def test_a_back_off_goes_on_under_the_next_supervisor_where_it_was(tmp_path: Path) -> None:
    first = Run(tmp_path)
    first.begin()
    for _ in range(6):
        first.launcher.gone.add("receiver.1")
        first.pulse()
        first.pulse(9.0)
        first.pulse()
    for _ in range(10):
        first.pulse(5.0)
    second = Run(tmp_path, first.launcher)
    second.upkeep.begin(2, 0)
    second.pulse()
    back_in_s = second.upkeep.report.facts("rollout.1").back_in_s
    assert back_in_s is not None and 50.0 < back_in_s < 75.0
    second.upkeep.stop(5.0, STOPPED)
