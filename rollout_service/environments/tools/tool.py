"""Protocol of a tool. A tool answers every call with text; it raises `ToolRefused`, or `EnvironmentFailed`
where it failed itself.
"""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

from rollout_service.sandbox.contract import Sandbox

if TYPE_CHECKING:
    from rollout_service.environments.tools.calling import CallKey

MAX_RESULT_CHARS = 1000


class ToolRefused(ValueError):
    """The call cannot be answered. No failure of ours: the model reads why."""


class ToolExhausted(ToolRefused):
    """The call used up its time or memory: a turn that made it makes no further ones."""


class Tool(Protocol):
    """A function of the model's. Derive from it and write `call`; the rest has defaults.

    Attributes:
        name: Its name in calls.
        description: For the prompt.
        argument: Name of its one argument, which is text; empty for a tool that writes `answer`.
        is_idempotent: The same call made twice counts once: it has no effect, or the tool knows its `key`.
            Without that, a group is given up whose attempt ended inside a call.
        uses_sandbox: Whether an episode with it has a sandbox.
    """

    name: str
    description: str
    argument: str = ""
    is_idempotent: bool = False
    uses_sandbox: bool = False

    def parameters(self) -> Mapping[str, object]:
        """Return the JSON schema of its arguments."""
        return {
            "type": "object",
            "properties": {self.argument: {"type": "string"}},
            "required": [self.argument],
        }

    def begin(self, sandbox: Sandbox | None) -> Tool:
        """Return the tool of one episode."""
        return self

    async def answer(self, arguments: Mapping[str, object], key: CallKey | None) -> str:
        """Return the result of a call. Raises ToolRefused with what the model shall read instead."""
        text = arguments.get(self.argument)
        if not isinstance(text, str):
            raise ToolRefused(f"'{self.name}' needs the text '{self.argument}'")
        more = {"key": key} if "key" in inspect.signature(self.call).parameters else {}
        return await self.call(text, **more)

    @abstractmethod
    async def call(self, text: str) -> str:
        """Return the result. A `call` with a parameter `key` gets a `CallKey`, or None in evaluations.

        Raises:
            ToolRefused: With the text that the model shall read instead.
        """


def schema_of(tool: Tool) -> Mapping[str, object]:
    """Return the tool as chat templates want it: a function with a JSON schema."""
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters()}
    return {"type": "function", "function": function}


def cut_result(text: str, max_chars: int = MAX_RESULT_CHARS) -> str:
    """Return `text` as what can be tokenised, at a length that leaves room for what the model has to say."""
    text = text.encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= max_chars else text[:max_chars] + "..."
