"""The reward of a run: weighted sums, their parts, and the end of a run whose reward does not work."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from asyncrl.control.rows.metering import Meter
from asyncrl.core.config.tree import RewardSection
from asyncrl.core.errors import AsyncrlError, ServiceFailed
from asyncrl.core.experience import MAX_REWARD_PARTS
from asyncrl.core.service import ServiceContext
from asyncrl.core.status.replica import RewardStatus
from asyncrl.core.status.statuses import Statuses
from rollout_service import composition
from rollout_service.data.prompts import PromptSet
from rollout_service.rewards.calling import FunctionReward
from rollout_service.rewards.score import Answer, RewardError, RewardsFailed, Score
from rollout_service.rewards.total import (
    FIRST_ANSWERS,
    MIN_ANSWERS,
    WINDOW_ANSWERS,
    ErrorRate,
    TotalReward,
    Weighed,
)
from rollout_service.tasks.digit_sort.vocabulary import build_tokenizer
from tests.rollout.replica.replica_parts import GROUP_SIZE, make_config, open_stage, write_data
from tests.rollout.rewards.judging import answer, judge, reward_of, write
from tests.waiting import wait_for


def total_of(function: Callable[..., Any], max_error_rate: float = 1.0) -> TotalReward:
    return TotalReward([Weighed(FunctionReward("mine", function))], ErrorRate(max_error_rate))


def ask(reward: TotalReward, *responses: str) -> list[float | AsyncrlError]:
    async def ask_one(response: str) -> float | AsyncrlError:
        try:
            return (await reward.score(answer(response))).value
        except RewardError as error:
            return error

    async def ask_all() -> list[float | AsyncrlError]:
        return [await ask_one(response) for response in responses]

    return asyncio.run(ask_all())


def score_or_refuse(response: str, ground_truth: Any) -> float:
    if response == "bad":
        raise KeyError(response)
    return 1.0


def test_parts_are_weighed_and_summed_and_each_is_told_before_weighting():
    fn = [
        "gsm8k",
        {"fn": "gsm8k_flexible", "weight": 0.5},
        {"fn": "format", "name": "box", "pattern": "boxed", "weight": -2},
        {"fn": "exact_match", "weight": 0},
    ]

    async def work(reward: TotalReward) -> None:
        score = await reward.score(answer(r"\boxed{4} #### 4"))
        assert score.parts == {"gsm8k": 1.0, "gsm8k_flexible": 1.0, "box": 1.0, "exact_match": 0.0}
        assert score.value == 1.0 + 0.5 - 2.0
        assert (await reward.for_evaluation().score(answer("4"))).value == 0.5
        assert reward.status().parts["gsm8k"] == (1, 1.0)

    judge(reward_of(fn), work)


def test_one_part_that_fails_fails_the_answer_and_ends_the_other_calls():
    class Slow(FunctionReward):
        async def value(self, answer: Answer) -> Score:
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                ended.append(self.name)
                raise
            return Score(0.0)

    ended: list[str] = []
    parts = [Weighed(Slow("slow", score_or_refuse)), Weighed(FunctionReward("bad", score_or_refuse))]
    reward = TotalReward(parts, ErrorRate(1.0))
    (error,) = ask(reward, "bad")
    assert isinstance(error, RewardError) and "KeyError" in error.message
    assert ended == ["slow"]
    counts = {"slow": (0, 0.0), "bad": (0, 0.0)}
    assert reward.status() == RewardStatus(counts, {"raised": 1}, {"sums": {"reward": 1}})


def test_a_sum_that_is_not_finite_is_an_error():
    huge = Weighed(FunctionReward("huge", lambda response, ground_truth: 1e308), 1e10)
    (error,) = ask(TotalReward([huge], ErrorRate(1.0)), "4")
    assert isinstance(error, RewardError) and error.kind == "not_finite"


def test_nothing_is_said_of_a_few_answers_however_many_fail():
    told = ask(total_of(score_or_refuse, 0.0), "good", *["bad"] * (MIN_ANSWERS - 2))
    assert all(type(one) is RewardError for one in told[1:])


def test_where_none_was_ever_scored_fewer_answers_are_enough():
    reward = total_of(score_or_refuse, 0.2)
    told = ask(reward, *["bad"] * FIRST_ANSWERS)
    assert {type(one) for one in told[:-1]} == {RewardError} and type(told[-1]) is RewardsFailed
    (failing,) = reward.obstacles()
    assert (failing.cause, failing.count) == ("rewards_fail", FIRST_ANSWERS)
    assert failing.reason == "the reward 'mine' raised KeyError: 'bad' (row 7)"


def test_failures_are_told_until_an_answer_is_scored_and_a_reason_once():
    reward = total_of(score_or_refuse)
    ask(reward, "good", "bad", "bad")
    assert [one.count for one in reward.obstacles()] == [2]
    ask(reward, "good")
    assert reward.obstacles() == ()
    rate = ErrorRate(0.2)
    for row in range(FIRST_ANSWERS):
        rate.add_failed(RewardError(f"took longer than 30 s (row {row})"))
    assert rate.verdict is not None and rate.verdict.message.count("took longer") == 1


def test_a_trial_tells_at_once_of_a_part_that_fails_on_a_ground_truth_and_counts_for_nothing():
    def refuse(response: str, ground_truth: Any) -> float:
        assert response == str(ground_truth) == "4"
        raise KeyError("answer")

    reward = TotalReward(
        [Weighed(FunctionReward("good", score_or_refuse)), Weighed(FunctionReward("bad", refuse))],
        ErrorRate(0.0),
    )

    async def work() -> None:
        reward.begin_trial(answer("unused").prompt)
        await asyncio.sleep(0)  # the task runs
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        (told,) = reward.obstacles()
        assert (told.cause, told.count) == ("rewards_fail", 1)
        assert told.reason.startswith("tried on a ground truth: the reward 'bad' raised KeyError: 'answer'")
        assert reward.status().errors == {} and reward.status().parts["good"] == (0, 0.0)
        reward.note_scored(Score(1.0), "")
        assert reward.obstacles() == ()
        await reward.close()

    asyncio.run(work())


def test_closing_ends_a_trial_that_hangs():
    class Hanging(FunctionReward):
        async def value(self, answer: Answer) -> Score:
            return await asyncio.get_running_loop().create_future()

    reward = TotalReward([Weighed(Hanging("hangs", score_or_refuse))], ErrorRate(0.0))

    async def work() -> None:
        reward.begin_trial(answer("unused").prompt)
        await asyncio.sleep(0)
        await reward.close()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(work())


def test_above_the_rate_the_run_is_ended_with_the_kinds_and_the_last_reasons():
    responses = ["good"] * (MIN_ANSWERS - 5) + ["bad"] * 5 + ["good"]
    reward = total_of(score_or_refuse, 0.2)
    told = ask(reward, *responses)
    assert [type(one) for one in told[-6:-2]] == [RewardError] * 4
    for last in told[-2:]:  # the one that was too many, and every one after it
        assert isinstance(last, RewardsFailed)
        assert last.message.startswith(f"5 of the last {MIN_ANSWERS} answers could not be scored (")
        assert "reward.max_error_rate is 0.2). Since the start: 5 raised." in last.message
        assert "the reward 'mine' raised KeyError: 'bad' (row 7)" in last.message
        assert "reward.max_error_rate" in last.hint


def test_at_the_rate_the_run_goes_on():
    responses = [*["good"] * (MIN_ANSWERS - 4), *["bad"] * 4] * 3
    assert not any(isinstance(one, RewardsFailed) for one in ask(total_of(score_or_refuse, 0.2), *responses))


def test_only_the_last_answers_count():
    rate, error = ErrorRate(0.5), RewardError("x")
    for _ in range(10 * WINDOW_ANSWERS):
        rate.add_scored()
    for _ in range(WINDOW_ANSWERS // 2):
        rate.add_failed(error)
    assert rate.verdict is None
    rate.add_failed(error)
    assert rate.verdict is not None


def test_a_rate_of_one_ends_a_run_only_when_no_answer_of_a_whole_window_could_be_scored():
    outage = ["good", *["bad"] * (WINDOW_ANSWERS - 1)]
    assert not any(isinstance(one, RewardsFailed) for one in ask(total_of(score_or_refuse), *outage * 2))
    told = ask(total_of(score_or_refuse), *outage, "bad")
    assert [isinstance(one, RewardsFailed) for one in told] == [False] * WINDOW_ANSWERS + [True]


def test_a_replica_whose_reward_fails_too_often_ends_with_the_reasons(tmp_path: Path):
    def refuse(response: str, ground_truth: Any) -> float:
        raise KeyError("no such judge")

    with open_stage(tmp_path, total_of(refuse, 0.2)) as stage:
        stage.serve_first_version()
        wait_for(lambda: stage.failures, "the end of the replica")
        (failure,) = stage.failures
        assert isinstance(failure, ServiceFailed)
        assert failure.message.startswith(f"rollout.0 cannot go on: {FIRST_ANSWERS} of the last")
        assert "KeyError: 'no such judge'" in failure.message
        assert stage.census().trained == 0


def test_a_replica_counts_parts_and_failures_and_drops_the_groups_that_failed(tmp_path: Path):
    def sometimes(response: str, ground_truth: Any, extra_info: Any) -> Any:
        return "no number" if next(calls) % 7 == 0 else -1.0

    calls = iter(range(1, 1_000_000))
    reward = total_of(sometimes)
    with open_stage(tmp_path, reward) as stage:
        stage.serve_first_version()
        wait_for(lambda: stage.learner.status().stored_groups >= 4, "a batch")
        wait_for(lambda: stage.replica.status().counters.get("groups_failed"), "a failed group")
        reservation = stage.learner.reserve(0, 20.0)
        assert reservation is not None
        groups = stage.learner.fetch([ticket.ticket for ticket in reservation.tickets])
        told = [one.reward_parts for group in groups for one in group.trajectories]
        assert told == [{"mine": -1.0}] * 4 * GROUP_SIZE
        status = replace(stage.replica.status(), reward=reward.status())
        empty = replace(status, reward=RewardStatus({"mine": (0, 0.0)}))
        meter = Meter()
        meter.update(0.0, Statuses({"rollout.0": empty}))
        row = meter.update(1.0, Statuses({"rollout.0": status}))
        assert row["reward/mine/mean"] == -1.0
        assert row["rollout/reward_errors/not_a_number"] >= 1


def test_what_an_environment_scores_or_fails_by_itself_is_counted_too():
    reward = total_of(score_or_refuse, 0.2)
    for _ in range(MIN_ANSWERS - 1):
        reward.note_scored(Score(0.5, {"game": 0.5}), "")
    reward.note_failed(RewardError("the game broke", kind="raised"), "")
    counts = reward.status()
    assert counts.parts == {"mine": (0, 0.0), "game": (MIN_ANSWERS - 1, 0.5 * (MIN_ANSWERS - 1))}
    assert counts.errors == {"raised": 1}
    for _ in range(4):  # 5 of 24 are too many
        with contextlib.suppress(RewardError):
            reward.note_failed(RewardError("the game broke"), "")
    with pytest.raises(RewardsFailed, match="the game broke"):
        reward.note_failed(RewardError("the game broke"), "")


def test_an_environment_cannot_bring_more_parts_than_a_group_holds():
    reward = total_of(score_or_refuse)
    for number in range(2 * MAX_REWARD_PARTS):
        reward.note_scored(Score(0.0, {f"part {number}": 0.0}), "")
    assert len(reward.status().parts) == MAX_REWARD_PARTS


def test_a_part_that_arrives_while_another_thread_asks_for_the_counts_ends_nothing():
    class Busy(list[Any]):
        """The sums of a part; while they are read, an answer with a further part is counted."""

        def __iter__(self) -> Iterator[Any]:
            reward.note_scored(Score(1.0, {"late": 1.0}), "")
            return super().__iter__()

    reward = total_of(score_or_refuse)
    reward._sums["mine"] = Busy([0, 0.0])
    assert reward.status().parts["mine"] == (0, 0.0)
    assert reward.status().parts["late"][0] >= 1


def test_each_replica_of_a_mix_builds_its_own_engine(tmp_path: Path) -> None:
    write_data(tmp_path)
    build_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    own = {"sglang": {"python": "/of/its/own"}}
    config = make_config(tmp_path, engine=["scripted", "sglang"], engine_args=own)

    async def build(name: str) -> Any:
        nowhere = {"buffer.0": "tcp://127.0.0.1:1", f"receiver.{name[-1]}": "tcp://127.0.0.1:1"}
        parts = await composition.build(ServiceContext(config, name, tmp_path, "mix", nowhere))._build()
        parts.buffer.close()
        parts.weights.close()
        await parts.reward.close()
        return parts.engine._engine

    engines = [asyncio.run(build(f"rollout.{index}")) for index in range(3)]
    assert [type(engine).__name__ for engine in engines] == [
        "ScriptedEngine",
        "SglangEngine",
        "ScriptedEngine",
    ]
    assert engines[1]._settings.engine_args == own["sglang"]


def test_a_replica_tries_its_reward_on_the_first_prompt_before_its_engine_starts(tmp_path: Path) -> None:
    write_data(tmp_path)
    build_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    reward = write(tmp_path, "def score(response, ground_truth):\n    raise KeyError(response, ground_truth)")
    section = RewardSection.model_validate({"fn": reward})
    config = make_config(tmp_path).model_copy(update={"reward": section})
    nowhere = {"buffer.0": "tcp://127.0.0.1:1", "receiver.0": "tcp://127.0.0.1:1"}
    replica = composition.build(ServiceContext(config, "rollout.0", tmp_path, "trial", nowhere))

    async def work() -> str:
        parts = await replica._build()
        assert parts.reward is not None and not parts.engine.is_loaded
        async with asyncio.timeout(60):
            while not (told := parts.reward.obstacles()):
                await asyncio.sleep(0.01)
        await parts.reward.close()
        first = parts.prompts
        assert isinstance(first, PromptSet)
        truth = first.at(0).prompt.ground_truth
        assert f"KeyError: ({truth!r}, {truth!r}) (row 0)" in told[0].reason
        parts.buffer.close()
        parts.weights.close()
        return str(told[0].cause)

    assert asyncio.run(work()) == "rewards_fail"
