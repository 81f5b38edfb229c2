"""Episodes of several turns: the model and an environment speak in turn, token-exact.

    generate -> say -> step -> (observe -> generate -> ...) -> score

Invariant: what the model said is never tokenised again; `rollout.max_tokens` holds for all turns and
observations together. The episode ends as `done` (the environment says so), `turns` (the limit of
turns), or `length` (the token limit, also where the next observation would not fit).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Protocol, TypeVar

from asyncrl.core.errors import AsyncrlError, WireError
from asyncrl.core.experience import Trajectory, check_reward
from asyncrl.core.states import FAILURES, Reason
from rollout_service.data.prompts import TokenizedPrompt
from rollout_service.engine.protocol import Completion, Engine, Sampling
from rollout_service.environments.conversation import ChatTemplate, PlainText, Voice
from rollout_service.environments.protocol import (
    Environment,
    EnvironmentFailed,
    NotRestored,
    Observation,
    Step,
)
from rollout_service.environments.registry import Episodes
from rollout_service.environments.tools.calling import Calls, MakesCalls
from rollout_service.environments.transcript import Transcript
from rollout_service.environments.turns import Turns
from rollout_service.rewards.score import Answer, Reward, RewardError, Score, as_reason, blame, checked_number
from rollout_service.rewards.shaping import Overlong
from rollout_service.sampling.episode import EpisodeRunner, SingleTurn
from rollout_service.sampling.turn_journal import EpisodeRecord

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

T = TypeVar("T")

SCORED = "environment"
"""Name of the reward part that an environment itself gives."""
CALL_DEADLINE_S = 60.0
"""Of one call of an environment's method."""
CLOSE_DEADLINE_S = 5.0
"""Of the call that ends an episode which failed or was ended: a drain waits for it."""


class JudgingReward(Reward, Protocol):
    """A reward that also hears of what environments did: scored their own episodes, or failed."""

    def note_scored(self, score: Score, source: str) -> None:
        """Count an episode of a data source that its environment scored."""

    def note_failed(self, error: RewardError, source: str) -> None:
        """Count it. Raises RewardsFailed after too many."""


