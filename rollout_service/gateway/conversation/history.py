"""Comparison of a call's conversation with a recorded one: whether it goes on from an answer (pure).

A chat client sends the whole conversation again, as messages. Owns the comparison of those messages with the
recorded conversation: the recorded tokens stand for a message only where it is the recorded one.
Invariant: a call whose earlier part differs from the recorded conversation in anything but reasoning that was
left out is never taken for the next turn.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Literal

from rollout_service.gateway.refusal import Refusal

HISTORY_CHANGED = "history_changed"
TEXT_PARTS = frozenset({"text", "input_text", "output_text", "refusal", "thinking", "tool_reference"})
"""Types of the parts of a message that are text; all others are images, audio and files."""


class Step(Enum):
    """Relation of a call to the session: its first, the last one again, or the next turn."""

    FIRST = "first"
    AGAIN = "again"
    NEXT = "next"


@dataclass(frozen=True)
class Message:
    """A message of a chat in comparable form.

    Attributes:
        said: Role, content, tool calls and names as a JSON text.
        reasoning: Reasoning of an answer, which most clients leave out when they send it back.
    """

    said: str
    reasoning: str = ""

    def stands_for(self, recorded: Message) -> bool:
        """Tell whether this is the recorded message, with its reasoning or without it."""
        return self.said == recorded.said and self.reasoning in ("", recorded.reasoning)


@dataclass(frozen=True)
class Asked:
    """Input of a call to the model, in comparable form.

    Attributes:
        kind: A chat's messages, a text, or token ids.
        frame: Other inputs of the prompt: tools and the arguments of the template.
    """

    kind: Literal["chat", "text", "ids"]
    messages: tuple[Message, ...] = ()
    text: str = ""
    frame: str = ""
    ids: tuple[int, ...] = ()

    def is_alike(self, other: Asked) -> bool:
        """Tell whether both are of one kind, with the same frame."""
        return (self.kind, self.frame) == (other.kind, other.frame)

    def after(self, start: int) -> Asked:
        """Return what it adds to its first `start` messages or letters."""
        return replace(self, messages=self.messages[start:], text=self.text[start:], ids=())


@dataclass(frozen=True)
class Reply:
    """The recorded answer as its client got it: its text, and the messages that it is in a chat.

    In the Responses API an answer without text and calls is no message at all.
    """

    text: str = ""
    messages: tuple[Message, ...] = ()


def asked_in_chat(messages: Sequence[Mapping[str, object]], frame: Mapping[str, object]) -> Asked:
    """Return what a chat asks. Raises Refusal if a message holds anything but text."""
    return Asked("chat", tuple(comparable(message) for message in messages), frame=_json(frame))


def asked_in_completion(prompt: object) -> Asked:
    """Return what a completion asks. Raises Refusal if that is not one prompt."""
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str) and prompt:
        return Asked("text", text=prompt)
    if isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt):
        return Asked("ids", ids=tuple(prompt))
    raise Refusal("'prompt' must be one text or one list of token ids, and not empty")


def reply_in_text(text: str) -> Reply:
    """Return an answer that was not parsed."""
    return Reply(text, (comparable({"role": "assistant", "content": text}),))


@dataclass(eq=False)
class Told:
    """One answered turn. What several branches have of one conversation is the same object in all of them.

    Attributes:
        added: What its call added to the turns before it; without ids, which the transcript has.
        reply: The answer as the client got it.
    """

    added: Asked
    reply: Reply

    def end_in(self, asked: Asked, start: int) -> int | None:
        """Return where this turn ends in a call's messages or text, None if it is not at `start` of them."""
        if asked.kind == "text":
            text = self.added.text + self.reply.text
            return start + len(text) if asked.text.startswith(text, start) else None
        recorded = self.added.messages + self.reply.messages
        said = asked.messages[start : start + len(recorded)]
        is_there = len(said) == len(recorded) and all(map(Message.stands_for, said, recorded))
        return start + len(recorded) if is_there else None


def comparable(message: Mapping[str, object]) -> Message:
    """Return a message in comparable form; what clients add to an answer that says nothing is left out.

    Raises:
        Refusal: It holds an image, or something else that is not text.
    """
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(_text_of(part) for part in content)
    said = {name: message[name] for name in ("function_call", "tool_call_id", "name") if message.get(name)}
    calls = message.get("tool_calls")
    if isinstance(calls, list) and calls:
        said["tool_calls"] = [_comparable_call(call) for call in calls]
    text = _json({"role": message.get("role"), "content": content or "", **said})
    return Message(text, str(message.get("reasoning") or message.get("reasoning_content") or ""))


def _text_of(part: object) -> str:
    if not isinstance(part, dict):
        return str(part)
    kind = part.get("type", "text")
    if kind not in TEXT_PARTS:
        what = f"a part of a message is of type {kind!r:.40}: images, audio and files are not served"
        raise Refusal(what, hint="Send text", code="not_text")
    return str(part.get("text") or part.get("refusal") or part.get("thinking") or part.get("name") or "")


def _comparable_call(call: object) -> object:
    """Return a tool call by id, name and arguments: these as a value, clients space them differently."""
    if not isinstance(call, dict) or not isinstance(function := call.get("function"), dict):
        return call
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            pass  # a call that was cut: its text is compared
    return [call.get("id"), function.get("name"), arguments]


def _json(value: object) -> str:
    return json.dumps(value, sort_keys=True, default=str)
