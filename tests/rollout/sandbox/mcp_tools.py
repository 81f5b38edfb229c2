"""An MCP server for tests, written with the official SDK: `python mcp_tools.py [PORT [KEY]]`."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import uvicorn
from mcp.server.mcpserver import MCPServer

server = MCPServer("tests")


@server.tool()
def add(first: int, second: int) -> str:
    """Add two numbers."""
    return str(first + second)


@server.tool()
def fail() -> str:
    """Raise an error."""
    raise ValueError("no luck")


@server.tool()
def wait(seconds: float) -> str:
    """Wait."""
    time.sleep(seconds)
    return "waited"


@server.tool()
def long(num_chars: int) -> str:
    """Return a long text."""
    return "x" * num_chars


@server.tool()
def die() -> str:
    """End the server."""
    os._exit(1)


@server.tool()
def look(path: str) -> str:
    """Tell what this server sees."""
    return f"{Path(path).exists()} {os.getpid()} {os.environ.get('FOR_SERVER')} {os.environ.get('PLANTED')}"


class Guarded:
    """Answers requests without the key with 401."""

    def __init__(self, app: Any, key: str) -> None:
        self._app, self._header = app, (b"authorization", f"Bearer {key}".encode())

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or self._header in scope["headers"]:
            await self._app(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": 401, "headers": []})
        await send({"type": "http.response.body", "body": b""})


if __name__ == "__main__":
    if len(sys.argv) > 2:
        app = Guarded(server.streamable_http_app(), sys.argv[2])
        uvicorn.run(app, port=int(sys.argv[1]), log_level="error")
    elif len(sys.argv) > 1:
        server.run("streamable-http", port=int(sys.argv[1]))
    else:
        server.run("stdio")
