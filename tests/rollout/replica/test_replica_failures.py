"""A replica whose engine, evaluation or buffer fails."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from asyncrl.buffer.client import ReplicaClient
from asyncrl.buffer.messages import EvaluationOrder, LeaseGrant
from asyncrl.core.errors import ConfigError, DataError, DeadlineExceeded, EngineError, LedgerError
from asyncrl.core.experience import Group
from asyncrl.core.obstacle import Cause
from asyncrl.core.runtime.clock import SystemClock
from asyncrl.core.runtime.threads import ThreadEvent, ThreadRuntime
from asyncrl.core.service_command import Drain, Pause
from rollout_service.engine.metered import MeteredEngine
from rollout_service.engine.protocol import EngineDied, Interrupted, Sampling
from rollout_service.engine.scripted.engine import ScriptedEngine
from rollout_service.replica.groups import GroupTasks
from rollout_service.replica.leases import Evaluations
from rollout_service.replica.lifecycle import Lifecycle
from rollout_service.replica.parts import ReplicaSettings
from rollout_service.replica.service import Replica
from rollout_service.replica.states import State
from rollout_service.tasks.digit_sort.vocabulary import EOS
from tests.buffer.parts import make_group
from tests.rollout.replica.replica_parts import Stage, open_stage
from tests.rollout.replica.test_replica import DIGIT_SORT
from tests.waiting import wait_for

SETTINGS = ReplicaSettings(4, 60.0, 0.0)
GRANT = LeaseGrant(3, 1, 0, 0, 0, 7, 60.0)


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    with open_stage(tmp_path, DIGIT_SORT) as found:
        yield found


async def build_nothing() -> Any:
    raise ExceptionGroup("bugs", [ZeroDivisionError()])


@pytest.fixture
def replica(monkeypatch: pytest.MonkeyPatch) -> Replica:
    """One that does not run."""
    monkeypatch.setattr("asyncrl.buffer.rules.replica.RETRY_PAUSE_S", 0.0)
    return Replica(ThreadRuntime(), "rollout.0", SETTINGS, build_nothing)


def refusing(error: Exception) -> Any:
    """Parts whose buffer and engine refuse every call."""

    async def refuse(*_: Any) -> Any:
        raise error

    names = ("deregister", "describe_data", "fetch_partial", "push_partial", "fail", "release")
    buffer = SimpleNamespace(**dict.fromkeys(names, refuse))
    return SimpleNamespace(buffer=buffer, engine=SimpleNamespace(interrupt=refuse))


@pytest.fixture
def lifecycle(monkeypatch: pytest.MonkeyPatch) -> Lifecycle:
    monkeypatch.setattr("asyncrl.buffer.rules.replica.RETRY_PAUSE_S", 0.0)
    return Lifecycle("rollout.0")


def groups_of(parts: Any, lifecycle: Lifecycle) -> GroupTasks:
    return GroupTasks(parts, SETTINGS, lifecycle, asyncio.TaskGroup())


def test_a_command_of_another_service_is_refused(replica: Replica) -> None:
    with pytest.raises(ConfigError, match="a replica knows no command 'pause'"):
        replica.command(Pause())


def test_a_bug_ends_the_replica_as_what_it_is(replica: Replica) -> None:
    with pytest.raises(ExceptionGroup, match="bugs"):
        replica.run(ThreadEvent())


def test_a_replica_that_drains_goes_back_to_no_other_state(replica: Replica) -> None:
    replica._lifecycle.move(State.DRAINING)
    replica._lifecycle.move(State.READY)
    assert replica.status().state == "DRAINING"


def test_an_engine_that_dies_over_a_swap_ends_the_replica(stage: Stage) -> None:
    async def die(*_: Any) -> None:
        raise EngineDied("the core is gone")

    stage.serve_first_version()
    stage.engine.swap = die  # type: ignore[method-assign]
    stage.receiver.offer(stage.learner.register_version(0), 0)
    wait_for(lambda: stage.failures, "the end of the replica")
    assert "the core is gone" in str(stage.failures[0])


@pytest.mark.parametrize(
    "error", [EngineDied("the core is gone"), ExceptionGroup("parts", [EngineDied("the core is gone")])]
)
def test_an_engine_that_dies_in_an_evaluation_ends_the_replica(stage: Stage, error: Exception) -> None:
    async def die(*_: Any) -> Any:
        raise error

    wait_for(lambda: stage.replica.parts is not None, "its parts")
    stage.replica.parts.evaluator.run = die  # type: ignore[union-attr, method-assign]
    stage.serve_first_version()
    stage.learner.request_evaluation(0)
    wait_for(lambda: stage.failures, "the end of the replica")
    assert "the core is gone" in str(stage.failures[0])


def test_an_evaluation_without_prompts_is_an_error_of_the_data() -> None:
    parts: Any = SimpleNamespace(evaluator=None)
    evaluations = Evaluations(parts, Lifecycle("rollout.0"), asyncio.Lock())
    with pytest.raises(DataError, match=r"data\.eval names no prompts"):
        asyncio.run(evaluations.run(EvaluationOrder(1, 0, 0, 1), 1))


class StrictClient(ReplicaClient):
    """To a buffer that refuses every group."""

    async def push(self, group: Group) -> str:
        raise LedgerError("the group is not one that was asked for")


def test_a_group_that_the_buffer_refuses_is_told(tmp_path: Path) -> None:
    with open_stage(tmp_path, DIGIT_SORT, make_client=StrictClient) as stage:
        stage.serve_first_version()
        wait_for(lambda: stage.replica.status().obstacles, "the refusal")
        (refused,) = stage.replica.status().obstacles
        assert (refused.cause, refused.reason) == (
            Cause.GROUPS_FAIL,
            "the group is not one that was asked for",
        )


def test_a_buffer_that_never_answers_ends_the_start(replica: Replica) -> None:
    with pytest.raises(DeadlineExceeded):
        asyncio.run(replica._introduce(refusing(DeadlineExceeded("no answer"))))


def test_a_partial_rollout_that_cannot_be_had_or_does_not_fit_is_begun_anew(lifecycle: Lifecycle) -> None:
    async def bring_nothing(*_: Any) -> None:
        return None

    parts = refusing(LedgerError("no such ticket"))
    groups = groups_of(parts, lifecycle)
    assert asyncio.run(groups._fetch_partial(GRANT)) is None
    assert lifecycle.counters == {"partials_unread": 1}
    parts.buffer.fetch_partial = bring_nothing
    assert asyncio.run(groups._fetch_partial(GRANT)) is None
    assert lifecycle.counters == {"partials_unread": 1, "partials_unfit": 1}


def test_what_the_buffer_does_not_take_back_is_left_to_the_farewell(lifecycle: Lifecycle) -> None:
    groups = groups_of(refusing(LedgerError("late")), lifecycle)
    groups._in_flight[3, 1] = None  # type: ignore[assignment]
    asyncio.run(groups._push_partial(make_group(3)))
    assert (lifecycle.counters, groups.keys) == ({"partial_errors": 1}, [(3, 1)])


def test_a_failure_that_cannot_be_told_is_counted(lifecycle: Lifecycle) -> None:
    error = EngineError("the decoder prompt cannot be empty")
    asyncio.run(groups_of(refusing(LedgerError("late")), lifecycle)._fail(GRANT, error))
    assert lifecycle.counters == {"groups_failed": 1, "fail_errors": 1}


def test_requests_that_cannot_be_interrupted_are_not_waited_for(lifecycle: Lifecycle) -> None:
    groups = groups_of(refusing(EngineError("the core does not answer")), lifecycle)
    assert not asyncio.run(groups._interrupt(1.0))
    assert lifecycle.counters == {"interrupt_errors": 1}


def test_a_request_that_comes_behind_the_interruption_is_not_begun() -> None:
    async def ask() -> None:
        engine = MeteredEngine(ScriptedEngine(EOS, 0.0), SystemClock())
        await engine.interrupt()
        await engine.generate([1], Sampling(1.0, 4, 7), "late")

    with pytest.raises(Interrupted, match="late"):
        asyncio.run(ask())


class NotingPart:
    """A gateway that no agent comes to, or the workers of a reward; notes how it is ended."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.manager = SimpleNamespace(num_groups_wanted=0)

    async def start(self, on_demand: object) -> None: ...

    async def watch(self) -> None:
        await asyncio.Event().wait()

    def drain(self) -> None:
        self.calls.append("drain")

    async def stop(self) -> None:
        self.calls.append("stop")

    async def close(self) -> None:
        self.calls.append("close")


def test_gateway_and_reward_end_with_their_replica(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gateway, reward = NotingPart(), NotingPart()
    monkeypatch.setattr("rollout_service.replica.service.with_parts", lambda told, parts: told)
    monkeypatch.setattr("rollout_service.replica.service.obstacles_of", lambda parts, is_ready: ())
    with open_stage(tmp_path, DIGIT_SORT, gateway=gateway, reward=reward) as stage:
        stage.serve_first_version()
        stage.replica.command(Drain())
        wait_for(lambda: stage.state() == "RETIRED", "RETIRED")
    assert (gateway.calls, reward.calls) == (["drain", "stop"], ["close"])
