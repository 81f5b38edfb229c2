"""The replica's loop against the real buffer service, with a scripted engine."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from asyncrl.buffer.client import ReplicaClient
from asyncrl.buffer.ledger.orders import sample_seed
from asyncrl.buffer.messages import LeaseReply
from asyncrl.core.errors import ConnectionLost, EngineError, ServiceFailed
from asyncrl.core.obstacle import Cause
from asyncrl.core.rpc.message import Done
from asyncrl.core.runtime.threads import ThreadEvent
from asyncrl.core.service_command import Drain, Promote, Standing
from asyncrl.core.states import ServiceState
from rollout_service.engine.protocol import EngineDied
from rollout_service.engine.scripted.engine import scripted_logprob
from rollout_service.gateway.refusal import NobodyCame
from rollout_service.rewards.calling import FunctionReward
from rollout_service.rewards.rules.matching import score_digit_sort
from tests.rollout.replica.replica_parts import GROUP_SIZE, WAIT_S, Stage, open_stage
from tests.waiting import wait_for

DIGIT_SORT = FunctionReward("digit_sort", score_digit_sort)


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    with open_stage(tmp_path, DIGIT_SORT) as found:
        yield found


def test_a_replica_takes_no_leases_before_it_has_loaded_a_registered_version(stage: Stage):
    wait_for(lambda: stage.state() == "SYNCING", "SYNCING")
    assert stage.census().issued == 0
    stage.serve_first_version()
    wait_for(lambda: stage.census().issued > 0, "a lease")
    assert stage.receiver.reports == [(1, True)]


def test_groups_reach_the_learner_whole_with_spans_and_log_probs_of_the_served_version(stage: Stage):
    number = stage.serve_first_version()
    reservation = stage.learner.reserve(0, WAIT_S)
    assert reservation is not None
    groups = stage.learner.fetch([ticket.ticket for ticket in reservation.tickets])
    for group in groups:
        assert len(group.trajectories) == GROUP_SIZE
        assert any(group.prompt_ids.tolist() == prompt.token_ids.tolist() for prompt in stage.prompts.prompts)
        for trajectory in group.trajectories:
            assert [span.version for span in trajectory.spans] == [number]
            assert trajectory.loss_mask.tolist() == [1] * trajectory.num_tokens
            wanted = [scripted_logprob(token, number) for token in trajectory.response_ids.tolist()]
            assert trajectory.logprobs.tolist() == pytest.approx(wanted)


def test_two_samples_of_a_group_have_different_seeds_and_the_same_ticket_always_the_same(stage: Stage):
    seeds = {sample_seed(0, ticket, sample) for ticket in range(1, 9) for sample in range(GROUP_SIZE)}
    assert len(seeds) == 8 * GROUP_SIZE
    stage.serve_first_version()
    reservation = stage.learner.reserve(0, WAIT_S)
    assert reservation is not None
    for group in stage.learner.fetch([ticket.ticket for ticket in reservation.tickets]):
        assert len({tuple(one.response_ids.tolist()) for one in group.trajectories}) > 1


def test_training_goes_on_over_several_versions_within_the_bound(stage: Stage):
    stage.serve_first_version()
    for step in range(4):
        reservation = stage.learner.reserve(step, WAIT_S)
        assert reservation is not None, f"step {step} never got its batch"
        tickets = [ticket.ticket for ticket in reservation.tickets]
        lags = [
            step - reservation.step_of_version[span.version]
            for group in stage.learner.fetch(tickets)
            for trajectory in group.trajectories
            for span in trajectory.spans
        ]
        assert max(lags) <= 1
        stage.learner.trained(step, lag_max=max(0, *lags))
        number = stage.learner.register_version(step + 1)
        stage.receiver.offer(number, step + 1)
        wait_for(lambda wanted=number: stage.replica.status().version == wanted, "the swap")
    assert stage.census().residue == 0


def test_a_load_that_fails_puts_the_replica_back_to_syncing_until_one_works(stage: Stage):
    stage.serve_first_version()
    stage.engine.swaps_to_fail = 2
    stage.learner.reserve(0, WAIT_S)
    stage.learner.trained(0)
    second = stage.learner.register_version(1)
    stage.receiver.offer(second, 1)
    wait_for(lambda: (second, False) in stage.receiver.reports, "the report of the failure")
    wait_for(lambda: stage.state() == "SYNCING", "SYNCING")
    (refused,) = stage.replica.status().obstacles
    assert refused.cause is Cause.WEIGHTS_REFUSED and f"version {second}" in refused.reason
    wait_for(lambda: (second, True) in stage.receiver.reports, "the load that works")
    wait_for(lambda: stage.state() == "READY", "READY")
    assert stage.replica.status().version == second
    assert stage.replica.status().obstacles == ()


def test_a_group_that_fails_is_told_until_one_is_pushed(stage: Stage, monkeypatch: pytest.MonkeyPatch):
    async def refuse(*_: Any) -> Any:
        raise EngineError("the decoder prompt cannot be empty")

    with monkeypatch.context() as engine:
        engine.setattr(stage.engine, "generate", refuse)
        stage.serve_first_version()
        wait_for(lambda: stage.replica.status().obstacles, "the failure")
        (failing,) = stage.replica.status().obstacles
        assert (failing.cause, failing.reason) == (Cause.GROUPS_FAIL, "the decoder prompt cannot be empty")
    wait_for(lambda: not stage.replica.status().obstacles, "a group that works")


def test_a_fenced_replica_takes_no_leases(stage: Stage):
    stage.receiver.is_fenced = True
    stage.serve_first_version()
    ThreadEvent().wait(0.3)
    assert stage.census().issued == 0
    stage.receiver.is_fenced = False
    wait_for(lambda: stage.census().issued > 0, "a lease after the fence was lifted")


def test_an_evaluation_is_pinned_to_one_version_and_reported(stage: Stage):
    number = stage.serve_first_version()
    order = stage.learner.request_evaluation(0)
    wait_for(lambda: stage.census().evaluations, "the evaluation")
    (found,) = stage.census().evaluations
    assert (found.id, found.version) == (order, number)
    assert found.metrics["val-aux/num_prompts"] == 12
    assert 0.0 <= found.metrics["accuracy"] <= 1.0
    wait_for(lambda: stage.state() == "READY", "READY")
    assert stage.receiver.calls[:2] == ["pin", "unpin"]


def test_an_evaluation_that_meets_a_failed_load_waits_for_one_that_works(stage: Stage):
    swap, goes_on = stage.engine.swap, ThreadEvent()

    async def fail_once(staged: Any) -> None:
        stage.engine._is_running.clear()
        stage.engine.swap = swap  # type: ignore[method-assign]
        await asyncio.to_thread(goes_on.wait, WAIT_S)
        raise EngineError("the load failed")

    def waits_with_nothing_in_flight() -> bool:  # a paused engine that is full asks for nothing
        census = stage.census()
        return census.parked > 0 and not any(census.leases.values()) and stage.state() == "READY"

    stage.serve_first_version()
    wait_for(waits_with_nothing_in_flight, "a lease that waits, and no group in flight")
    stage.engine.swap = fail_once  # type: ignore[method-assign]
    second = stage.learner.register_version(0)
    stage.receiver.staged.clear()
    stage.receiver.offer(second, 0)
    wait_for(lambda: not stage.engine.is_loaded, "a load")
    stage.learner.request_evaluation(0)
    wait_for(lambda: stage.replica._work.swaps.lock._waiters, "the order, while the load runs")
    goes_on.set()
    wait_for(lambda: stage.census().evaluations, "the evaluation")
    assert stage.receiver.reports[1:] == [(second, False), (second, True)]
    assert stage.census().evaluations[0].version == second
    wait_for(lambda: stage.state() == "READY", "READY")


def test_a_group_that_no_agent_opened_goes_back_and_counts_as_no_attempt(stage: Stage):
    async def wait_for_agents(*args: Any) -> Any:
        raise NobodyCame("nobody came")

    wait_for(lambda: stage.state() == "SYNCING", "SYNCING")
    assert stage.replica.parts is not None
    runner, count = stage.replica.parts.runner, stage.replica.status
    run, runner.run = runner.run, wait_for_agents  # type: ignore[method-assign]
    stage.serve_first_version()
    wait_for(lambda: count().counters.get("groups_unopened", 0) > 20, "many groups without agents")
    runner.run = run  # type: ignore[method-assign]
    assert stage.learner.reserve(0, WAIT_S) is not None
    assert set(stage.census().reissues) == {"released"}
    assert stage.census().given_up == 0


def test_busy_and_idle_seconds_add_up_to_the_time_that_passed(stage: Stage):
    stage.serve_first_version()
    stage.learner.reserve(0, WAIT_S)
    first = stage.replica.status().engine
    ThreadEvent().wait(0.3)
    second = stage.replica.status().engine
    assert first is not None and second is not None
    assert 0.25 < second.wall_s - first.wall_s < WAIT_S
    assert first.trajectories >= 4 * GROUP_SIZE


def test_a_reward_that_raises_fails_its_group_and_nothing_of_it_is_trained(tmp_path: Path):
    def refuse(response: str, ground_truth: Any, **extra: Any) -> float:
        raise KeyError("answer")

    with open_stage(tmp_path, FunctionReward("refuse", refuse)) as stage:
        stage.serve_first_version()
        wait_for(lambda: stage.census().given_up > 0, "a prompt that is given up")
        census = stage.census()
        assert census.stored_groups == 0
        assert census.residue == 0
        assert stage.replica.status().counters["groups_failed"] >= 3


def test_a_draining_replica_releases_what_it_holds_and_deregisters(tmp_path: Path):
    with open_stage(tmp_path, DIGIT_SORT, tokens_per_s=0.5) as stage:
        stage.serve_first_version()
        wait_for(lambda: stage.replica.status().in_flight_groups == 4, "full slots")
        assert stage.replica.command(Drain()) == Standing(ServiceState.DRAINING)
        wait_for(lambda: stage.state() == "RETIRED", "RETIRED")
        census = stage.census()
        assert census.reissues == {"released": 4}
        assert census.leases.get("rollout.0", 0) == 0
        assert census.residue == 0
        assert stage.receiver.calls == ["drain", "close"]


class NotingClient(ReplicaClient):
    """Notes which leases it renewed."""

    renewed: Counter[tuple[int, int]]

    async def renew(self, held: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
        keys = set(held)
        lost = await super().renew(keys)
        self.renewed.update(keys - set(lost))
        return lost


def test_a_lease_is_renewed_again_and_again_while_its_group_is_generated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(NotingClient, "renewed", Counter(), raising=False)
    slow: dict[str, Any] = {"tokens_per_s": 0.1, "make_client": NotingClient, "renew_as_of_s": 0.3}
    with open_stage(tmp_path, DIGIT_SORT, **slow) as stage:
        stage.serve_first_version()
        wait_for(lambda: stage.replica.status().in_flight_groups == 4, "full slots")
        wait_for(lambda: sum(times >= 3 for times in NotingClient.renewed.values()) == 4, "renewals")
        assert stage.census().reissues == {}


def test_an_engine_that_died_ends_the_replica_with_an_error(tmp_path: Path):
    async def die(*args: Any) -> Any:
        raise EngineDied("the core is gone")

    with open_stage(tmp_path, DIGIT_SORT) as stage:
        stage.engine.generate = die  # type: ignore[method-assign]
        stage.learner.open("test")
        stage.receiver.offer(stage.learner.register_version(0), 0)
        wait_for(lambda: stage.failures, "the end of the replica")
        assert isinstance(stage.failures[0], ServiceFailed)
        assert "the core is gone" in str(stage.failures[0])


class ForgetfulClient(ReplicaClient):
    """Loses the answer to the first lease that brings grants, as a buffer does that dies as it sends it."""

    has_lost = False

    async def lease(self, *args: Any, **kwargs: Any) -> LeaseReply:
        reply = await super().lease(*args, **kwargs)
        if reply.grants and not self.has_lost:
            self.has_lost = True
            raise ConnectionLost("the buffer died")
        return reply


def test_grants_that_were_lost_on_their_way_are_generated_long_before_their_leases_expire(tmp_path: Path):
    with open_stage(tmp_path, DIGIT_SORT, make_client=ForgetfulClient, lease_s=600.0) as stage:
        stage.serve_first_version()
        assert stage.learner.reserve(0, WAIT_S) is not None
        assert stage.census().reissues == {"released": 4}


def test_a_replica_that_stands_by_follows_the_weights_and_leases_nothing_until_it_is_promoted(
    tmp_path: Path,
):
    with open_stage(tmp_path, DIGIT_SORT, is_standby=True) as stage:
        number = stage.serve_first_version()
        assert stage.replica.status().standby is True
        assert stage.replica.status().version == number
        assert stage.learner.reserve(0, 0.3) is None
        assert stage.census().issued == 0
        assert stage.replica.command(Promote()) == Done()
        assert stage.learner.reserve(0, WAIT_S) is not None
        assert stage.replica.status().standby is False
