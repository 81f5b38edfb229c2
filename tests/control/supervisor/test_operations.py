"""Operator commands on a live run and their effects: with a scripted fleet, a real buffer, a real leader."""

from __future__ import annotations

import contextlib
import itertools
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncrl.buffer.client import LearnerClient
from asyncrl.buffer.composition import build
from asyncrl.buffer.service import BufferService
from asyncrl.control.operations import Operations
from asyncrl.control.record.events import EventLog
from asyncrl.control.record.rundir import RunDir, read_json, write_json
from asyncrl.control.roster import Roster
from asyncrl.core.config.tree import Config
from asyncrl.core.errors import ConfigError, DeadlineExceeded, Refused, ServiceFailed
from asyncrl.core.experience import encode_group
from asyncrl.core.rpc import Client
from asyncrl.core.runtime.threads import ThreadEvent
from asyncrl.core.service import ServiceContext, read_paused
from asyncrl.core.service_command import Drain, Pause, PauseState, Unpause
from asyncrl.core.staleness import PolicyVersion
from learner.checkpoint import CheckpointStore
from learner.checkpoint.pieces import whole
from learner.checkpoint.snapshot import KINDS, PieceState, Snapshot
from learner.checkpoint.writer import BackgroundWriter
from learner.leader.leader import Leader
from learner.orders import Checkpoint, Order, Publish, Train, Wait
from tests.buffer.parts import make_group
from tests.control.scripted_fleet import ScriptedFleet
from tests.statuses import statuses_of
from tests.threads import RUNTIME

RUN_ID = "abcd1234"


def make_config(**sections: Any) -> Config:
    values = {"model": {"path": "none"}, "data": {"train": "none"}, "reward": {"fn": "gsm8k"}}
    return Config.model_validate(values | {"rollout": {"cpus": 0.0}} | sections)


@pytest.fixture
def fleet() -> ScriptedFleet:
    return ScriptedFleet()


@pytest.fixture
def operations(fleet: ScriptedFleet, tmp_path: Path) -> Operations:
    return operate(make_config(), tmp_path, fleet)


def operate(config: Config, folder: Path, fleet: ScriptedFleet) -> Operations:
    roster = Roster(config, folder, RUN_ID, folder, "")
    return Operations(
        roster, fleet, fleet.lifecycle, EventLog(folder / "events.jsonl", RUNTIME), RUNTIME.lock()
    )


def perform(operations: Operations, name: str, body: dict[str, Any] | None = None) -> Any:
    """Ask as over HTTP, and return the JSON of the answer."""
    return json.loads(json.dumps(operations.routes()[f"POST /{name}"](body or {})))


@pytest.mark.parametrize(
    ("name", "args", "answer", "told"),
    [
        ("scale", {"replicas": 0}, {"replicas": 0, "started": [], "draining": []}, ("fleet", "scale 0")),
        (
            *("drain", {"index": 2}),
            {"replicas": 2, "draining": ["rollout.2"], "started": ["rollout.3"]},
            ("fleet", "drain 2"),
        ),
        ("checkpoint", {}, {"step": 7}, ("learner.0", "checkpoint")),
        ("tighten", {"max_lag": 1}, {"max_lag": 1}, ("buffer.0", "tighten")),
        ("stop", {}, {"state": "stopping"}, ("fleet", "finish learner")),
    ],
)
def test_a_command_goes_to_the_one_who_can_do_it(
    operations: Operations, fleet: ScriptedFleet, name: str, args: Any, answer: Any, told: tuple[str, str]
) -> None:
    assert perform(operations, name, args) == answer
    assert fleet.told == [told]