class MultiTurn:
    """Runs episodes in environments of one kind.

    Args:
        episodes: Makes the environments, and says how many turns they have.
        reward: Judges the last answer of episodes whose environment gives no reward.
        has_chats: Whether any prompt is a chat; its tokenizer's template is then checked here.
        overlong: Penalty on the reward for length.

    Raises:
        ConfigError: The chat template cannot be used; see `conversation.ChatTemplate`.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: PreTrainedTokenizerBase,
        episodes: Episodes,
        reward: JudgingReward,
        has_chats: bool,
        overlong: Overlong | None = None,
    ) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._episodes = episodes
        self._reward = reward
        self._overlong = overlong
        self._plain = PlainText(tokenizer)
        self._chat = ChatTemplate(tokenizer, episodes.roles, episodes.tools) if has_chats else None

    async def run(
        self,
        prompt: TokenizedPrompt,
        sampling: Sampling,
        episode_id: str,
        partial: Trajectory | EpisodeRecord | None = None,
    ) -> Trajectory:
        """Run one episode, from its recorded turns on. A beginning without a record is not used.

        Raises:
            EngineError: A turn failed.
            LeaseLost: Another attempt has the ticket.
            RewardError: The environment or the reward failed.
        """
        record = partial if isinstance(partial, EpisodeRecord) else EpisodeRecord(_key_of(episode_id), None)
        try:
            played = await self._play_recorded(prompt, sampling, episode_id, record)
        except EnvironmentFailed as error:
            self._reward.note_failed(error, prompt.prompt.data_source)
            raise
        transcript, answer, given = played
        if given is not None:
            self._reward.note_scored(given, prompt.prompt.data_source)
        score = await self._reward.score(answer) if given is None else given
        reward = score.value
        if self._overlong is not None:
            reward = self._overlong.shape(reward, transcript.num_tokens)
        return transcript.trajectory(score, reward, answer.finish_reason)

    async def _play_recorded(
        self, prompt: TokenizedPrompt, sampling: Sampling, episode_id: str, record: EpisodeRecord
    ) -> tuple[Transcript, Answer, Score | None]:
        try:
            return await self._play(prompt, sampling, episode_id, record)
        except NotRestored as error:
            if any(turn.begun for turn in record.turns if not turn.is_shared):
                error.reason = Reason.NOT_RETRYABLE  # its calls must not be made again
                raise
            log.warning("episode %s begins anew: %s", episode_id, error)
            record.forget()
            return await self._play(prompt, sampling, episode_id, record)

    async def _play(
        self, prompt: TokenizedPrompt, sampling: Sampling, episode_id: str, record: EpisodeRecord
    ) -> tuple[Transcript, Answer, Score | None]:
        """Return the tokens, the last answer, and the environment's own score if it gives one."""
        transcript = Transcript(prompt.token_ids.tolist(), sampling.max_tokens)
        seed = sampling.seed if record.environment_seed is None else record.environment_seed
        environment = self._make(prompt, seed)
        if isinstance(environment, MakesCalls):
            environment.calls = Calls(record)
        try:
            turns = Turns(self._engine, sampling, transcript, episode_id, record)
            said, finish_reason = await self._converse(environment, prompt, turns)
            await record.flush()
            given = _as_score(await _guarded(environment.score))
        except BaseException:
            await _close_ended(environment)
            raise
        await _guarded(environment.close)
        return transcript, Answer(prompt.prompt, said, finish_reason, transcript.num_tokens), given

    async def _converse(
        self, environment: Environment, prompt: TokenizedPrompt, turns: Turns
    ) -> tuple[str, str]:
        """Speak in turn to the end; return the model's last answer and the reason of the end."""
        voice, transcript, record = self._voice(prompt), turns.transcript, turns.record
        first = await _guarded(environment.start)
        opening = self._opening_ids(voice, first)
        if len(opening) >= transcript.num_left:
            raise EnvironmentFailed(f"the first observation has {len(opening)} tokens, over the limit")
        transcript.observe(opening)
        if record.turns:
            await turns.take_up(first)
            done = [(self._decode(one.completion), one.step) for one in record.turns if one.step is not None]
            await _guarded(environment.restore, done)
        while True:
            completion = await turns.take(first)
            said = self._decode(completion)
            if completion.finish_reason == "length":
                return said, "length"
            step = turns.recorded_step or _checked(await _guarded(environment.step, said))
            if step.is_done:
                return said, "done"
            if transcript.num_turns == self._episodes.max_turns:
                return said, "turns"
            told = _told_ids(partial(voice.observation_ids, completion.token_ids.tolist()), step.observation)
            if len(told) >= transcript.num_left:
                return said, "length"
            transcript.observe(told)
            if turns.recorded_step is None:
                record.step(step)

    def _opening_ids(self, voice: Voice, observation: Observation) -> list[int]:
        if self._episodes.opens:
            return _told_ids(voice.opening_ids, observation or "")
        return _told_ids(partial(voice.observation_ids, []), observation) if observation else []

    def _make(self, prompt: TokenizedPrompt, seed: int) -> Environment:
        try:
            return self._episodes.make(prompt.prompt, seed)
        except AsyncrlError:
            raise
        except Exception as error:  # a user's class may raise anything; its group fails with this reason
            raise EnvironmentFailed(_told("__init__", error), reason=blame(error)) from error

    def _voice(self, prompt: TokenizedPrompt) -> Voice:
        if isinstance(prompt.prompt.content, str):
            return self._plain
        assert self._chat is not None, "the owner says whether there are chats"
        return self._chat

    def _decode(self, completion: Completion) -> str:
        text: str = self._tokenizer.decode(completion.token_ids.tolist(), skip_special_tokens=True)
        return text


