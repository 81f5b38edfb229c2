"""A reward server, asked over HTTP in batches; docs/rewards.md has its contract.

Invariant: what comes back is numbers or an error.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from rollout_service.rewards.score import Answer, RewardError, Score, checked_score
from rollout_service.rewards.served.batches import Batches, Outcome
from rollout_service.rewards.served.messages import PlainAnswer
from rollout_service.rewards.served.pool import plain_answer
from rollout_service.rewards.served.posting import SHOWN_CHARS, JsonServer

WAIT_S = 0.005
MAX_RUNNING = 8


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
        self._server = JsonServer(name, settings.url, settings.key_env, deadline_s)
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
        await self._server.close()

    def child_pids(self) -> list[int]:
        """Return none."""
        return []

    async def _run(self, items: Sequence[PlainAnswer]) -> Sequence[Outcome]:
        return await self._server.ask({"answers": list(items)}, lambda said: self._outcomes(items, said))

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
