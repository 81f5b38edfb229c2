"""Evaluations by replicas of the real loop, with the real buffer and a scripted engine."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from asyncrl.buffer.client import ReplicaClient
from asyncrl.buffer.messages import EvaluationOrder, LeaseReply
from asyncrl.buffer.rules.replica import CALL_ATTEMPTS
from asyncrl.core.metrics.tallies import Tally
from asyncrl.core.status.service import FinishedEvaluation
from rollout_service.engine.protocol import Interrupted
from rollout_service.rewards.calling import FunctionReward
from rollout_service.rewards.rules.matching import score_digit_sort
from tests.rollout.replica.replica_parts import Stage, open_stage
from tests.waiting import wait_for

DIGIT_SORT = FunctionReward("digit_sort", score_digit_sort)
NUM_PROMPTS, SLOW = 12, 10.0
"""At so many tokens/s a part takes half a second: others can come in between."""


def finished(stage: Stage) -> FinishedEvaluation:
    wait_for(lambda: stage.census().evaluations, "the evaluation")
    (found,) = stage.census().evaluations
    return found


async def take_part(client: ReplicaClient, version: int) -> EvaluationOrder:
    while True:
        order = (await client.lease(version, 0, 1.0)).evaluate
        if order is not None:
            return order


def test_a_lone_replica_answers_all_parts_pinned_once(tmp_path: Path):
    with open_stage(tmp_path, DIGIT_SORT, evaluation={"samples": 3, "replicas": 2}) as stage:
        number = stage.serve_first_version()
        stage.learner.request_evaluation(0)
        found = finished(stage)
        wait_for(lambda: stage.state() == "READY", "READY")
        assert stage.replica.status().counters["evaluations"] == 2
    metrics = found.metrics
    assert found.version == number
    assert (metrics["val-aux/num_prompts"], metrics["val-aux/num_failed"]) == (NUM_PROMPTS, 0)
    assert metrics["accuracy"] == metrics["val-core/held_out/acc/mean@3"]
    assert metrics["val-core/digit_sort/acc/maj@3"] <= metrics["val-core/digit_sort/acc/pass@3"]
    assert stage.receiver.calls[:2] == ["pin", "unpin"]
    assert stage.receiver.calls.count("pin") == 1


def test_a_receiver_that_is_away_when_an_evaluation_ends_does_not_end_the_replica(tmp_path: Path):
    with open_stage(tmp_path, DIGIT_SORT, evaluation={"samples": 1, "replicas": 1}) as stage:
        stage.receiver.is_away = True
        stage.serve_first_version()
        stage.learner.request_evaluation(0)
        finished(stage)
        wait_for(lambda: stage.receiver.calls.count("unpin") == CALL_ATTEMPTS, "the last try")
        wait_for(lambda: stage.state() == "READY", "READY")


def test_two_replicas_of_one_version_share_an_evaluation(tmp_path: Path):
    async def help_out(address: str, version: int) -> int:
        client, num_parts = ReplicaClient(address, "rollout.1", 5.0), 0
        order: EvaluationOrder | None = await take_part(client, version)
        while order is not None:
            num_parts += 1
            sums = {"val-aux/num_prompts": Tally(0, 6.0), "accuracy": Tally(6, 6.0, 6.0, 6)}
            order = await client.evaluated(order, version, sums)
        client.close()
        return num_parts

    with open_stage(tmp_path, DIGIT_SORT, tokens_per_s=SLOW, evaluation={"replicas": 2}) as stage:
        number = stage.serve_first_version()
        stage.learner.request_evaluation(0)
        assert asyncio.run(help_out(stage.address, number)) >= 1
        assert finished(stage).metrics["val-aux/num_prompts"] == NUM_PROMPTS


def test_the_part_of_a_replica_that_falls_silent_is_answered_by_another(tmp_path: Path):
    with open_stage(
        tmp_path, DIGIT_SORT, tokens_per_s=SLOW, evaluation={"replicas": 2}, lease_s=1.0
    ) as stage:
        number = stage.serve_first_version()
        stage.learner.request_evaluation(0)
        client = ReplicaClient(stage.address, "rollout.1", 5.0)
        asyncio.run(take_part(client, number))  # and never a word again
        metrics = finished(stage).metrics
        assert metrics["val-aux/num_prompts"] == NUM_PROMPTS
        wait_for(lambda: stage.replica.status().counters["evaluations"] == 2, "the second answer's answer")
        client.close()


class LateClient(ReplicaClient):
    """Hands an order over only after the replica has swapped."""

    stage: Stage
    has_swapped = False

    async def lease(self, *args: Any, **kwargs: Any) -> LeaseReply:
        reply = await super().lease(*args, **kwargs)
        if reply.evaluate is not None and not self.has_swapped:
            type(self).has_swapped = True
            stage = self.stage
            number = await asyncio.to_thread(stage.learner.register_version, 0)
            stage.receiver.offer(number, 0)
            while stage.replica.status().version != number:
                await asyncio.sleep(0.01)
        return reply


def test_an_order_that_a_swap_overtook_is_answered_at_the_new_version(tmp_path: Path):
    with open_stage(tmp_path, DIGIT_SORT, make_client=LateClient) as stage:
        LateClient.stage = stage
        number = stage.serve_first_version()
        stage.learner.request_evaluation(0)
        found = finished(stage)
        assert found.version == number + 1
        assert found.metrics["val-aux/num_prompts"] == NUM_PROMPTS
        counters = stage.census().counters
        assert counters.get("evaluations_unasked", 0) == 0, "no answer was thrown away"
        wait_for(lambda: stage.replica.status().counters.get("evaluations"), "the replica's own count")
        assert stage.replica.status().counters["evaluations"] == 1


def test_an_answer_that_fails_is_a_wrong_one_and_is_counted(tmp_path: Path):
    def refuse(response: str, ground_truth: Any, **extra: Any) -> float:
        raise KeyError("answer")

    with open_stage(tmp_path, FunctionReward("refuse", refuse), evaluation={"samples": 2}) as stage:
        stage.serve_first_version()
        stage.learner.request_evaluation(0)
        metrics = finished(stage).metrics
    assert (metrics["accuracy"], metrics["val-aux/num_failed"]) == (0.0, 2 * NUM_PROMPTS)
    assert metrics["val-core/held_out/acc/maj@2"] == 0.0


def test_an_interrupted_evaluation_reports_nothing(tmp_path: Path):
    with open_stage(tmp_path, DIGIT_SORT) as stage:
        generate = stage.engine.generate

        async def interrupt(prompt_ids: Any, sampling: Any, request_id: str) -> Any:
            completion = await generate(prompt_ids, sampling, request_id)
            if request_id.startswith("evaluation"):
                raise Interrupted("a drain came", completion=completion)
            return completion

        stage.engine.generate = interrupt  # type: ignore[method-assign]
        stage.serve_first_version()
        stage.learner.request_evaluation(0)
        wait_for(lambda: stage.replica.status().counters.get("evaluation_errors"), "the interruption")
        assert stage.census().evaluations == ()
        stage.engine.generate = generate  # type: ignore[method-assign]
        assert finished(stage).metrics["val-aux/num_failed"] == 0


@pytest.mark.parametrize("num_samples", [1, 3])
def test_the_same_version_is_evaluated_with_the_same_answers_again(tmp_path: Path, num_samples: int):
    with open_stage(tmp_path, DIGIT_SORT, evaluation={"samples": num_samples}) as stage:
        stage.serve_first_version()
        for count in (1, 2):
            stage.learner.request_evaluation(0)
            wait_for(lambda wanted=count: len(stage.census().evaluations) == wanted, "the evaluation")
        first, second = (one.metrics for one in stage.census().evaluations)
        assert first == second
