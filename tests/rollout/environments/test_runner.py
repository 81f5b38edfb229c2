"""Episodes of several turns: tokens, masks, log-probs, versions, seeds and ends."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import numpy as np
import pytest

from asyncrl.core.config.tree import RewardPart
from asyncrl.core.experience import Group, decode_group, encode_group
from asyncrl.core.staleness import Span
from rollout_service.engine.protocol import Completion, Sampling
from rollout_service.environments import Environment, EnvironmentFailed, Step
from rollout_service.environments.registry import Episodes
from rollout_service.environments.runner import MultiTurn
from rollout_service.environments.transcript import Transcript, turn_seed
from rollout_service.rewards.registry import build_parts
from rollout_service.rewards.score import RewardsFailed, Score
from rollout_service.rewards.shaping import Overlong
from rollout_service.rewards.total import FIRST_ANSWERS, ErrorRate, TotalReward
from rollout_service.tasks.tool_product.vocabulary import encode
from tests.rollout.environments.parts import (
    CALCULATOR,
    TOKENIZER,
    ExactMatch,
    ScriptedPhrases,
    load,
    make_prompt,
    run_episode,
)

EOS = TOKENIZER.eos_token_id
CALL, REPLY, ANSWER = [*encode("?47*83"), EOS], encode("!3901="), [*encode("3901"), EOS]


class Told(Environment):
    """Says `observation` after every turn, and ends after `turns` of them."""

    def __init__(self, prompt: Any, seed: int, observation: Any = "!1=", turns: int = 99, opening: str = ""):
        self._observation, self._turns, self._opening = observation, turns, opening

    async def start(self) -> str:
        return self._opening

    async def step(self, answer: str) -> Step:
        self._turns -= 1
        return Step(self._observation, is_done=self._turns == 0)


def told(max_turns: int = 8, **arguments: Any) -> Episodes:
    return Episodes(lambda prompt, seed: Told(prompt, seed, **arguments), max_turns)


def test_a_called_tool_answers_between_turns_and_its_tokens_are_masked():
    trajectory, _, reward = run_episode(load(CALCULATOR), [("?47*83", [1]), ("3901", [1])])
    assert trajectory.response_ids.tolist() == [*CALL, *REPLY, *ANSWER]
    assert trajectory.loss_mask.tolist() == [1] * len(CALL) + [0] * len(REPLY) + [1] * len(ANSWER)
    assert trajectory.num_turns == 2
    assert (trajectory.reward, trajectory.finish_reason) == (1.0, "done")
    assert trajectory.reward_parts == {"exact_match": 1.0}
    assert [answer.response for answer in reward.answers] == ["3901"]
    assert reward.answers[0].num_tokens == trajectory.num_tokens


def test_log_probs_are_the_engines_on_what_was_said_and_zero_on_what_was_observed():
    trajectory, _, _ = run_episode(load(CALCULATOR), [("?47*83", [1]), ("3901", [1])])
    said = np.concatenate([-101.0 - np.arange(len(CALL)), -201.0 - np.arange(len(ANSWER))])
    assert trajectory.logprobs[trajectory.loss_mask == 1].tolist() == said.tolist()
    assert not trajectory.logprobs[trajectory.loss_mask == 0].any()


def test_each_turn_reads_all_of_the_turn_before_and_then_more():
    prompt = make_prompt()
    phrases = [("?1*1", [1]), ("?2*2", [1]), ("4", [1])]
    _, engine, _ = run_episode(load(CALCULATOR), phrases, prompt)
    read = [ids for ids, _, _ in engine.requests]
    assert read[0] == prompt.token_ids.tolist()
    for before, after, (said, _) in zip(read, read[1:], phrases, strict=False):
        begun = [*before, *encode(said), EOS]
        assert after[: len(begun)] == begun and len(after) > len(begun)


def test_a_prompt_that_does_not_extend_the_turn_before_is_noticed():
    transcript = Transcript([11, 1], 20)
    completion = Completion(np.array([5, 6], np.int32), np.zeros(2, np.float32), (Span(1, 0, 2),), "stop")
    transcript.say(completion)
    transcript.observe([7])
    assert transcript.next_prompt() == [11, 1, 5, 6, 7]
    transcript._ids[1] = 9  # as if what was said had been tokenised again
    with pytest.raises(AssertionError, match="extends"):
        transcript.next_prompt()


@pytest.mark.parametrize(
    ("versions", "spans"),
    [
        (([1], [1]), [(1, 0, 18)]),
        (([1], [2]), [(1, 0, 13), (2, 13, 18)]),  # a swap between the turns
        (([1, 1, 2], [3]), [(1, 0, 2), (2, 2, 13), (3, 13, 18)]),  # one in the middle, one between
        (([1], [1, 4]), [(1, 0, 14), (4, 14, 18)]),
    ],
)
def test_versions_go_on_over_turns_and_observations_count_to_the_turn_before(
    versions: tuple[list[int], list[int]], spans: list[tuple[int, int, int]]
):
    phrases = list(zip(("?47*83", "3901"), versions, strict=True))
    trajectory, _, _ = run_episode(load(CALCULATOR), phrases)
    assert [(span.version, span.start, span.end) for span in trajectory.spans] == spans
    group = Group(1, 1, make_prompt().token_ids, (trajectory,))
    found = decode_group(encode_group(group)).trajectories[0]  # as the buffer checks it
    assert found.spans == trajectory.spans and found.num_turns == 2


def test_what_is_observed_before_the_first_turn_counts_to_its_version():
    trajectory, engine, _ = run_episode(told(opening="12=", turns=1), [("7", [3])])
    assert trajectory.loss_mask.tolist() == [0, 0, 0, 1, 1]
    assert trajectory.spans == (Span(3, 0, 5),)
    assert engine.requests[0][0][-3:] == encode("12=")


def test_every_turn_has_a_seed_of_its_own_and_the_first_one_that_of_a_single_turn():
    _, engine, _ = run_episode(load(CALCULATOR), [("?1*1", [1]), ("?1*1", [1]), ("1", [1])])
    seeds = [sampling.seed for _, sampling, _ in engine.requests]
    assert seeds == [11, turn_seed(11, 1), turn_seed(11, 2)]
    assert len(set(seeds)) == 3 and all(0 <= seed < 2**63 for seed in seeds)
    assert [name for _, _, name in engine.requests] == ["5.1.0", "5.1.0.turn1", "5.1.0.turn2"]


def test_the_budget_holds_for_turns_and_observations_together():
    phrases = [("?1*1", [1]), ("?2*2", [1]), ("444444444...", [1])]
    trajectory, engine, _ = run_episode(load(CALCULATOR), phrases, max_tokens=20)
    limits = [sampling.max_tokens for _, sampling, _ in engine.requests]
    assert limits == [20, 12, 4]  # a call of 5 tokens and a reply of 3 each
    assert trajectory.num_tokens == 20
    assert trajectory.finish_reason == "length"


def test_an_observation_that_leaves_no_room_for_a_turn_ends_the_episode():
    trajectory, engine, _ = run_episode(told(observation="!1234567=", turns=3), [("7", [1])], max_tokens=11)
    assert len(engine.requests) == 1
    assert trajectory.finish_reason == "length"
    assert trajectory.loss_mask.tolist() == [1, 1]  # no observation at the end: nobody would read it


def test_a_turn_that_is_cut_is_not_shown_to_the_environment():
    trajectory, _, reward = run_episode(told(turns=1), [("777...", [1])], max_tokens=3)
    assert trajectory.finish_reason == "length"
    assert reward.answers[0].finish_reason == "length"


def test_the_limit_of_turns_ends_an_episode_after_its_last_answer_was_seen():
    environment = Told(None, 0, turns=99)
    episodes = Episodes(lambda prompt, seed: environment, max_turns=3)
    trajectory, engine, _ = run_episode(episodes, [("1", [1])] * 3)
    assert (trajectory.finish_reason, trajectory.num_turns, len(engine.requests)) == ("turns", 3, 3)
    assert environment._turns == 96
    assert trajectory.loss_mask[-2:].tolist() == [1, 1]


class Scoring(Told):
    def __init__(self, prompt: Any, seed: int, score: Any):
        super().__init__(prompt, seed, turns=1)
        self._score = score

    async def score(self) -> Any:
        return self._score


@pytest.mark.parametrize(
    ("given", "value", "parts"),
    [
        (0.25, 0.25, {"environment": 0.25}),
        (Score(2.0, {"wins": 1.0}), 2.0, {"environment": 2.0, "wins": 1.0}),
        (np.float32(0.5), 0.5, {"environment": 0.5}),
    ],
)
def test_an_environment_may_give_the_reward_itself(given: Any, value: float, parts: dict[str, float]):
    episodes = Episodes(lambda prompt, seed: Scoring(prompt, seed, given))
    trajectory, _, reward = run_episode(episodes, [("1", [1])])
    assert (trajectory.reward, trajectory.reward_parts) == (value, parts)
    assert reward.answers == []
    assert [score.parts for score in reward.scores] == [parts], "the run's metrics count it"


@pytest.mark.parametrize("given", [float("nan"), float("inf"), "1"])
def test_a_reward_that_is_no_finite_number_fails_the_episode(given: Any):
    episodes = Episodes(lambda prompt, seed: Scoring(prompt, seed, given))
    with pytest.raises(EnvironmentFailed, match="not a finite number"):
        run_episode(episodes, [("1", [1])])


class Broken(Environment):
    """Raises where it is told to."""

    closed: list[bool] = []

    def __init__(self, prompt: Any, seed: int, place: str):
        self._place = place
        self._maybe("__init__")

    def _maybe(self, place: str) -> None:
        if self._place == place:
            raise KeyError(place)

    async def start(self) -> str:
        self._maybe("start")
        return ""

    async def step(self, answer: str) -> Step:
        self._maybe("step")
        return "no step" if self._place == "answer" else Step(is_done=True)  # type: ignore[return-value]

    async def score(self) -> float:
        self._maybe("score")
        return 0.0

    async def close(self) -> None:
        self.closed.append(True)
        self._maybe("close")


@pytest.mark.parametrize("place", ["__init__", "start", "step", "answer", "score", "close"])
def test_whatever_an_environment_raises_fails_the_episode_and_it_is_closed(place: str):
    Broken.closed.clear()
    episodes = Episodes(lambda prompt, seed: Broken(prompt, seed, place))
    with pytest.raises(EnvironmentFailed, match="step' returned str" if place == "answer" else place):
        run_episode(episodes, [("1", [1])])
    assert bool(Broken.closed) is (place != "__init__")


def test_a_run_whose_environment_fails_too_often_ends_loudly():
    """As with a reward that fails: the replica raises, and the run ends with the reason."""
    rate = ErrorRate(0.5)
    reward = TotalReward(build_parts([RewardPart(fn="exact_match")]), rate)
    broken = Episodes(lambda prompt, seed: Broken(prompt, seed, "step"))

    async def run() -> None:
        engine = ScriptedPhrases(TOKENIZER, [("1", [1])] * FIRST_ANSWERS)
        runner = MultiTurn(engine, TOKENIZER, broken, reward, has_chats=False)  # type: ignore[arg-type]
        for _ in range(FIRST_ANSWERS - 1):
            with pytest.raises(EnvironmentFailed):
                await runner.run(make_prompt(), Sampling(1.0, 8, 1), "1.0.0")
        with pytest.raises(RewardsFailed, match="'step' raised KeyError"):
            await runner.run(make_prompt(), Sampling(1.0, 8, 1), "1.0.0")

    asyncio.run(run())
    assert rate.kinds == {"raised": FIRST_ANSWERS}


def test_length_costs_what_all_turns_and_observations_have_together():
    async def run() -> float:
        engine = ScriptedPhrases(TOKENIZER, [("?47*83", [1]), ("3901", [1])])
        overlong = Overlong(max_tokens=20, buffer_tokens=10, penalty=1.0)
        episodes = load(CALCULATOR)
        runner = MultiTurn(engine, TOKENIZER, episodes, ExactMatch(), False, overlong)  # type: ignore[arg-type]
        return (await runner.run(make_prompt(), Sampling(1.0, 20, 1), "1.0.0")).reward

    assert asyncio.run(run()) == pytest.approx(1.0 - 0.8)  # 18 tokens


class Sleeping(Told):
    async def step(self, answer: str) -> Step:
        await asyncio.sleep(3600)
        return Step()


def test_an_environment_that_does_not_answer_runs_into_its_deadline(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("rollout_service.environments.runner.CALL_DEADLINE_S", 0.01)
    with pytest.raises(EnvironmentFailed, match="time limit"):
        run_episode(Episodes(Sleeping), [("1", [1])])


def test_an_environment_is_made_with_the_prompt_and_the_seed_of_its_sample():
    made = []
    episodes = Episodes(lambda prompt, seed: made.append((prompt, seed)) or Told(prompt, seed, turns=1))
    prompt = make_prompt()
    run_episode(episodes, [("1", [1])], prompt)
    assert made == [(prompt.prompt, 11)]


def test_a_transcript_of_any_turns_keeps_every_token_once_and_in_order():
    rng = np.random.default_rng(0)
    for _ in range(50):
        transcript, wanted, version = Transcript([1, 2], 10_000), [], 1
        for _ in range(rng.integers(1, 6)):
            told_ids = rng.integers(0, 9, rng.integers(0, 4)).tolist()
            transcript.observe(told_ids)
            lengths = rng.integers(1, 4, rng.integers(1, 3)).tolist()
            bounds = list(itertools.accumulate(lengths, initial=0))
            spans = []
            for start, end in itertools.pairwise(bounds):
                spans.append(Span(version, start, end))
                version += 1
            version -= int(rng.integers(0, 2))
            said = rng.integers(0, 9, bounds[-1])
            transcript.say(
                Completion(said.astype(np.int32), np.zeros(len(said), np.float32), tuple(spans), "stop")
            )
            wanted += [(token, 0) for token in told_ids] + [(token, 1) for token in said.tolist()]
        found = transcript.trajectory(Score(0.0), 0.0, "done")
        assert list(zip(found.response_ids.tolist(), found.loss_mask.tolist(), strict=True)) == wanted
        decode_group(encode_group(Group(1, 1, np.array([1, 2], np.int32), (found,))))
