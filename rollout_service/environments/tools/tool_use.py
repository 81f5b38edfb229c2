"""The environment `tools`: what the model calls is computed, and a turn without a call is its answer."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from asyncrl.core.config.reading.problems import suggest
from asyncrl.core.errors import ConfigError
from asyncrl.core.states import Reason
from rollout_service.environments.protocol import Environment, EnvironmentFailed, Step
from rollout_service.environments.tools.calculator import Calculator
from rollout_service.environments.tools.calling import CallKey, Calls, Outcome
from rollout_service.environments.tools.calls import Call, CallFormat, JsonCalls, PatternCalls
from rollout_service.environments.tools.python_expression import PythonExpression
from rollout_service.environments.tools.tool import Tool, ToolExhausted, ToolRefused, cut_result, schema_of
from rollout_service.sampling.turn_journal import EpisodeRecord

if TYPE_CHECKING:
    from rollout_service.data.prompts import Prompt

TOOLS: Mapping[str, Callable[..., Tool]] = {"calculator": Calculator, "python": PythonExpression}
MAX_CALLS = 8
"""Of one turn; the others are refused."""
TURN_DEADLINE_S = 40.0
"""Of all calls of a turn, the wait for a free process included: below what the runner gives a step."""


class ToolUse:
    """Makes episodes that share their tools.

    Args:
        tools: Names, or a mapping from name to the tool's own arguments.
        call: Format of a call: a pattern with one group, for the argument of the one tool. Without it
            calls are JSON between `<tool_call>` tags.
        reply: With `call`: text that the model reads.
        role: Without `call`: chat role of the results.

    Raises:
        ConfigError: There is no such tool, or it does not take these arguments.

    >>> ToolUse(["calculator"], call=r"\\?(.+)", reply="!{result}=").roles
    ('user',)
    """

    def __init__(
        self,
        tools: Sequence[str] | Mapping[str, Mapping[str, object] | None] = ("calculator",),
        call: str | None = None,
        reply: str = "{result}",
        role: str = "tool",
    ) -> None:
        arguments = dict(tools) if isinstance(tools, Mapping) else dict.fromkeys(tools)
        self._tools = {name: _build_tool(name, given or {}) for name, given in arguments.items()}
        self._format = _choose_format(list(self._tools.values()), call, reply, role)

    @property
    def roles(self) -> Sequence[str]:
        """Roles of the messages in observations."""
        return self._format.roles

    @property
    def tools(self) -> list[Mapping[str, object]]:
        """The tools as chat templates want them."""
        return [schema_of(tool) for tool in self._tools.values()]

    def __call__(self, prompt: Prompt, seed: int) -> Environment:
        """Return the environment of one episode."""
        return ToolEpisode(self._tools, self._format)


class ToolEpisode(Environment):
    """Answers calls until a turn has none. It gives no reward: `reward.fn` judges that turn."""

    def __init__(self, tools: Mapping[str, Tool], call_format: CallFormat) -> None:
        self._tools = tools
        self._format = call_format
        self.calls: Calls = Calls(EpisodeRecord(None, None))

    async def restore(self, turns: Sequence[tuple[str, Step]]) -> None:
        """Nothing is kept between turns; results of calls come from `calls`."""

    async def step(self, answer: str) -> Step:
        calls = self._format.find(answer)
        if not calls:
            return Step(is_done=True)
        made = calls[:MAX_CALLS]
        results = await self._answer_all(made)
        results += ["error: not made, for this turn's calls took too long"] * (len(made) - len(results))
        results += [f"error: at most {MAX_CALLS} calls in one turn"] * (len(calls) - len(results))
        return Step(self._format.tell(results))

    async def _answer_all(self, calls: Sequence[Call]) -> list[str]:
        """Return the results up to the call that used up its time.

        Raises:
            EnvironmentFailed: Together they took too long, most of it waiting for a free process.
        """
        results: list[str] = []
        end_s = asyncio.get_running_loop().time() + TURN_DEADLINE_S
        for index, call in enumerate(calls):
            tool, text = self._tools.get(call.tool), self._text_of(call)
            if tool is None or text is None:
                results.append(f"error: {self._problem_of(call)}")
                continue
            make = partial(_call, tool, text, end_s)
            is_idempotent = getattr(tool, "is_idempotent", False)
            outcome = await self.calls.make(index, tool.name, make, is_idempotent=is_idempotent)
            results.append(outcome.text)
            if outcome.is_last:
                break
        return results

    def _text_of(self, call: Call) -> str | None:
        tool = self._tools.get(call.tool)
        text = None if tool is None or call.problem else call.arguments.get(tool.argument)
        return text if isinstance(text, str) else None

    def _problem_of(self, call: Call) -> str:
        tool = self._tools.get(call.tool)
        if call.problem:
            return call.problem
        if tool is None:
            return f"there is no tool {call.tool[:40]!a}, only {', '.join(self._tools)}"
        return f"'{tool.name}' needs the text '{tool.argument}'"


async def _call(tool: Tool, text: str, end_s: float, key: CallKey | None) -> Outcome:
    """Make a call within the time of its turn."""
    more = {"key": key} if "key" in inspect.signature(tool.call).parameters else {}
    try:
        async with asyncio.timeout_at(end_s):
            return Outcome(cut_result(await tool.call(text, **more)))
    except ToolExhausted as error:
        return Outcome(cut_result(f"error: {error}"), is_last=True)
    except ToolRefused as error:
        return Outcome(cut_result(f"error: {error}"))
    except TimeoutError:
        what = f"the calls of a turn took longer than {TURN_DEADLINE_S:g} s"
        raise EnvironmentFailed(what, reason=Reason.TIMEOUT) from None


def _build_tool(name: str, arguments: Mapping[str, object]) -> Tool:
    if name not in TOOLS:
        hint = suggest(name, TOOLS) or f"There are {', '.join(TOOLS)}"
        raise ConfigError(f"there is no tool '{name}'", hint=hint)
    try:
        return TOOLS[name](**arguments)
    except TypeError as error:
        raise ConfigError(f"the tool '{name}' does not take {sorted(arguments)}: {error}") from error


def _choose_format(tools: list[Tool], call: str | None, reply: str, role: str) -> CallFormat:
    if not tools:
        raise ConfigError("rollout.environment: no tools", hint=f"Name some of {', '.join(TOOLS)}")
    if call is None:
        return JsonCalls(role)
    if len(tools) > 1:
        raise ConfigError("a pattern of calls knows one tool only", hint="Leave 'call' out for JSON calls")
    return PatternCalls(call, tools[0].name, tools[0].argument, reply)
