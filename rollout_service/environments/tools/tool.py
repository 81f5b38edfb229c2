"""Protocol of a tool. A tool answers every call with text; the only error that it raises is `ToolRefused`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

MAX_RESULT_CHARS = 1000


class ToolRefused(ValueError):
    """The call cannot be answered. No failure of ours: the model reads why."""


class ToolExhausted(ToolRefused):
    """The call used up its time or memory: a turn that made it makes no further ones."""


class Tool(Protocol):
    """A function of the model's.

    Attributes:
        name: Its name in calls.
        description: For the prompt.
        argument: Name of its one argument, which is text.
        is_idempotent: The same call made twice counts once: it has no effect, or the tool knows its `key`.
            Without that, an episode whose replica died inside a call fails.
    """

    name: str
    description: str
    argument: str
    is_idempotent: bool

    async def call(self, text: str) -> str:
        """Return the result. A `call` with a parameter `key` gets a `CallKey`, or None in evaluations.

        Raises:
            ToolRefused: With the text that the model shall read instead.
        """


def schema_of(tool: Tool) -> Mapping[str, object]:
    """Return the tool as chat templates want it: a function with a JSON schema."""
    parameters = {
        "type": "object",
        "properties": {tool.argument: {"type": "string"}},
        "required": [tool.argument],
    }
    function = {"name": tool.name, "description": tool.description, "parameters": parameters}
    return {"type": "function", "function": function}


def cut_result(text: str) -> str:
    """Return `text` as what can be tokenised, at a length that leaves room for what the model has to say."""
    text = text.encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= MAX_RESULT_CHARS else text[:MAX_RESULT_CHARS] + "..."
