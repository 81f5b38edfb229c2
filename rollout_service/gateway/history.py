"""Relation of a call to the one before it in its session: first, repeated, or next turn (pure).

A chat client sends the whole conversation again, as text. Owns the comparison of that text with the recorded
conversation: the recorded tokens stand for the text only where the text is the recorded one.
Invariant: a call whose earlier part differs from the recorded conversation in anything is never taken for
the next turn.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Literal

from rollout_service.gateway.refusal import Refusal

HISTORY_CHANGED = "history_changed"


class Step(Enum):
    """Relation of a call to the session: its first, the last one again, or the next turn."""

    FIRST = "first"
    AGAIN = "again"
    NEXT = "next"


@dataclass(frozen=True)
class Asked:
    """Input of a call to the model, in comparable form.

    Attributes:
        kind: A chat's messages, a text, or token ids.
        content: The messages as JSON texts, or the text alone.
        frame: Other inputs of the prompt: tools and the arguments of the template.
    """

    kind: Literal["chat", "text", "ids"]
    content: tuple[str, ...] = ()
    frame: str = ""
    ids: tuple[int, ...] = ()


def asked_in_chat(body: Mapping[str, object]) -> Asked:
    """Return what a chat request asks. Raises Refusal if it has no messages."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages or not all(isinstance(m, dict) for m in messages):
        raise Refusal("'messages' must be a list of messages, and not empty")
    frame = {name: body.get(name) for name in ("tools", "chat_template_kwargs")}
    return Asked("chat", tuple(_comparable(m) for m in messages), _json(frame))


def asked_in_completion(body: Mapping[str, object]) -> Asked:
    """Return what a completion request asks. Raises Refusal if that is not one prompt."""
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str) and prompt:
        return Asked("text", (prompt,))
    if isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt):
        return Asked("ids", ids=tuple(prompt))
    raise Refusal("'prompt' must be one text or one list of token ids, and not empty")


def follow(before: Asked | None, reply: str, ids: Sequence[int], asked: Asked) -> Step:
    """Return how `asked` follows the call `before` it.

    Args:
        reply: The text that the client got.
        ids: All token ids up to the end of that answer.

    Raises:
        Refusal: It goes on from something else: `history_changed`.
    """
    if before is None:
        return Step.FIRST
    if asked == before:
        return Step.AGAIN
    is_same_frame = (asked.kind, asked.frame) == (before.kind, before.frame)
    if is_same_frame and _extends(before, reply, ids, asked):
        return Step.NEXT
    raise Refusal(
        "the conversation before this call is not the one that this session recorded",
        hint="Send back all earlier messages and answers as they were, and open a session per conversation",
        code=HISTORY_CHANGED,
    )


def _extends(before: Asked, reply: str, ids: Sequence[int], asked: Asked) -> bool:
    old, new = before.content, asked.content
    if asked.kind == "ids":
        return asked.ids[: len(ids)] == tuple(ids)
    if asked.kind == "text":
        return new[0].startswith(old[0] + reply)
    answer = _comparable({"role": "assistant", "content": reply})
    return new[: len(old)] == old and new[len(old) : len(old) + 1] == (answer,)


def _comparable(message: Mapping[str, object]) -> str:
    """Return a message as a text; what clients add to an answer that says nothing is left out."""
    content = message.get("content")
    if isinstance(content, list):
        found = [part.get("text") if isinstance(part, dict) else part for part in content]
        texts = [text for text in found if isinstance(text, str)]
        content = "".join(texts) if len(texts) == len(found) else content
    named = ("tool_calls", "function_call", "tool_call_id", "name", "reasoning", "reasoning_content")
    said = {name: message[name] for name in named if message.get(name)}
    return _json({"role": message.get("role"), "content": content or "", **said})


def _json(value: object) -> str:
    return json.dumps(value, sort_keys=True)
