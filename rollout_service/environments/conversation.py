"""Observations as tokens: how a model is told something between two of its turns.

A chat's observation is what the tokenizer's chat template puts between the end of an answer and the
start of the next one. It is cut out of a fixed dummy conversation, so that nothing that was said is
ever rendered or tokenised again. Invariant: what comes out may be appended to any conversation.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from asyncrl.core.errors import ConfigError
from rollout_service.environments.protocol import EnvironmentFailed, Message, Observation

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

QUESTION: Message = {"role": "user", "content": "7"}
ANSWERS = ("12", "34")
"""Two answers without a common end: what follows both alike is the template's."""
THOUGHT = "<think>\n5\n</think>\n\n"
MAX_SHARED_TOKENS = 8


class Voice(Protocol):
    """A way to tell a model something."""

    def opening_ids(self, observation: Observation) -> list[int]:
        """Return the tokens between a prompt of an environment that `opens` and the first turn."""

    def observation_ids(self, said_ids: Sequence[int], observation: Observation) -> list[int]:
        """Return the tokens between `said_ids`, a turn of the model, and its next turn."""


class PlainText:
    """Observations as they are, for prompts that are plain text: no roles, no special tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer

    def opening_ids(self, observation: Observation) -> list[int]:
        return self.observation_ids([], observation)

    def observation_ids(self, said_ids: Sequence[int], observation: Observation) -> list[int]:
        text = "".join(message["content"] for message in as_messages(observation))
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"]) if text else []


class ChatTemplate:
    """Observations as messages, by the tokenizer's chat template.

    Args:
        tokenizer: With a chat template.
        roles: Chat roles of observations: `user`, `tool`.
        tools: JSON schemas of functions, which prompts describe.

    Raises:
        ConfigError: The template knows no such role, or rewrites earlier turns when one is added.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        roles: Sequence[str] = ("user",),
        tools: Sequence[Mapping[str, object]] = (),
    ) -> None:
        self._tokenizer = tokenizer
        self._tools = [dict(tool) for tool in tools] or None
        self._before: list[int] = []
        for role in roles:
            self._before = self._find_answer(role)
        self._warn_of_lost_thoughts()

    def opening_ids(self, observation: Observation) -> list[int]:
        before = self._render([QUESTION], has_answer=False)
        ids = self._render([QUESTION, *as_messages(observation)])
        if ids[: len(before)] != before:
            raise _refusal("it does so for a message before the first answer")
        return ids[len(before) :]

    def without_answer(self, prompt_ids: Sequence[int]) -> list[int]:
        """Return a prompt without the beginning of an answer at its end.

        Raises:
            ConfigError: It does not end as other prompts do.
        """
        begun = self.opening_ids("")
        if not begun or list(prompt_ids[-len(begun) :]) != begun:
            raise _refusal("a prompt's end depends on what stands before it")
        return list(prompt_ids[: -len(begun)])

    def observation_ids(self, said_ids: Sequence[int], observation: Observation) -> list[int]:
        messages = as_messages(observation)
        ids = self._render([QUESTION, _answer(ANSWERS[0]), *messages])
        if ids[: len(self._before)] != self._before:
            raise _refusal(f"it does so for an observation of {[m['role'] for m in messages]}")
        following = ids[len(self._before) :]
        return following[_num_shared(said_ids, following) :]

    def _find_answer(self, role: str) -> list[int]:
        """Return the tokens of the dummy conversation to the end of its answer; checks the template."""
        opening = self._render([QUESTION])
        told: Message = {"role": role, "content": "9"}
        first, second = (self._render([QUESTION, _answer(text), told]) for text in ANSWERS)
        num_after = _num_common(first[::-1], second[::-1])
        for ids, text in zip((first, second), ANSWERS, strict=True):
            if ids[: len(opening)] != opening:
                raise _refusal("what stood before an answer is another text once a turn follows")
            said = self._tokenizer.decode(ids[len(opening) : len(ids) - num_after])
            if said.strip() != text:
                raise _refusal(f"of the answer '{text}' it leaves '{said.strip()}' once a turn follows")
        before = first[: len(first) - num_after]
        if self._before and before != self._before:
            raise _refusal(f"with the role '{role}' earlier turns are another text")
        return before

    def _warn_of_lost_thoughts(self) -> None:
        ids = self._render([QUESTION, _answer(THOUGHT + ANSWERS[0]), {"role": "user", "content": "9"}])
        if "5" not in self._tokenizer.decode(ids):
            log.warning("the chat template drops the thoughts of earlier turns; episodes keep them")

    def _render(self, messages: Sequence[Message], has_answer: bool = True) -> list[int]:
        from jinja2 import TemplateError

        try:
            ids: list[int] = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tools=self._tools,
                add_generation_prompt=has_answer,
                return_dict=False,
            )
        except TemplateError as error:
            roles = sorted({message["role"] for message in messages})
            raise ConfigError(
                f"the chat template refuses messages of {', '.join(roles)}: {error}",
                hint="Give the environment another role, or give prompts as plain strings",
            ) from error
        return list(ids)


def as_messages(observation: Observation) -> list[Message]:
    """Return an observation as messages: plain text is one of the user, empty text is none.

    Raises:
        EnvironmentFailed: It is neither text nor messages.
    """
    if isinstance(observation, str):
        return [{"role": "user", "content": observation}] if observation else []
    told: object = observation  # whatever a user's method returned
    if not isinstance(told, Sequence) or not all(_is_message(one) for one in told):
        raise EnvironmentFailed(
            f"an observation is text, or messages with 'role' and 'content', not {told!r:.60}"
        )
    return list(told)


def _is_message(message: object) -> bool:
    if not isinstance(message, Mapping):
        return False
    return isinstance(message.get("role"), str) and isinstance(message.get("content"), str)


def _answer(text: str) -> Message:
    return {"role": "assistant", "content": text}


def _num_common(first: Sequence[int], second: Sequence[int]) -> int:
    pairs = enumerate(zip(first, second, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(first), len(second)))


def _num_shared(said_ids: Sequence[int], following: Sequence[int]) -> int:
    """Count the tokens that end a turn and were already said: the end of sequence, as a rule."""
    said = list(said_ids[-MAX_SHARED_TOKENS:])
    counts = range(min(len(said), len(following)), 0, -1)
    return next((count for count in counts if said[-count:] == list(following[:count])), 0)


def _refusal(why: str) -> ConfigError:
    return ConfigError(
        f"the tokenizer's chat template rewrites earlier turns: {why}",
        hint="Episodes of several turns need a template that only appends; give another chat_template, or "
        "prompts as plain strings",
    )
