"""The gateway's HTTP server: uvicorn, with a bound on connections over which nobody has shown a key.

A connection is a stranger's until the app admits it: a request over it has shown the gateway's key or that of
a session. Invariants: such a connection lasts `HEAD_DEADLINE_S` at most; of `MAX_STRANGERS` and one more the
address that has the most loses its oldest. So no address shuts out another, and an agent, which shows its
key at once, gets in whatever strangers hold open.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from functools import partial
from typing import cast

import uvicorn
from fastapi import FastAPI, Request
from uvicorn.protocols.http.auto import AutoHTTPProtocol

MAX_CONNECTIONS = 2048
MAX_STRANGERS = 256
HEAD_DEADLINE_S = 10.0
KEEP_ALIVE_S = 30
ADMIT = "admit"
"""In the state of a request: lets its connection stay."""


class Strangers:
    """The connections over which no key was shown yet, the oldest first."""

    def __init__(self) -> None:
        self._hosts: dict[asyncio.Transport, str] = {}

    def come(self, transport: asyncio.Transport, host: str) -> None:
        """Take a new connection in; close another one if they are too many."""
        self._hosts[transport] = host
        if len(self._hosts) <= MAX_STRANGERS:
            return
        crowds = Counter(self._hosts.values())
        most = max(crowds.values())
        self.close(next(one for one, host in self._hosts.items() if crowds[host] == most))

    def leave(self, transport: asyncio.Transport) -> None:
        """Forget a connection that is admitted or has ended."""
        self._hosts.pop(transport, None)

    def close(self, transport: asyncio.Transport) -> None:
        """Close a connection, unless it is a stranger's no more."""
        if self._hosts.pop(transport, None) is not None:
            transport.abort()


class _Protocol(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
    """A connection that the strangers' bounds hold for until it is admitted."""

    def __init__(self, strangers: Strangers, *, app_state: dict[str, object], **settings: object) -> None:
        super().__init__(app_state={**app_state, ADMIT: self._admit}, **settings)
        self._strangers = strangers

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._strangers.come(transport, str(self.client and self.client[0]))
        self._deadline = self.loop.call_later(HEAD_DEADLINE_S, self._strangers.close, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._admit()
        super().connection_lost(exc)

    def _admit(self) -> None:
        self._deadline.cancel()
        self._strangers.leave(self.transport)


def admit_connection(request: Request) -> None:
    """Let the connection of a request that has shown a key stay, where it came over one."""
    if admit := request.scope.get("state", {}).get(ADMIT):
        admit()


def make_server(app: FastAPI, stop_deadline_s: float) -> uvicorn.Server:
    """Return the server of `app`, which calls `admit_connection`.

    Args:
        stop_deadline_s: Time for answers in flight to reach their clients when the server stops.
    """
    config = uvicorn.Config(
        app,
        http=cast(type[asyncio.Protocol], partial(_Protocol, Strangers())),
        log_config=None,
        access_log=False,
        lifespan="off",
        ws="none",
        server_header=False,
        limit_concurrency=MAX_CONNECTIONS,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=int(stop_deadline_s),
    )
    return uvicorn.Server(config)
