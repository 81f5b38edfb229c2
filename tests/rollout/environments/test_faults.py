"""Faults of environments and models: whatever they say, at most their group fails."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from asyncrl.buffer.messages import LeaseGrant
from asyncrl.core.errors import ConfigError, WireError
from asyncrl.core.experience import MAX_REWARD_PARTS, UNFINISHED, Group
from asyncrl.core.runtime.clock import SystemClock
from rollout_service.data import functions
from rollout_service.data.prompts import PromptSet
from rollout_service.engine.metered import MeteredEngine
from rollout_service.engine.protocol import Interrupted, Sampling
from rollout_service.engine.scripted.engine import ScriptedEngine
from rollout_service.environments import Environment, EnvironmentFailed, Step
from rollout_service.environments import runner as runner_module
from rollout_service.environments.registry import Episodes
from rollout_service.environments.runner import MultiTurn
from rollout_service.environments.tools.tool import cut_result
from rollout_service.environments.tools.tool_use import ToolUse
from rollout_service.rewards.score import RewardError, Score
from rollout_service.rewards.served.processes.pool_process import load_from_file
from rollout_service.sampling.groups import GroupRunner, GroupSettings
from rollout_service.user_file import import_file
from tests.rollout.environments.parts import (
    TOKENIZER,
    ExactMatch,
    ScriptedPhrases,
    load,
    make_prompt,
    run_episode,
)

SURROGATE = "\ud800"


def load_function(path: Path) -> Any:
    return functions.load_function(f"{path}:read")


def load_reward_function(path: Path) -> Any:
    return load_from_file(path, "read")


class Told(Environment):
    """Says `observation` after its first turn, and gives `score` at the end."""

    def __init__(self, prompt: Any, seed: int, observation: Any = "", opening: Any = "", score: Any = None):
        self._observation, self._opening, self._score = observation, opening, score
        self._num_turns = 0

    async def start(self) -> Any:
        return self._opening

    async def step(self, answer: str) -> Step:
        self._num_turns += 1
        return Step(self._observation, is_done=self._num_turns == 2)

    async def score(self) -> Any:
        return self._score


def told(**arguments: Any) -> Episodes:
    return Episodes(lambda prompt, seed: Told(prompt, seed, **arguments))


@pytest.mark.parametrize(
    "observation",
    [
        f"!{SURROGATE}=",
        5,
        None,
        ["text"],
        [{"role": "user"}],
        [{"role": "user", "content": None}],
        [{"content": "1"}],
    ],
    ids=ascii,
)
def test_an_observation_that_is_no_text_fails_its_episode(observation: Any):
    with pytest.raises(EnvironmentFailed, match="observation"):
        run_episode(told(observation=observation), [("1", [1]), ("2", [1])])
    if observation is not None:
        with pytest.raises(EnvironmentFailed, match="observation"):
            run_episode(told(opening=observation), [("1", [1]), ("2", [1])])


class Plain(Told):
    def step(self, answer: str) -> Step:  # type: ignore[override]
        raise KeyError("x")


def test_a_step_that_is_no_coroutine_is_refused_at_the_start_and_fails_its_episode(tmp_path: Path):
    with pytest.raises(EnvironmentFailed, match="KeyError"):
        run_episode(Episodes(Plain), [("1", [1])])
    (tmp_path / "mine.py").write_text(
        "from rollout_service.environments import Environment, Step\n"
        "class Mine(Environment):\n"
        "    def step(self, answer):\n        return Step(is_done=True)\n"
    )
    with pytest.raises(ConfigError, match="step must be `async def`"):
        load("mine.py:Mine", tmp_path)


def test_the_reason_of_a_failure_can_be_sent_whatever_stands_in_it():
    assert RewardError(f"said {SURROGATE}").message == "said \\ud800"


def test_a_result_is_text_that_can_be_tokenised():
    assert cut_result(f"a{SURROGATE}") == "a\\ud800"


@pytest.mark.parametrize(
    ("name", "arguments"),
    [("\\ud800", "{}"), ("python", '{"expression": "\'\\\\ud800\'"}')],
    ids=["a tool's name", "a result"],
)
def test_what_a_model_calls_is_told_back_as_text_that_can_be_tokenised(name: str, arguments: str):
    call = f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'
    found = asyncio.run(ToolUse({"python": {"timeout_s": 30.0}})(None, 0).step(call))  # type: ignore[arg-type]
    (message,) = found.observation
    assert "ud800" in message["content"] and message["content"].isascii()  # type: ignore[index]


@pytest.mark.parametrize(
    "score",
    [
        1e300,
        Score(-1e39),
        Score(0.0, {"": 1.0}),
        Score(0.0, {"x" * 65: 1.0}),
        Score(0.0, {SURROGATE: 1.0}),
        Score(0.0, {str(number): 0.0 for number in range(MAX_REWARD_PARTS)}),  # and its own value
    ],
    ids=["double", "negative", "no name", "long name", "surrogate", "many"],
)
def test_a_score_that_could_not_be_pushed_fails_its_episode(score: Any):
    with pytest.raises(EnvironmentFailed, match="score"):
        run_episode(told(score=score), [("1", [1]), ("2", [1])])


def lease() -> LeaseGrant:
    return LeaseGrant(1, 1, 0, 0, 0, 0, 10.0)


def make_group_runner(engine: Any, episodes: Episodes, group_size: int) -> GroupRunner:
    multi_turn = MultiTurn(engine, TOKENIZER, episodes, ExactMatch(), has_chats=False)
    prompts = PromptSet((make_prompt(),), "digest")
    return GroupRunner(multi_turn, prompts, GroupSettings(0, group_size, 1.0, 500))


def test_siblings_with_too_many_parts_between_them_fail_their_group():
    numbers = iter(range(2))

    def make(prompt: Any, seed: int) -> Environment:
        first = next(numbers) * 20
        parts = {str(number): 0.0 for number in range(first, first + 20)}
        return Told(prompt, seed, score=Score(0.0, parts))

    engine = ScriptedPhrases(TOKENIZER, [("1", [1])] * 4)
    with pytest.raises(WireError, match="41 reward parts"):
        asyncio.run(make_group_runner(engine, Episodes(make), 2).run(lease()))


class InItsTool(Environment):
    """The first one waits for `go` in its first step; the others end at once."""

    made: list[InItsTool] = []
    go: asyncio.Event

    def __init__(self, prompt: Any, seed: int):
        self.made.append(self)
        self._is_slow = len(self.made) == 1

    async def step(self, answer: str) -> Step:
        if self._is_slow:
            await self.go.wait()
        return Step("1", is_done=not self._is_slow)

    async def score(self) -> float:
        return 1.0


def test_a_sample_that_is_in_its_tool_when_its_replica_leaves_does_not_lose_its_siblings():
    async def drain() -> Group:
        InItsTool.made.clear()
        InItsTool.go = asyncio.Event()
        engine = MeteredEngine(ScriptedEngine(TOKENIZER.eos_token_id), SystemClock())
        await engine.start()
        runner = make_group_runner(engine, Episodes(InItsTool, max_turns=10**6), 3)
        group = asyncio.create_task(runner.run(lease()))
        while runner._num_ended.total() < 2:
            await asyncio.sleep(0)
        await engine.interrupt()
        InItsTool.go.set()
        return await asyncio.wait_for(group, 10.0)

    group = asyncio.run(drain())
    assert sorted(one.finish_reason for one in group.trajectories) == ["done", "done", UNFINISHED]


class Hanging(Environment):
    """Fails to close: it raises, or hangs."""

    closing: Any = None

    def __init__(self, prompt: Any, seed: int):
        pass

    async def step(self, answer: str) -> Step:
        raise Interrupted("a drain came", completion=None)  # type: ignore[arg-type]

    async def close(self) -> None:
        await self.closing()


async def fail_to_close() -> None:
    raise KeyError("close")


async def hang() -> None:
    await asyncio.sleep(3600)


@pytest.mark.parametrize("closing", [fail_to_close, hang])
def test_a_close_that_fails_hides_no_other_end_of_an_episode(closing: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(runner_module, "CLOSE_DEADLINE_S", 0.01)
    monkeypatch.setattr(Hanging, "closing", staticmethod(closing))
    with pytest.raises(Interrupted, match="a drain came"):
        run_episode(Episodes(Hanging), [("1", [1])])


def looping_calls(count: int) -> str:
    arguments = '{"expression": "sum(range(10**12))"}'
    return f'<tool_call>{{"name": "python", "arguments": {arguments}}}</tool_call>' * count


def test_a_call_that_used_up_its_time_is_the_last_of_its_turn():
    make = ToolUse({"python": {"timeout_s": 1.0}})
    found = asyncio.run(make(None, 0).step(looping_calls(4)))  # type: ignore[arg-type]
    first, *others = [message["content"] for message in found.observation]  # type: ignore[index]
    assert first.startswith("error: it took")
    assert others == ["error: not made, for this turn's calls took too long"] * 3


def test_a_turn_that_waits_too_long_for_its_tool_fails_without_blame_of_the_model(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr("rollout_service.environments.tools.tool_use.TURN_DEADLINE_S", 0.05)
    make = ToolUse({"python": {"timeout_s": 30.0, "processes": 1}})

    async def queue() -> list[Any]:
        steps: list[Coroutine[Any, Any, Step]] = [
            make(None, 0).step(looping_calls(2))  # type: ignore[arg-type]
            for _ in range(3)
        ]
        return await asyncio.gather(*steps, return_exceptions=True)

    assert [one.reason for one in asyncio.run(queue())] == ["timeout"] * 3


DATACLASS = (
    "from __future__ import annotations\nfrom dataclasses import dataclass\n"
    "@dataclass\nclass State:\n    number: int = 0\n"
)


def test_an_environment_s_file_may_hold_dataclasses(tmp_path: Path):
    (tmp_path / "mine.py").write_text(
        DATACLASS + "from rollout_service.environments import Environment, Step\n"
        "class Mine(Environment):\n"
        "    def __init__(self, prompt, seed):\n        self.state = State()\n"
        "    async def step(self, answer):\n        return Step(is_done=True)\n"
    )
    trajectory, _, _ = run_episode(load("mine.py:Mine", tmp_path), [("3901", [1])])
    assert trajectory.reward == 1.0


@pytest.mark.parametrize("load_from", [load_function, load_reward_function])
def test_the_files_of_filters_and_rewards_may_hold_dataclasses(tmp_path: Path, load_from: Any):
    path = tmp_path / "mine.py"
    path.write_text(DATACLASS + "def read(*given):\n    return State().number\n")
    assert load_from(path)(None) == 0


def test_two_files_of_one_name_are_two_modules(tmp_path: Path):
    for number in (1, 2):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "mine.py").write_text(f"VALUE = {number}\n")
    modules = [import_file(tmp_path / str(number) / "mine.py", "the file") for number in (1, 2)]
    assert [module.VALUE for module in modules] == [1, 2]
    assert [sys.modules[module.__name__] for module in modules] == modules


def test_a_sampling_that_comes_after_the_interrupt_has_no_token():
    async def ask() -> None:
        engine = MeteredEngine(ScriptedEngine(TOKENIZER.eos_token_id), SystemClock())
        await engine.start()
        await engine.interrupt()
        await engine.generate([1], Sampling(1.0, 8, 1), "late")

    with pytest.raises(Interrupted) as caught:
        asyncio.run(ask())
    assert len(caught.value.completion.token_ids) == 0
