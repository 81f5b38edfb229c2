"""Requests of JSON to one server, repeated until a deadline.

Invariant: a request is repeated until its deadline and no longer, and no more often than allowed.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
from collections.abc import Callable, Mapping
from typing import TypeVar
from urllib.parse import urlsplit

import aiohttp

from asyncrl.core.errors import ConfigError
from asyncrl.core.states import Reason
from rollout_service.rewards.score import Fault, RewardError

FIRST_PAUSE_S, MAX_PAUSE_S = 0.25, 8.0
"""Between attempts; doubled from one to the next, and as long as the server asks for."""
OF_ONE_REQUEST = (400, 413, 422)
"""Statuses of a request that cannot be answered, as one too long for the model: others still can."""
MAX_REPLY_BYTES = 4 << 20
SHOWN_CHARS = 200
T = TypeVar("T")


class TryAgain(Exception):
    """The server did not answer, said that it cannot at the moment, or its answer is of no use.

    Args:
        after_s: Pause that the server asks for.
        reason: Of the failure if this was the last attempt.
    """

    def __init__(self, said: str, after_s: float = 0.0, reason: Reason = Reason.INFRASTRUCTURE) -> None:
        super().__init__(said)
        self.after_s, self.reason = after_s, reason


class JsonServer:
    """One URL that is asked by POST.

    Args:
        name: Of the reward, for messages.
        key_env: Environment variable that holds a bearer key; none is sent without it.
        deadline_s: Of all attempts of one request, from the first.
        attempts: Most of one request.

    Raises:
        ConfigError: The URL holds a password, or the key is not in the environment.
    """

    def __init__(
        self, name: str, url: str, key_env: str | None, deadline_s: float, attempts: float = math.inf
    ) -> None:
        self._name, self._url, self._deadline_s, self._attempts = name, url, deadline_s, attempts
        parts = urlsplit(url)
        if not parts.hostname or parts.username is not None:
            raise ConfigError(
                f"the URL of the reward '{name}' names no host, or a user",
                hint="Use `key_env` or `api_key_env`",
            )
        key = os.environ.get(key_env) if key_env else None
        if key_env and not key:
            raise ConfigError(f"the reward '{name}' wants a key in ${key_env}, which is not set")
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        """End the connections."""
        if self._session is not None:
            await self._session.close()

    async def ask(
        self,
        body: Mapping[str, object],
        read: Callable[[object], T],
        spend: Callable[[], None] = lambda: None,
    ) -> T:
        """Return what `read` makes of the server's answer.

        Args:
            read: May raise TryAgain, RewardError.
            spend: Called before each attempt; may raise RewardError.

        Raises:
            RewardError: There was no usable answer.
        """
        loop, pause_s, num_attempts = asyncio.get_running_loop(), FIRST_PAUSE_S, 0
        end = loop.time() + self._deadline_s
        while True:
            spend()
            num_attempts += 1
            try:
                return read(await self._post(body, max(end - loop.time(), 0.001)))
            except TryAgain as error:
                wait_s = max(pause_s, error.after_s)
                if end - loop.time() <= wait_s or num_attempts >= self._attempts:
                    raise self._given_up(error, num_attempts) from error
            await asyncio.sleep(wait_s)
            pause_s = min(2 * pause_s, MAX_PAUSE_S)

    def _given_up(self, error: TryAgain, num_attempts: int) -> RewardError:
        tried = f"within {self._deadline_s:g} s"
        if num_attempts >= self._attempts:
            tried = f"in {num_attempts} attempts"
        kind: Fault = "unreachable" if error.reason is Reason.INFRASTRUCTURE else "refused"
        message = f"the reward '{self._name}' did not answer {tried}: {error}"
        return RewardError(message, kind=kind, reason=error.reason)

    async def _post(self, body: Mapping[str, object], timeout_s: float) -> object:
        """Return the JSON of one attempt. Raises TryAgain, RewardError."""
        if self._session is None:
            self._session = aiohttp.ClientSession(headers=self._headers)
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        try:
            posting = self._session.post(self._url, json=body, timeout=timeout, allow_redirects=False)
            async with posting as reply:
                said = await reply.content.read(MAX_REPLY_BYTES)
                while len(said) < MAX_REPLY_BYTES and (more := await reply.content.read(MAX_REPLY_BYTES)):
                    said += more
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise TryAgain(f"{type(error).__name__}: {error}") from error
        shown = said[:SHOWN_CHARS].decode(errors="replace")
        if reply.status >= 500 or reply.status == 429:
            raise TryAgain(f"status {reply.status}: {shown}", _seconds(reply.headers.get("Retry-After")))
        what = f"the reward '{self._name}': status {reply.status}: {shown}"
        if reply.status != 200:
            reason = Reason.REWARD if reply.status in OF_ONE_REQUEST else Reason.INFRASTRUCTURE
            raise RewardError(what, kind="refused", reason=reason)
        try:
            found: object = json.loads(said)
            return found
        except ValueError as error:
            what = f"the reward '{self._name}' sent no JSON: {shown}"
            raise RewardError(what, kind="refused", reason=Reason.INFRASTRUCTURE) from error


def _seconds(said: str | None) -> float:
    """Return the seconds of a `Retry-After`, 0 for none or a date."""
    return float(said) if said is not None and said.isdecimal() else 0.0
