"""A reward server, asked over HTTP in batches, with retries; docs/rewards.md has its contract.

Invariant: a batch is asked for until its deadline and no longer; what comes back is numbers or an error.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

import aiohttp

from asyncrl.core.errors import ConfigError
from asyncrl.core.states import Reason
from rollout_service.rewards.score import Answer, RewardError, Score, checked_score
from rollout_service.rewards.served.batches import Batches, Outcome
from rollout_service.rewards.served.messages import PlainAnswer
from rollout_service.rewards.served.pool import plain_answer

WAIT_S = 0.005
MAX_RUNNING = 8
FIRST_PAUSE_S, MAX_PAUSE_S = 0.25, 8.0
"""Between attempts; doubled from one to the next."""
MAX_REPLY_BYTES = 4 << 20
SHOWN_CHARS = 200


class _TryAgain(Exception):
    """The server did not answer, or said that it cannot at the moment."""


@dataclass(frozen=True)
class RemoteSettings:
    """Connection to the server.

    Attributes:
        url: `http://` or `https://`, asked by POST.
        key_env: Environment variable that holds a bearer key; none is sent without it.
    """

    url: str
    key_env: str | None = None


class RemoteReward:
    """A part that a server computes.

    Args:
        batch: Answers in one request.
        deadline_s: Of all attempts at one batch, from the first: its wait behind others is not counted.

    Raises:
        ConfigError: The URL holds a password, or the key is not in the environment.
    """

    def __init__(
        self, name: str, settings: RemoteSettings, batch: int = 16, deadline_s: float = 30.0
    ) -> None:
        self.name = name
        self._url = settings.url
        parts = urlsplit(settings.url)
        if not parts.hostname or parts.username is not None:
            raise ConfigError(
                f"the URL of the reward '{name}' names no host, or a user", hint="Use `key_env`"
            )
        key = os.environ.get(settings.key_env) if settings.key_env else None
        if settings.key_env and not key:
            raise ConfigError(f"the reward '{name}' wants a key in ${settings.key_env}, which is not set")
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._deadline_s = deadline_s
        self._session: aiohttp.ClientSession | None = None
        self._batches = Batches(self._run, batch, WAIT_S, MAX_RUNNING)

    async def start(self) -> None:
        """Nothing is asked yet: the server may come up later."""

    async def value(self, answer: Answer) -> Score:
        """Return the server's number. Raises RewardError."""
        item = plain_answer(answer)
        try:
            json.dumps(item, allow_nan=False)
        except (TypeError, ValueError) as error:
            message = f"row {answer.prompt.row} cannot be sent to the reward '{self.name}': {error}"
            raise RewardError(message, kind="refused") from error
        return await self._batches.value(item)

    async def close(self) -> None:
        """End the connections."""
        await self._batches.close()
        if self._session is not None:
            await self._session.close()

    def child_pids(self) -> list[int]:
        """Return none."""
        return []

    async def _run(self, items: Sequence[PlainAnswer]) -> Sequence[Outcome]:
        end, pause_s, said = asyncio.get_running_loop().time() + self._deadline_s, FIRST_PAUSE_S, ""
        while True:
            left_s = end - asyncio.get_running_loop().time()
            if left_s <= 0:
                message = f"the reward '{self.name}' did not answer within {self._deadline_s:g} s: {said}"
                raise RewardError(message, kind="unreachable")
            try:
                return self._outcomes(items, await self._post(items, left_s))
            except _TryAgain as error:
                said = str(error)
            await asyncio.sleep(min(pause_s, max(0.0, end - asyncio.get_running_loop().time())))
            pause_s = min(2 * pause_s, MAX_PAUSE_S)

    async def _post(self, items: Sequence[PlainAnswer], timeout_s: float) -> object:
        """Return the JSON of one attempt. Raises _TryAgain, RewardError."""
        if self._session is None:
            self._session = aiohttp.ClientSession(headers=self._headers)
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        try:
            posting = self._session.post(
                self._url, json={"answers": list(items)}, timeout=timeout, allow_redirects=False
            )
            async with posting as reply:
                body = await reply.content.read(MAX_REPLY_BYTES)
                while len(body) < MAX_REPLY_BYTES and (more := await reply.content.read(MAX_REPLY_BYTES)):
                    body += more
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise _TryAgain(f"{type(error).__name__}: {error}") from error
        shown = body[:SHOWN_CHARS].decode(errors="replace")
        if reply.status >= 500 or reply.status == 429:
            raise _TryAgain(f"status {reply.status}: {shown}")
        if reply.status != 200:
            what = f"the reward '{self.name}': status {reply.status}: {shown}"
            raise RewardError(what, kind="refused", reason=Reason.INFRASTRUCTURE)
        try:
            found: object = json.loads(body)
            return found
        except ValueError as error:
            what = f"the reward '{self.name}' sent no JSON: {shown}"
            raise RewardError(what, kind="refused", reason=Reason.INFRASTRUCTURE) from error

    def _outcomes(self, items: Sequence[PlainAnswer], said: object) -> list[Outcome]:
        scores = said.get("scores") if isinstance(said, dict) else None
        if not isinstance(scores, list) or len(scores) != len(items):
            message = f"the reward '{self.name}' sent no list of {len(items)} `scores`"
            raise RewardError(message, kind="refused")
        return [self._outcome(item, score) for item, score in zip(items, scores, strict=True)]

    def _outcome(self, item: PlainAnswer, score: object) -> Outcome:
        try:
            if isinstance(score, dict) and "error" in score:
                said = str(score["error"])[:SHOWN_CHARS]
                raise RewardError(f"the reward '{self.name}' (row {item['row']}): {said}", kind="raised")
            return checked_score(self.name, score)
        except RewardError as error:
            return error