def build_runner(
    engine: Engine,
    tokenizer: PreTrainedTokenizerBase,
    episodes: Episodes | None,
    reward: JudgingReward,
    prompts: Sequence[TokenizedPrompt],
    overlong: Overlong | None = None,
) -> EpisodeRunner:
    """Return what runs the episodes of these prompts: of one turn without `episodes`.

    Raises:
        ConfigError: See `MultiTurn`.
    """
    if episodes is None:
        return SingleTurn(engine, tokenizer, reward, overlong)
    has_chats = any(not isinstance(prompt.prompt.content, str) for prompt in prompts)
    return MultiTurn(engine, tokenizer, episodes, reward, has_chats, overlong)


def _key_of(episode_id: str) -> tuple[int, int, int] | None:
    """Return (ticket, attempt, sample) of an episode of training."""
    parts = episode_id.split(".")
    if len(parts) != 3 or not all(map(str.isdecimal, parts)):
        return None
    ticket, attempt, sample = map(int, parts)
    return ticket, attempt, sample


async def _guarded(method: Callable[..., Awaitable[T]], *arguments: object) -> T:
    """Call a method of an environment, with a deadline. Raises EnvironmentFailed."""
    what = method.__name__
    try:
        async with asyncio.timeout(CALL_DEADLINE_S):
            return await method(*arguments)
    except AsyncrlError:
        raise
    except TimeoutError as error:
        told = f"the environment's '{what}' ran into a time limit: {error}"
        raise EnvironmentFailed(told, reason=Reason.TIMEOUT) from error
    except Exception as error:  # a user's method may raise anything; its group fails with this reason
        raise EnvironmentFailed(_told(what, error), reason=blame(error)) from error


async def _close_ended(environment: Environment) -> None:
    """Close the environment of an episode that failed or was ended; the reason of that end stays."""
    try:
        async with asyncio.timeout(CLOSE_DEADLINE_S):
            await environment.close()
    except Exception as error:  # a user's method may raise anything, and the episode has ended as it is
        log.warning("%s", _told("close", error))


def _told_ids(tell: Callable[[Observation], list[int]], observation: Observation) -> list[int]:
    """Return the tokens of an observation. Raises EnvironmentFailed: no tokens can be made of it."""
    try:
        return tell(observation)
    except EnvironmentFailed:
        raise
    except AsyncrlError as error:
        raise EnvironmentFailed(error.message, hint=error.hint) from error
    except Exception as error:  # a template or a tokenizer may raise anything at what is no text
        what = f"an observation cannot be tokenised: {type(error).__name__}: {error}"
        raise EnvironmentFailed(what) from error


def _told(what: str, error: Exception) -> str:
    return f"the environment's '{what}' raised {type(error).__name__}: {error}"


def _checked(step: Step) -> Step:
    if not isinstance(step, Step):
        raise EnvironmentFailed(f"the environment's 'step' returned {type(step).__name__}, not a Step")
    return step


def _as_score(given: float | Score | None) -> Score | None:
    """Return what an environment said, its value as the first part: evaluations judge by that one.

    Raises:
        EnvironmentFailed: It is no finite number, or a group with it could not be pushed.
    """
    if given is None:
        return None
    told = given if isinstance(given, Score) else Score(_finite(given))
    if told.reason in FAILURES:
        raise EnvironmentFailed(
            f"the environment says that it failed: {told.reason}", reason=Reason(told.reason)
        )
    others = {name: value for name, value in told.parts.items() if name != SCORED}
    score = Score(
        told.value, {SCORED: told.value, **others}, as_reason(told.reason) if told.value <= 0 else ""
    )
    try:
        check_reward(score.value, score.parts)
    except WireError as error:
        raise EnvironmentFailed(f"the environment's 'score' cannot be sent: {error.message}") from error
    return score


def _finite(given: float) -> float:
    try:
        return checked_number(SCORED, given)
    except RewardError as error:
        what = f"the environment's 'score' returned {given!r:.60}, which is not a finite number"
        raise EnvironmentFailed(what, kind=error.kind) from error
