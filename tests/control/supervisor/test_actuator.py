"""The actuator of a run's services, where a launcher or a process refuses what it asks of them."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import pytest
from thread_launcher import ThreadLauncher

from asyncrl.control.fleet.messages import Cause, Forgo, Gone, Promote, Start
from asyncrl.control.machine.kernel import LinuxKernel
from asyncrl.control.reconciler.actuator import ServiceActuator
from asyncrl.control.record.events import EventLog
from asyncrl.control.record.rundir import RunDir
from asyncrl.control.roster import Roster, ServiceSpec
from asyncrl.core.errors import ServiceFailed
from tests.control.supervisor.test_supervisor import make_config
from tests.threads import RUNTIME


class FullLauncher(ThreadLauncher):
    """Has no room for any service."""

    def start(self, spec: ServiceSpec) -> None:
        raise ServiceFailed(f"{spec.name} finds no room")


class ScriptedKernel(LinuxKernel):
    """Has a process that no signal ends."""

    def end_service(self, run_id: str, name: str, others: Collection[int] = ()) -> list[int]:
        return [4711]


@pytest.fixture
def events(tmp_path: Path) -> EventLog:
    return EventLog(RunDir(tmp_path).events, RUNTIME)


@pytest.fixture
def actuator(tmp_path: Path, events: EventLog) -> ServiceActuator:
    roster = Roster(make_config(3), tmp_path, "abcd1234", tmp_path, "")
    return ServiceActuator(roster, FullLauncher(), events, ScriptedKernel())


def test_a_service_that_cannot_be_started_or_told_is_gone(actuator: ServiceActuator) -> None:
    gone = actuator.carry_out(Start("rollout.0"), num_restarts=1)
    assert gone == Gone("rollout.0", "failed: rollout.0 finds no room")
    gone = actuator.carry_out(Promote(1), num_restarts=0)
    assert gone is not None and (gone.name, gone.cause) == ("rollout.1", Cause.DEATH)


def test_a_replica_that_the_run_goes_on_without_is_an_event(
    actuator: ServiceActuator, events: EventLog
) -> None:
    assert actuator.carry_out(Forgo("rollout.2", "no GPU is free"), num_restarts=0) is None
    (event,) = events.newest(10)
    assert (event["kind"], event["service"], event["text"]) == ("scale", "rollout.2", "no GPU is free")


def test_processes_that_do_not_die_are_named(
    actuator: ServiceActuator, caplog: pytest.LogCaptureFixture
) -> None:
    actuator.kill("learner.0")
    assert "learner.0: processes [4711] do not die" in caplog.text
