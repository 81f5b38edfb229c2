"""Formats of a model's tool calls and of the results that it reads.

`JsonCalls`: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, the form that Qwen's and Hermes'
chat templates teach; results come back as messages of the role `tool`. `PatternCalls`: a regular expression
whose one group is the argument of the one tool, for models without a chat template.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from asyncrl.core.errors import ConfigError
from rollout_service.environments.protocol import Observation

_BLOCK = re.compile(r"<tool_call>(.*?)(?:</tool_call>|$)", re.DOTALL)


@dataclass(frozen=True)
class Call:
    """One call that a model wants. `problem`: why it cannot be made, to be read by the model."""

    tool: str
    arguments: Mapping[str, object]
    problem: str = ""


class CallFormat(Protocol):
    """One way to write calls and results. `roles`: who speaks the results in a chat."""

    roles: Sequence[str]

    def find(self, answer: str) -> list[Call]:
        """Return the calls in the model's turn, in its order; none makes it the final answer."""

    def tell(self, results: Sequence[str]) -> Observation:
        """Return what the model reads, one result per call."""


class JsonCalls:
    """Calls as JSON between tags, results as messages of `role`."""

    def __init__(self, role: str = "tool") -> None:
        self.roles: Sequence[str] = (role,)

    def find(self, answer: str) -> list[Call]:
        return [_read_call(block) for block in _BLOCK.findall(answer)]

    def tell(self, results: Sequence[str]) -> Observation:
        return [{"role": self.roles[0], "content": result} for result in results]


class PatternCalls:
    """A turn that matches `pattern` as a whole is a call of `tool`.

    Args:
        argument: Name of the tool's argument.
        reply: Text that the model reads; `{result}` stands for the result.

    Raises:
        ConfigError: The pattern or the reply cannot be used.
    """

    roles: Sequence[str] = ("user",)

    def __init__(self, pattern: str, tool: str, argument: str, reply: str) -> None:
        try:
            self._pattern = re.compile(pattern, re.DOTALL)
        except re.error as error:
            raise ConfigError(
                f"the pattern of calls '{pattern}' is not a regular expression: {error}"
            ) from error
        if self._pattern.groups != 1:
            raise ConfigError(
                f"the pattern of calls '{pattern}' has {self._pattern.groups} groups",
                hint="One group, for the argument: \\?(.+)",
            )
        if "{result}" not in reply:
            raise ConfigError(f"the reply '{reply}' has no place for the result", hint="Write {result} in it")
        self._tool, self._argument, self._reply = tool, argument, reply

    def find(self, answer: str) -> list[Call]:
        found = self._pattern.fullmatch(answer.strip())
        return [Call(self._tool, {self._argument: found[1]})] if found else []

    def tell(self, results: Sequence[str]) -> Observation:
        return "".join(self._reply.replace("{result}", result) for result in results)


def _read_call(block: str) -> Call:
    try:
        found = json.loads(block)
    except (ValueError, RecursionError) as error:
        return Call("", {}, f"the call is not JSON: {error}")
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        return Call("", {}, "a call is an object with 'name' and 'arguments'")
    arguments = found.get("arguments") or {}
    if not isinstance(arguments, dict):
        return Call(found["name"], {}, "the 'arguments' of a call are an object")
    return Call(found["name"], arguments)
