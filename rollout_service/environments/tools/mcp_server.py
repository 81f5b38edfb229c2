"""Tools of an MCP server, through the official SDK: over its standard streams or streamable HTTP.

One connection per replica, shared by the episodes. Invariant: a call is never made twice; a server that ends
is started again once, for the next call.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import TYPE_CHECKING

from asyncrl.core.errors import ConfigError
from asyncrl.core.runtime.threads import ThreadRuntime
from rollout_service.environments.protocol import EnvironmentFailed
from rollout_service.environments.tools.calling import CallKey
from rollout_service.environments.tools.tool import Tool, ToolExhausted, ToolRefused
from rollout_service.sandbox.local import LocalSandboxes

if TYPE_CHECKING:
    from mcp import Client, StdioServerParameters
    from mcp.client import Transport

START_S = 30.0


class McpServer:
    """The entry `mcp` of an environment's tools: a server and its connection.

    Args:
        command: Program and arguments of a server over standard streams.
        url: Instead of `command`: of a server over streamable HTTP.
        timeout_s: Time limit of one call.
        env: Variables that the server gets besides `PATH`, `HOME` and the like.
        key_env: Environment variable that holds a bearer key for `url`; none is sent without it.
        sandboxes: Run it in a sandbox of these, not as a plain child process.

    Raises:
        ConfigError: The SDK is not installed, or the arguments contradict each other.
    """

    def __init__(
        self,
        command: Sequence[str] = (),
        url: str = "",
        timeout_s: float = 30.0,
        env: Sequence[str] = (),
        key_env: str = "",
        sandboxes: LocalSandboxes | None = None,
    ) -> None:
        try:
            from mcp import Client, StdioServerParameters
        except ImportError as error:
            raise ConfigError(
                "tools of an MCP server need the package mcp", hint="pip install mcp"
            ) from error
        if bool(command) == bool(url) or isinstance(command, str) or timeout_s <= 0:
            raise ConfigError("an MCP server needs a 'command' (a list) or a 'url', and a timeout_s above 0")
        if key_env and not url:
            raise ConfigError("an MCP server's key_env needs a 'url': one with a command gets env")
        if missing := [name for name in (*env, *filter(None, [key_env])) if name not in os.environ]:
            raise ConfigError(f"the MCP server wants {', '.join(missing)}, not set in the environment")
        self._made, self._timeout_s = Client, timeout_s
        line = list(command) if sandboxes is None else sandboxes.wrap(command, env)
        told = {name: os.environ[name] for name in env}
        self._target: str | StdioServerParameters = url or StdioServerParameters(
            command=line[0], args=line[1:], env=told
        )
        self._title, self._url, self._key = url or command[0], url, os.environ.get(key_env)
        self._num_ends = 0
        self._client: asyncio.Future[Client] | None = None
        self._serving: asyncio.Task[None] | None = None
        self._is_over = asyncio.Event()

    def list_tools(self) -> list[McpTool]:
        """Return the server's tools; it is started for that and ended again, outside of any event loop.

        Raises:
            ConfigError: It does not start, or lists none.
        """
        return ThreadRuntime().run_async(self._list())

    async def call(self, name: str, arguments: Mapping[str, object]) -> str:
        """Return the result of a tool as text. Raises ToolRefused, EnvironmentFailed."""
        from mcp import MCPError
        from mcp.types import CONNECTION_CLOSED, CallToolResult

        connection = self._connect()
        client = await asyncio.shield(connection)
        try:
            async with asyncio.timeout(self._timeout_s):
                result = await client.call_tool(name, dict(arguments))
        except TimeoutError:
            raise ToolExhausted(f"it took longer than {self._timeout_s:g} s") from None
        except Exception as error:  # the SDK's transports raise errors of their own libraries
            if isinstance(error, MCPError) and error.error.code != CONNECTION_CLOSED:
                raise ToolRefused(error.error.message) from error
            self._end(connection)
            raise EnvironmentFailed(
                f"the MCP server {self._title} ended in a call: {error!r}", kind="died"
            ) from error
        self._num_ends = 0
        if not isinstance(result, CallToolResult):
            raise ToolRefused("the tool wants more than a call")
        text = "\n".join(
            block.text if block.type == "text" else f"[{block.type}]" for block in result.content
        )
        if result.is_error:
            raise ToolRefused(text)
        return text

    async def _list(self) -> list[McpTool]:
        try:
            async with asyncio.timeout(START_S), self._connected() as client:
                return [
                    McpTool(self, tool.name, tool.description or tool.name, tool.input_schema)
                    for tool in (await client.list_tools()).tools
                ]
        except Exception as error:  # whatever the SDK or the server's start raises
            raise ConfigError(f"the MCP server {self._title} lists no tools: {error!r}") from error

    def _connect(self) -> asyncio.Future[Client]:
        if self._client is None:
            if self._num_ends > 1:
                raise EnvironmentFailed(
                    f"the MCP server {self._title} ended again after a restart", kind="died"
                )
            self._client, self._is_over = asyncio.get_running_loop().create_future(), asyncio.Event()
            self._serving = asyncio.create_task(self._serve(self._client, self._is_over))
        return self._client

    async def _serve(self, ready: asyncio.Future[Client], is_over: asyncio.Event) -> None:
        """Hold the connection: the SDK wants it opened and closed by one task."""
        try:
            async with self._connected() as client:
                ready.set_result(client)
                await is_over.wait()
        except Exception as error:  # whatever the SDK or the server's start raises
            if not ready.done():
                self._end(ready)
                what = f"the MCP server {self._title} did not start: {error!r}"
                ready.set_exception(EnvironmentFailed(what, kind="died"))

    @contextlib.asynccontextmanager
    async def _connected(self) -> AsyncIterator[Client]:
        async with contextlib.AsyncExitStack() as stack:
            target: Transport | StdioServerParameters | str = self._target
            if self._key is not None:
                import httpx2
                from mcp.client.streamable_http import streamable_http_client

                header, wait = {"Authorization": f"Bearer {self._key}"}, httpx2.Timeout(START_S, read=None)
                http = await stack.enter_async_context(httpx2.AsyncClient(headers=header, timeout=wait))
                target = streamable_http_client(self._url, http_client=http)
            yield await stack.enter_async_context(self._made(target))

    def _end(self, connection: asyncio.Future[Client]) -> None:
        """Forget a connection; of all calls that were in flight over it the first one counts its end."""
        if self._client is not connection:
            return
        self._num_ends += 1
        self._client = None
        self._is_over.set()


class McpTool(Tool):
    """One tool of a server."""

    def __init__(self, server: McpServer, name: str, description: str, schema: Mapping[str, object]) -> None:
        self.name, self.description = name, description
        self._server, self._schema = server, schema

    def parameters(self) -> Mapping[str, object]:
        return self._schema

    async def answer(self, arguments: Mapping[str, object], key: CallKey | None) -> str:
        return await self._server.call(self.name, arguments)

    async def call(self, text: str) -> str:
        raise AssertionError("it has no one argument")
