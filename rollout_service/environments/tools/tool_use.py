"""The environment `tools`: what the model calls is computed, and a turn without a call is its answer."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from asyncrl.core.config.reading.problems import suggest
from asyncrl.core.errors import ConfigError
from asyncrl.core.states import Reason
from rollout_service.environments.protocol import Environment, EnvironmentFailed, NotRestored, Step
from rollout_service.environments.tools.calculator import Calculator
from rollout_service.environments.tools.calling import CallKey, Calls, Outcome
from rollout_service.environments.tools.calls import Call, CallFormat, JsonCalls, PatternCalls
from rollout_service.environments.tools.code import CodeInterpreter, Shell
from rollout_service.environments.tools.mcp_server import McpServer
from rollout_service.environments.tools.python_expression import PythonExpression
from rollout_service.environments.tools.tool import (
    MAX_RESULT_CHARS,
    Tool,
    ToolExhausted,
    ToolRefused,
    cut_result,
    schema_of,
)
from rollout_service.sampling.turn_journal import EpisodeRecord
from rollout_service.sandbox.contract import Sandbox
from rollout_service.sandbox.local import LocalSandboxes, make_sandboxes

if TYPE_CHECKING:
    from rollout_service.data.prompts import Prompt

TOOLS: Mapping[str, Callable[..., Tool]] = {
    "calculator": Calculator,
    "code_interpreter": CodeInterpreter,
    "python": PythonExpression,
    "shell": Shell,
}
MCP = "mcp"
"""The entry of a server whose tools are added."""
Arguments = Mapping[str, Mapping[str, object] | None]
MAX_CALLS = 8
"""Of one turn; the others are refused."""
TURN_DEADLINE_S = 40.0
"""Of all calls of a turn, the wait for a free process included: below what the runner gives a step."""


class ToolUse:
    """Makes episodes that share their tools.

    Args:
        tools: Names, mappings from a name to the tool's own arguments, or `{mcp: {...}}` for the tools of a
            server (`McpServer`; with `sandbox: true` it runs in one).
        call: Format of a call: a pattern with one group, for the argument of the one tool. Without it
            calls are JSON between `<tool_call>` tags.
        reply: With `call`: text that the model reads.
        role: Without `call`: chat role of the results.
        result_chars: Most characters of one result.
        sandbox: Settings of each episode's sandbox (`SandboxSettings`).

    Raises:
        ConfigError: There is no such tool, or it does not take these arguments.

    >>> ToolUse(["calculator"], call=r"\\?(.+)", reply="!{result}=").roles
    ('user',)
    """

    def __init__(
        self,
        tools: Sequence[str | Arguments] | Arguments = ("calculator",),
        call: str | None = None,
        reply: str = "{result}",
        role: str = "tool",
        result_chars: int = MAX_RESULT_CHARS,
        sandbox: Mapping[str, object] | None = None,
    ) -> None:
        entries = list(_entries(tools))
        built = [_build_tool(name, given) for name, given in entries if name != MCP]
        servers = [given for name, given in entries if name == MCP]
        has_sandbox = any(tool.uses_sandbox for tool in built) or any(one.get("sandbox") for one in servers)
        self._sandboxes = make_sandboxes(sandbox or {}) if has_sandbox or sandbox else None
        self._servers = [_build_server(given, self._sandboxes) for given in servers]
        self._built = built
        self._result_chars = result_chars
        self._format = _choose_format(built, bool(servers), call, reply, role)

    @property
    def roles(self) -> Sequence[str]:
        """Roles of the messages in observations."""
        return self._format.roles

    @functools.cached_property
    def by_name(self) -> Mapping[str, Tool]:
        """The tools; servers are asked once. Raises ConfigError: one lists none, or a name twice."""
        found = [*self._built, *(tool for server in self._servers for tool in server.list_tools())]
        names = [tool.name for tool in found]
        if twice := {name for name in names if names.count(name) > 1}:
            raise ConfigError(f"two tools are called {', '.join(sorted(twice))}")
        return dict(zip(names, found, strict=True))

    @property
    def tools(self) -> list[Mapping[str, object]]:
        """The tools as chat templates want them."""
        return [schema_of(tool) for tool in self.by_name.values()]

    def __call__(self, prompt: Prompt, seed: int) -> Environment:
        """Return the environment of one episode."""
        box = self._sandboxes.create() if self._sandboxes is not None else None
        return ToolEpisode(self.by_name, self._format, self._result_chars, box)


class ToolEpisode(Environment):
    """Answers calls until a turn has none. It gives no reward: `reward.fn` judges that turn."""

    def __init__(
        self,
        tools: Mapping[str, Tool],
        call_format: CallFormat,
        result_chars: int = MAX_RESULT_CHARS,
        sandbox: Sandbox | None = None,
    ) -> None:
        self._tools = {name: tool.begin(sandbox) for name, tool in tools.items()}
        self._format = call_format
        self.calls: Calls = Calls(EpisodeRecord(None, None))
        self._result_chars = result_chars
        self._sandbox = sandbox

    async def restore(self, turns: Sequence[tuple[str, Step]]) -> None:
        """Results of calls come from `calls`; the files of a sandbox are gone. Raises NotRestored."""
        if self._sandbox is not None and self.calls.has_results:
            raise NotRestored("the files of its sandbox are gone")

    async def step(self, answer: str) -> Step:
        calls = self._format.find(answer)
        if not calls:
            return Step(is_done=True)
        made = calls[:MAX_CALLS]
        results = await self._answer_all(made)
        results += ["error: not made, for this turn's calls took too long"] * (len(made) - len(results))
        results += [f"error: at most {MAX_CALLS} calls in one turn"] * (len(calls) - len(results))
        return Step(self._format.tell(results))

    async def close(self) -> None:
        if self._sandbox is not None:
            await self._sandbox.destroy()

    async def _answer_all(self, calls: Sequence[Call]) -> list[str]:
        """Return the results up to the call that used up its time.

        Raises:
            EnvironmentFailed: Together they took too long, most of it waiting for a free process.
        """
        results: list[str] = []
        end_s = asyncio.get_running_loop().time() + TURN_DEADLINE_S
        for index, call in enumerate(calls):
            tool = self._tools.get(call.tool)
            if call.problem or tool is None:
                there_is = f"there is no tool {call.tool[:40]!a}, only {', '.join(self._tools)}"
                results.append(f"error: {call.problem or there_is}")
                continue
            make = functools.partial(self._call, tool, call.arguments, end_s)
            is_idempotent = getattr(tool, "is_idempotent", False)
            outcome = await self.calls.make(index, tool.name, make, is_idempotent=is_idempotent)
            results.append(outcome.text)
            if outcome.is_last:
                break
        return results

    async def _call(
        self, tool: Tool, arguments: Mapping[str, object], end_s: float, key: CallKey | None
    ) -> Outcome:
        """Make a call within the time of its turn."""
        try:
            async with asyncio.timeout_at(end_s):
                return Outcome(self._cut(await tool.answer(arguments, key)))
        except ToolExhausted as error:
            return Outcome(self._cut(f"error: {error}"), is_last=True)
        except ToolRefused as error:
            return Outcome(self._cut(f"error: {error}"))
        except TimeoutError:
            what = f"the calls of a turn took longer than {TURN_DEADLINE_S:g} s"
            raise EnvironmentFailed(what, reason=Reason.TIMEOUT) from None

    def _cut(self, text: str) -> str:
        return cut_result(text, self._result_chars)


def _entries(tools: Sequence[str | Arguments] | Arguments) -> Iterator[tuple[str, Mapping[str, object]]]:
    for entry in [tools] if isinstance(tools, Mapping) else tools:
        for name, given in {entry: None}.items() if isinstance(entry, str) else entry.items():
            yield name, given or {}


def _build_tool(name: str, arguments: Mapping[str, object]) -> Tool:
    if name not in TOOLS:
        hint = suggest(name, TOOLS) or f"There are {', '.join(TOOLS)}"
        raise ConfigError(f"there is no tool '{name}'", hint=hint)
    try:
        return TOOLS[name](**arguments)
    except TypeError as error:
        raise ConfigError(f"the tool '{name}' does not take {sorted(arguments)}: {error}") from error


def _build_server(told: Mapping[str, object], sandboxes: LocalSandboxes | None) -> McpServer:
    arguments = {name: value for name, value in told.items() if name != "sandbox"}
    make: Callable[..., McpServer] = McpServer
    try:
        return make(**arguments, sandboxes=sandboxes if told.get("sandbox") else None)
    except TypeError as error:
        raise ConfigError(f"an MCP server does not take {sorted(arguments)}: {error}") from error


def _choose_format(
    tools: list[Tool], has_servers: bool, call: str | None, reply: str, role: str
) -> CallFormat:
    if not tools and not has_servers:
        raise ConfigError("rollout.environment: no tools", hint=f"Name some of {', '.join(TOOLS)}")
    if call is None:
        return JsonCalls(role)
    if len(tools) != 1 or has_servers:
        raise ConfigError("a pattern of calls knows one tool only", hint="Leave 'call' out for JSON calls")
    return PatternCalls(call, tools[0].name, tools[0].argument, reply)
