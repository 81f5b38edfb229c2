"""Protocol of a user's environment for episodes of several turns, and its failures.

An `Environment` belongs to one episode: it is made for a prompt, gets the model's text, answers, and is
thrown away. It deals in text; tokens, masks, log-probs and versions belong to the runner.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from rollout_service.rewards.score import RewardError, Score

if TYPE_CHECKING:
    from rollout_service.data.prompts import Prompt

Message = Mapping[str, str]
"""A chat message: `role` and `content`."""
Observation = str | Sequence[Message]
"""Next input of the model. In a chat, plain text is one message of the user."""


class EnvironmentFailed(RewardError):
    """An environment raised, took too long or answered nonsense; its group fails as after a failed reward."""


@dataclass(frozen=True)
class Step:
    """Answer of an environment to one turn of the model.

    Attributes:
        observation: Input of the model before its next turn; not used once `is_done`.
        is_done: Whether the episode ends here.
    """

    observation: Observation = ""
    is_done: bool = False


class Environment(Protocol):
    """One episode. Derive from it and write `step`; the rest has defaults.

    It is made as `YourClass(prompt, seed, **arguments)`: the prompt with its `content`, `ground_truth`
    and `extra_info`; a seed that differs between the samples of a group; the arguments from the
    configuration. What it raises fails its group. Slow work belongs into `asyncio.to_thread`.
    """

    async def start(self) -> Observation:
        """Return what the model reads after the prompt; nothing by default."""
        return ""

    @abstractmethod
    async def step(self, answer: str) -> Step:
        """Answer the model's turn. A turn that was cut at the token limit is not shown."""

    async def score(self) -> float | Score | None:
        """Return the reward, once, at the end; None leaves the last answer to `reward.fn`."""
        return None

    async def close(self) -> None:
        """Let go of what was opened; called however the episode ended."""
        return


EnvironmentFactory = Callable[["Prompt", int], Environment]
"""Makes the environment of one episode from its prompt and its seed."""
METHODS = ("start", "step", "score", "close")
