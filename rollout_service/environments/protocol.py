"""Protocol of a user's environment for episodes of several turns, and its failures.

An `Environment` belongs to one episode: it is made for a prompt, gets the model's text, answers, and is
thrown away. It deals in text; tokens, masks, log-probs and versions belong to the runner.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

from asyncrl.core.states import Reason
from rollout_service.rewards.score import RewardError, Score

if TYPE_CHECKING:
    from rollout_service.data.prompts import Prompt

Message = Mapping[str, str]
"""A chat message: `role` and `content`."""
Observation = str | Sequence[Message]
"""Next input of the model. In a chat, plain text is one message of the user."""

PlainObservation = str | list[dict[str, object]]
"""In the form in which it is recorded."""


class EnvironmentFailed(RewardError):
    """An environment raised, took too long or answered nonsense; its group fails as after a failed reward.

    An environment that raises it itself says by `reason` whose fault that is.
    """

    BLAMED = Reason.ENVIRONMENT


class NotRestored(EnvironmentFailed):
    """An environment did not become what it was: its episode begins anew."""


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

    Attributes:
        is_deterministic: The same answers bring the same steps, which change nothing outside. With that, or
            a `restore` of its own, an episode goes on elsewhere (`rollout.resume_partial`).
    """

    is_deterministic: ClassVar[bool] = False

    async def start(self) -> Observation:
        """Return what the model reads after the prompt; nothing by default."""
        return ""

    @abstractmethod
    async def step(self, answer: str) -> Step:
        """Answer the model's turn. A turn that was cut at the token limit is not shown."""

    async def restore(self, turns: Sequence[tuple[str, Step]]) -> None:
        """Become what another object was after these turns; called after `start`. By default steps are made
        again.

        Raises:
            NotRestored: It cannot; the episode begins anew.
        """
        for answer, step in turns:
            if not _are_equal(await self.step(answer), step):
                raise NotRestored("a step that was made again is another one")

    async def score(self) -> float | Score | None:
        """Return the reward, once, at the end; None leaves the last answer to `reward.fn`."""
        return None

    async def close(self) -> None:
        """Let go of what was opened; called however the episode ended."""
        return


def is_restorable(cls: object) -> bool:
    """Tell whether a class of environments says how its episodes go on elsewhere."""
    restore = getattr(cls, "restore", None)
    has_own = restore is not None and restore is not Environment.restore
    return has_own or (restore is not None and getattr(cls, "is_deterministic", False) is True)


def plain(observation: Observation) -> PlainObservation:
    """Return an observation so that one that was recorded and read back is equal to it."""
    if isinstance(observation, str):
        return observation
    return [{**one} for one in observation or ()]


def _are_equal(one: Step, other: Step) -> bool:
    is_same = one.is_done or plain(one.observation) == plain(other.observation)
    return is_same and one.is_done == other.is_done


EnvironmentFactory = Callable[["Prompt", int], Environment]
"""Makes the environment of one episode from its prompt and its seed."""
METHODS = ("start", "step", "score", "close")