@pytest.mark.parametrize(
    ("name", "args", "said"),
    [
        ("scale", {"replicas": -1}, "whole number from 0, not -1"),
        ("scale", {"replicas": True}, "Expected `int`"),
        ("scale", {}, "missing required field `replicas`"),
        ("drain", {"index": 1}, r"no replica rollout.1 to drain; there are: rollout.0, rollout.2"),
        ("drain", {"index": "0"}, "Expected `int`"),
        ("tighten", {"max_lag": 5}, "from 0 to 4"),
        ("stop", {"now": True}, "unknown field `now`"),
    ],
)
def test_what_makes_no_sense_is_refused_and_nobody_is_told(
    operations: Operations, fleet: ScriptedFleet, name: str, args: Any, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        perform(operations, name, args)
    assert fleet.told == []


@pytest.mark.parametrize("name", ["scale", "drain", "pause", "unpause", "checkpoint"])
def test_a_run_that_ends_takes_no_commands_but_to_stop(
    operations: Operations, fleet: ScriptedFleet, name: str
) -> None:
    fleet.lifecycle.state = "stopping"
    with pytest.raises(Refused, match="the run is stopping"):
        perform(operations, name, {"scale": {"replicas": 1}, "drain": {"index": 0}}.get(name))
    assert (fleet.told, operations.is_paused) == ([], False)
    perform(operations, "stop", {})


def test_replicas_that_are_leaving_still_take_room(tmp_path: Path, fleet: ScriptedFleet) -> None:
    roomy = make_config(rollout={"cpus": 0.0, "gpus": 0}, learner={"cpus": 0.0})
    narrow = make_config(rollout={"cpus": 10_000.0}, learner={"cpus": 0.0})
    fleet.num_draining = 1
    with pytest.raises(Refused, match="this machine has"):
        perform(operate(narrow, tmp_path, fleet), "scale", {"replicas": 0})
    perform(operate(roomy, tmp_path, fleet), "scale", {"replicas": 0})


def test_replicas_that_stand_by_take_room_too(tmp_path: Path, fleet: ScriptedFleet) -> None:
    narrow = make_config(rollout={"cpus": 10_000.0, "standby": 1}, learner={"cpus": 0.0})
    with pytest.raises(Refused, match="this machine has"):
        perform(operate(narrow, tmp_path, fleet), "scale", {"replicas": 0})
    assert fleet.told == []


def test_a_pause_and_its_end_are_events_once_each(operations: Operations) -> None:
    for name in ("unpause", "pause", "pause", "unpause"):
        perform(operations, name)
    found = [(event["kind"], event["text"], event["paused"]) for event in operations.events.newest(9)]
    assert found == [("pause", "the run is paused", True), ("pause", "the run is unpaused", False)]


def test_a_pause_is_marked_for_services_that_cannot_be_told(
    operations: Operations, fleet: ScriptedFleet, tmp_path: Path
) -> None:
    fleet.unreachable = {"buffer.0"}
    assert perform(operations, "pause", {}) == {"paused": True, "unreached": ["buffer.0"]}
    assert fleet.told == [("learner.0", "pause")]
    assert read_paused(tmp_path) == RUN_ID and operations.is_paused
    assert ServiceContext(make_config(), "buffer.0", tmp_path, RUN_ID).is_paused
    assert not ServiceContext(make_config(), "buffer.0", tmp_path, "later").is_paused, "a new start goes on"
    fleet.unreachable = set()
    assert perform(operations, "unpause", {}) == {"paused": False, "unreached": []}
    assert not operations.is_paused and fleet.told[-1] == ("learner.0", "unpause")


def test_a_service_that_was_starting_when_the_pause_came_is_told_again(
    operations: Operations, fleet: ScriptedFleet
) -> None:
    perform(operations, "pause", {})
    fleet.told.clear()
    operations.keep_paused(statuses_of({"buffer.0": {"paused": False}, "learner.0": {"state": "STARTING"}}))
    assert fleet.told == [("buffer.0", "pause")]
    operations.keep_paused(statuses_of({"buffer.0": {"paused": True}, "learner.0": {"paused": True}}))
    assert len(fleet.told) == 1, "both are as they should be"


def test_a_checkpoint_that_was_asked_for_is_asked_for_again_until_it_is_there(
    operations: Operations, fleet: ScriptedFleet, tmp_path: Path
) -> None:
    def pulse(step: int, *known: int, state: str = "READY") -> int:
        """Return how often the learner has been asked by the end of a pulse."""
        learner = {"state": state, "step": step}
        operations.renew_pending_checkpoint(
            statuses_of({"learner.0": learner, "buffer.0": {"checkpoints": [*known]}})
        )
        return fleet.told.count(("learner.0", "checkpoint"))

    assert pulse(7) == 0, "nobody has asked for one"
    perform(operations, "checkpoint", {})  # when 7 steps are done
    assert pulse(7) == pulse(8, 5) == 1, "the learner that was asked lives, and will write it"
    fleet.learner_life = 1
    assert pulse(5, 5) == 1, "it is not back at the step"
    assert pulse(7, 5, state="STARTING") == 1
    fleet.unreachable = {"learner.0"}
    assert pulse(7, 5) == 1
    fleet.unreachable = set()
    assert pulse(8, 5) == pulse(8, 5) == 2, "a new incarnation is asked once"
    operations = operate(make_config(), tmp_path, fleet)  # as after the supervisor's death
    fleet.learner_life = 2
    assert pulse(9, 5) == 3
    fleet.learner_life = 3
    assert pulse(9, 5, 9) == pulse(9, 5, 9) == 3, "it is there"
    assert list(tmp_path.glob("pending_checkpoint*")) == []


def test_a_checkpoint_that_an_earlier_start_was_asked_for_is_owed_by_nobody(
    operations: Operations, fleet: ScriptedFleet, tmp_path: Path
) -> None:
    perform(operations, "checkpoint", {})
    fleet.learner_life, fleet.told = 1, []
    later = Operations(
        Roster(make_config(), tmp_path, "later", tmp_path, ""),
        fleet,
        fleet.lifecycle,
        operations.events,
        operations.pending_lock,
    )
    later.renew_pending_checkpoint(statuses_of({"learner.0": {"state": "READY", "step": 9}}))
    assert fleet.told == []


def write_pending(folder: Path, step: int, incarnation: int) -> None:
    write_json(
        RunDir(folder).pending_checkpoint, {"run_id": RUN_ID, "step": step, "incarnation": incarnation}
    )


def read_pending(folder: Path) -> tuple[int, int]:
    found = read_json(RunDir(folder).pending_checkpoint)
    assert found is not None
    return found["step"], found["incarnation"]


def test_a_checkpoint_asked_for_of_a_step_that_is_taken_again_does_not_undo_the_pending_one_of_a_later_step(
    operations: Operations, fleet: ScriptedFleet, tmp_path: Path
) -> None:
    write_pending(tmp_path, step=9, incarnation=0)
    fleet.learner_life = 1
    perform(operations, "checkpoint", {})  # of step 7
    assert read_pending(tmp_path) == (9, 0), "it is asked for when this incarnation is at step 9"


def test_what_was_asked_for_while_the_last_one_was_looked_for_is_not_forgotten(
    operations: Operations, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_pending(tmp_path, step=5, incarnation=0)
    drop = Operations._drop_pending

    def ask_and_drop(self: Operations, kept: dict[str, Any]) -> None:
        perform(self, "checkpoint", {})  # of step 7, by a thread of the API
        drop(self, kept)

    monkeypatch.setattr(Operations, "_drop_pending", ask_and_drop)
    operations.renew_pending_checkpoint(statuses_of({"buffer.0": {"checkpoints": [5]}}))
    assert read_pending(tmp_path) == (7, 0)


def test_a_learner_that_is_late_to_answer_is_asked_once_and_one_that_refuses_again(
    operations: Operations, fleet: ScriptedFleet, tmp_path: Path
) -> None:
    fleet.failures = [ServiceFailed("starting"), DeadlineExceeded("no answer")]
    write_pending(tmp_path, step=7, incarnation=0)
    fleet.learner_life = 1
    for _ in range(4):
        operations.renew_pending_checkpoint(statuses_of({"learner.0": {"state": "READY", "step": 8}}))
    assert fleet.told == [("learner.0", "checkpoint")] * 2 and read_pending(tmp_path) == (7, 1)


@pytest.mark.parametrize("form", [{"step": "seven"}, {"step": 7}])
def test_a_pending_checkpoint_in_another_form_is_none_and_the_next_one_takes_its_place(
    operations: Operations, fleet: ScriptedFleet, tmp_path: Path, caplog: pytest.LogCaptureFixture, form: Any
) -> None:
    write_json(RunDir(tmp_path).pending_checkpoint, {"run_id": RUN_ID, **form})
    operations.renew_pending_checkpoint(statuses_of({"learner.0": {"state": "READY", "step": 8}}))
    assert "the pending checkpoint request in" in caplog.text and fleet.told == []
    perform(operations, "checkpoint", {})  # of step 7
    assert read_pending(tmp_path) == (7, 0)


def test_a_pending_checkpoint_that_the_disk_does_not_take_ends_no_run(
    operations: Operations, fleet: ScriptedFleet, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    RunDir(tmp_path).pending_checkpoint.mkdir()  # cannot be read as a file
    operations.renew_pending_checkpoint(statuses_of({"learner.0": {"state": "READY", "step": 8}}))
    assert "cannot be read or written" in caplog.text and fleet.told == []


# --- the real buffer -----------------------------------------------------------------------


@contextlib.contextmanager
def buffer_of(folder: Path) -> Iterator[BufferService]:
    """The run's buffer, as its supervisor starts it."""
    config = make_config(
        rollout={"group_size": 2, "max_tokens": 8},
        learner={"groups_per_step": 2},
        algorithm={"drop_constant_groups": False},
    )
    service = build(ServiceContext(config, "buffer.0", folder, RUN_ID))
    stop = ThreadEvent()
    thread = threading.Thread(target=service.run, args=(stop,), daemon=True)
    thread.start()
    try:
        yield service
    finally:
        stop.set()
        thread.join(120.0)


@contextlib.contextmanager
def clients_of(service: BufferService) -> Iterator[tuple[LearnerClient, Client]]:
    learner, replica = LearnerClient(service.address), Client(RUNTIME, service.address)
    learner.open("learner.0")
    learner.register_version(0)
    replica.call("describe_data", num_prompts=10, digest="d")
    yield learner, replica
    learner.close()
    replica.close()


def lease(replica: Client, want: int = 1, wait_s: float = 0.0) -> list[dict[str, Any]]:
    args = {"replica": "a", "version": 1, "want": want, "wait_s": wait_s}
    return list(replica.call("lease", deadline_s=20.0, **args).args["grants"])


def push(replica: Client, grant: dict[str, Any]) -> str:
    frames = encode_group(make_group(grant["ticket"], grant["attempt"]))
    held = {"ticket": grant["ticket"], "attempt": grant["attempt"]}
    return str(replica.call("push", frames, replica="a", **held).args["result"])


def test_a_paused_buffer_grants_no_lease_and_takes_what_was_leased(tmp_path: Path) -> None:
    with buffer_of(tmp_path) as service, clients_of(service) as (_, replica):
        (grant,) = lease(replica)
        assert service.command(Pause()) == PauseState(True)
        assert lease(replica) == []
        assert push(replica, grant) == "stored"
        service.command(Unpause())
        assert len(lease(replica)) == 1
        with pytest.raises(ConfigError, match="'pause' and 'unpause'"):
            service.command(Drain())


def test_a_replica_that_waits_for_a_lease_gets_it_when_the_pause_ends(tmp_path: Path) -> None:
    with buffer_of(tmp_path) as service, clients_of(service) as (_, replica):
        service.command(Pause())
        threading.Timer(0.3, service.command, (Unpause(),)).start()
        assert len(lease(replica, wait_s=300.0)) == 1, "else the call's own deadline comes first"


def test_a_buffer_that_is_started_again_in_a_pause_is_paused(
    operations: Operations, fleet: ScriptedFleet, tmp_path: Path
) -> None:
    perform(operations, "pause", {})
    with buffer_of(tmp_path) as service, clients_of(service) as (_, replica):
        assert service.status().paused and lease(replica) == []
    perform(operations, "unpause", {})
    with (
        buffer_of(tmp_path) as service,
        contextlib.closing(Client(RUNTIME, service.address)) as replica,
    ):
        assert not service.status().paused and len(lease(replica)) == 1


# --- the real leader -----------------------------------------------------------------------


class ScriptedHandoff:
    """Takes every version at once."""

    shared_path, token = "", 1
    published: PolicyVersion | None = None
    room = None

    def has_room(self) -> bool:
        return True

    def has_lost(self) -> bool:
        return False


def take() -> Snapshot:
    state = PieceState(whole("w", (2, 2)), {kind: torch.ones(4) for kind in KINDS}, 1.0)
    return Snapshot(0, {"world_size": 1}, (state,), {}, {})


class Driver:
    """Performs a leader's orders: weights are nothing, checkpoints are real."""

    def __init__(self, learner: LearnerClient, folder: Path) -> None:
        self.publisher_client = ScriptedHandoff()
        self.store = CheckpointStore(folder / "checkpoints", keep=2)
        config = make_config(
            rollout={"group_size": 2, "max_tokens": 8},
            learner={"groups_per_step": 2, "steps": 9},
            weight_sync={"probe_every": 0},
            checkpoint={"every_steps": 100},
        )
        self.leader = Leader(config, learner, lambda token: self.publisher_client, self.store)
        self.orders = self.leader.orders(ThreadEvent())
        self.writer = BackgroundWriter(0)

    def step(self) -> Order:
        order = next(self.orders)
        if isinstance(order, Publish):
            self.publisher_client.published = PolicyVersion(order.number, order.step)
        if isinstance(order, Checkpoint):
            self.writer.begin(self.store.temporary(order.step), {"": take})
        return order

    def until(self, kind: type[Order]) -> Order:
        """Perform orders up to the first of this kind."""
        orders = (self.step() for _ in range(100))
        found = next((order for order in orders if isinstance(order, kind)), None)
        assert found is not None, f"no {kind.__name__} in 100 orders"
        return found


def test_a_paused_learner_takes_no_batch_after_its_step_and_may_be_asked_for_a_checkpoint(
    tmp_path: Path,
) -> None:
    with buffer_of(tmp_path) as service, clients_of(service) as (learner, replica):
        driver = Driver(learner, tmp_path)
        driver.until(Publish)
        for grant in [*lease(replica, want=2), *lease(replica, want=2)]:  # a call is given a step's at most
            push(replica, grant)
        order = driver.until(Train)
        driver.leader.is_paused = True  # while the step is in progress
        following = [driver.step() for _ in range(4)]
        assert not any(isinstance(one, Train) for one in following), "there was another batch"
        assert driver.leader.step == 1 and learner.status().steps_trained == 1, "the step was booked"
        driver.leader.checkpoints.asked_step = 1
        assert driver.until(Checkpoint) == Checkpoint(1)
        for _ in itertools.takewhile(lambda _: driver.leader.checkpoints.newest_step == 0, range(100)):
            assert isinstance(driver.step(), Wait)
        assert driver.leader.checkpoints.newest_step == 1 and learner.status().checkpoints == (1,)
        assert driver.leader.checkpoints.asked_step is None
        driver.leader.is_paused = False
        assert isinstance(order, Train) and driver.until(Train).step == 1


def test_a_checkpoint_that_is_there_already_is_not_written_again(tmp_path: Path) -> None:
    with buffer_of(tmp_path) as service, clients_of(service) as (learner, _):
        driver = Driver(learner, tmp_path)
        driver.leader.is_paused, driver.leader.checkpoints.asked_step = True, 0
        driver.until(Checkpoint)
        driver.leader.checkpoints.asked_step = 0
        assert not any(isinstance(driver.step(), Checkpoint) for _ in range(5))
        assert driver.leader.checkpoints.asked_step is None


def test_a_checkpoint_asked_for_at_a_step_that_is_undone_is_written_when_the_step_is_done_again(
    tmp_path: Path,
) -> None:
    with buffer_of(tmp_path) as service, clients_of(service) as (learner, replica):
        driver = Driver(learner, tmp_path)
        driver.leader.checkpoints.asked_step = 1  # as if the guard had gone back from there to 0
        driver.until(Publish)
        assert not any(isinstance(driver.step(), Checkpoint) for _ in range(2)), "of a step before"
        for grant in lease(replica, want=2):
            push(replica, grant)
        assert driver.until(Checkpoint) == Checkpoint(1)
