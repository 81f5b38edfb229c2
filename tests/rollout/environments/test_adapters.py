"""Environments of other libraries, by hand-written classes of their interfaces: neither is installed."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace
from typing import Any

import pytest

from asyncrl.core.errors import ConfigError
from rollout_service.environments import EnvironmentFailed
from rollout_service.environments.adapters.gymnasium_text import GymnasiumText
from rollout_service.environments.adapters.verifiers_library import VerifiersLibrary
from rollout_service.environments.registry import Episodes
from rollout_service.tasks.tiny_text import build_tokenizer
from tests.rollout.environments.parts import load, make_prompt, run_episode


class CountDown:
    """Gymnasium's interface (1.0): text in, text out; the player must repeat a number that counts down."""

    made: list[dict[str, Any]] = []

    def __init__(self, id: str, **arguments: Any) -> None:
        self.made.append({"id": id, **arguments})
        self.is_closed = False

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        self.left = seed or 0
        return f"{self.left}=", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        is_right = action == str(self.left)
        self.left -= 1
        return f"{self.left}=", float(is_right), self.left == 0, not is_right, {}

    def close(self) -> None:
        self.made.append({"closed": True})


def gymnasium_episodes(**arguments: Any) -> Episodes:
    CountDown.made.clear()
    return Episodes(GymnasiumText("CountDown-v0", arguments, CountDown))


def test_a_gymnasium_episode_starts_with_its_observation_and_sums_its_rewards():
    trajectory, engine, reward = run_episode(
        gymnasium_episodes(render_mode="ansi"), [("3", [1]), ("2", [1]), ("1", [1])], make_prompt(seed=3)
    )
    assert CountDown.made == [{"id": "CountDown-v0", "render_mode": "ansi"}, {"closed": True}] * 2
    assert engine.requests[0][0][-2:] == [3, 13]
    assert (trajectory.reward, trajectory.finish_reason, trajectory.num_turns) == (3.0, "done", 3)
    assert trajectory.reward_parts == {"environment": 3.0} and reward.answers == []


def test_a_registered_environment_begins_with_an_observation_if_its_record_says_so():
    assert load({"name": "gymnasium", "id": "CountDown-v0", "make": CountDown}).opens
    assert not load("tools").opens


def test_a_gymnasium_episode_that_is_truncated_ends():
    trajectory, _, _ = run_episode(gymnasium_episodes(), [("7", [1]), ("9", [1])], make_prompt())
    assert (trajectory.reward, trajectory.finish_reason) == (1.0, "done")  # row 7 is the seed


def test_a_gymnasium_environment_that_cannot_be_made_is_refused_before_any_episode():
    def make(id: str, **arguments: Any) -> Any:
        raise LookupError(f"no {id}")

    with pytest.raises(ConfigError, match="'Other-v0' cannot be made: LookupError: no Other-v0"):
        GymnasiumText("Other-v0", {}, make)


def test_an_observation_that_is_no_text_fails_the_episode(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(CountDown, "reset", lambda self, seed: (0, {}))
    with pytest.raises(EnvironmentFailed, match="observes a int"):
        run_episode(gymnasium_episodes(), [("7", [1])])


class Rubric:
    async def score_rollout(self, state: dict[str, Any], score_sem: Any) -> None:
        state["reward"] = float(state["completion"][-1]["content"] == state["answer"])
        state["metrics"] = {"exact": state["reward"], "turns": state["turn"]}


class OldRubric:
    async def score_rollout(
        self, prompt: Any, completion: Any, answer: str, state: dict[str, Any], **others: Any
    ) -> Any:
        reward = float(completion[-1]["content"] == answer)
        return SimpleNamespace(reward=reward, metrics={"exact": reward, "turns": state["turn"]})


class Hint:
    """A `MultiTurnEnv` of `verifiers` 0.1.8 and later: says `again` until the answer is right."""

    rubric: Any = Rubric()

    async def init_state(
        self,
        input: Any,  # noqa: A002 - the library's name
        client: Any,
        model: str,
        sampling_args: Any,
    ) -> dict[str, Any]:
        return {**input, "trajectory": [], "is_own": True}

    async def setup_state(self, state: dict[str, Any]) -> dict[str, Any]:
        assert state.get("is_own", False) is not isinstance(self, OldHint)
        return state

    async def env_response(self, messages: list[Any], state: dict[str, Any], **others: Any) -> Any:
        assert messages[-1]["role"] == "assistant"
        return [{"role": "user", "content": "again"}]

    async def is_completed(self, state: dict[str, Any], **others: Any) -> bool:
        return bool(state["completion"][-1]["content"] == state["answer"])


class OldHint(Hint):
    """As releases before it: the state comes back too, messages are handed to `is_completed`."""

    rubric: Any = OldRubric()
    init_state: Any = None

    async def env_response(self, messages: list[Any], state: dict[str, Any], **others: Any) -> Any:
        return await super().env_response(messages, state), state

    async def is_completed(self, messages: list[Any], state: dict[str, Any], **others: Any) -> bool:  # type: ignore[override]
        return await super().is_completed(state)


@pytest.mark.parametrize("environment", [Hint, OldHint])
def test_an_episode_of_verifiers_speaks_in_turn_and_is_scored_by_its_rubric(environment: type):
    tokenizer = build_tokenizer()
    loaded = []

    def load(*names: str, **arguments: Any) -> Any:
        loaded.append((names, arguments))
        return environment()

    episodes = Episodes(VerifiersLibrary("hint", {"level": 1}, load))
    prompt = make_prompt(({"role": "user", "content": "2+3?"},), "5", tokenizer)
    trajectory, _, reward = run_episode(episodes, [("4", [1]), ("5", [1])], prompt, 400, tokenizer)
    assert loaded == [(("hint",), {"level": 1})]
    assert (trajectory.reward, trajectory.finish_reason, trajectory.num_turns) == (1.0, "done", 2)
    assert trajectory.reward_parts == {"environment": 1.0, "exact": 1.0, "turns": 2.0}
    assert reward.answers == []
    told = tokenizer.decode(trajectory.response_ids[trajectory.loss_mask == 0].tolist())
    assert told == "\n<|im_start|>user\nagain<|im_end|>\n<|im_start|>assistant\n"


def test_an_environment_of_verifiers_without_turns_and_a_prompt_without_messages_are_refused():
    with pytest.raises(ConfigError, match="has no env_response, is_completed, rubric"):
        VerifiersLibrary("x", None, lambda *a, **k: object())
    with pytest.raises(EnvironmentFailed, match="not a chat"):
        run_episode(Episodes(VerifiersLibrary("x", None, lambda *a, **k: Hint())), [("1", [1])])


@pytest.mark.parametrize("library", ["gymnasium", "verifiers"])
def test_a_library_that_is_not_installed_is_named_with_the_way_to_install_it(library: str):
    if importlib.util.find_spec(library) is not None:
        pytest.skip(f"{library} is installed here")
    with pytest.raises(ConfigError, match=f"{library} is not installed") as caught:
        load({"name": library, "id": "x"})
    assert caught.value.hint.startswith(f"pip install {library}")
