"""A scripted engine: no model, only plausible traffic. For simulation and unit tests.

Tokens are random digits and an end of sequence, drawn from the request's seed; a token's log-prob
is a fixed function of the token and the version, so a greedy answer is zeros up to the limit. Time
passes by a token rate. It writes no text, so stop strings mean nothing to it.
Invariant: with `follows_steps`, weights that were restored and published anew answer as they did before.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from asyncrl.core.errors import EngineError
from asyncrl.core.staleness import UNLOADED, PolicyVersion, Span
from asyncrl.core.status.replica import CacheStatus
from rollout_service.engine.protocol import Completion, Interrupted, Sampling

if TYPE_CHECKING:
    from weight_sync.memory.staging import Staged

NUM_DIGITS = 10
STOP_PROBABILITY = 0.2
PAUSED_S = 0.001


def scripted_logprob(token: int, version: int) -> float:
    """Return the log-prob that the scripted policy `version` gives to `token`."""
    return -1.0 - 0.01 * token - 0.001 * (version % 100)


class ScriptedEngine:
    """Answers with random digits at `tokens_per_s` per request.

    Args:
        eos_id: The token that ends a response.
        tokens_per_s: Speed of each request; 0 answers at once.
        follows_steps: Log-probs are a function of the version's step, as a real engine's are, and not of
            its number, which tells more versions apart.
    """

    probe_gap: float | None = None

    def __init__(self, eos_id: int, tokens_per_s: float = 0.0, *, follows_steps: bool = False) -> None:
        self._eos_id = eos_id
        self._follows_steps = follows_steps
        self._tokens_per_s = tokens_per_s
        self._serving = PolicyVersion(UNLOADED, 0)
        self._is_running = asyncio.Event()
        self._requests: set[asyncio.Event] = set()
        self.swaps_to_fail = 0

    @property
    def serving(self) -> PolicyVersion:
        return self._serving

    @property
    def is_loaded(self) -> bool:
        return self._is_running.is_set()

    async def start(self) -> None:
        self._is_running.set()

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, request_id: str) -> Completion:
        source = random.Random(sampling.seed)
        token_ids: list[int] = []
        versions: list[PolicyVersion] = []
        ended = asyncio.Event()
        self._requests.add(ended)
        try:
            while len(token_ids) < sampling.max_tokens and (not token_ids or token_ids[-1] != self._eos_id):
                await self._wait_one_token(ended)
                if ended.is_set():
                    beginning = self._completion(token_ids, versions, "abort")
                    raise Interrupted(f"request {request_id} was ended before its end", completion=beginning)
                token_ids.append(self._next_token(token_ids, sampling, source))
                versions.append(self._serving)
        finally:
            self._requests.discard(ended)
        return self._completion(token_ids, versions, "stop" if token_ids[-1] == self._eos_id else "length")

    async def interrupt(self) -> None:
        running = set(self._requests)
        for ended in running:
            ended.set()
        while running & self._requests:
            await asyncio.sleep(0)

    def _next_token(self, before: list[int], sampling: Sampling, source: random.Random) -> int:
        if not sampling.temperature:
            return 0
        stops = before and not sampling.ignores_eos and source.random() < STOP_PROBABILITY
        return self._eos_id if stops else source.randrange(NUM_DIGITS)

    async def _wait_one_token(self, ended: asyncio.Event) -> None:
        """Let the time of a token pass while the engine runs, or until `ended` is set."""
        if self._tokens_per_s:
            await _wait(ended, 1.0 / self._tokens_per_s)
        else:
            await asyncio.sleep(0.0)
        while not (self._is_running.is_set() or ended.is_set()):
            await _wait(ended, PAUSED_S)

    async def swap(self, staged: Staged) -> None:
        self._is_running.clear()
        if self.swaps_to_fail:
            self.swaps_to_fail -= 1
            raise EngineError(f"the scripted engine was told to refuse version {staged.version.number}")
        self._serving = staged.version
        self._is_running.set()

    def _completion(self, token_ids: list[int], versions: list[PolicyVersion], reason: str) -> Completion:
        known = [one.step if self._follows_steps else one.number for one in versions]
        logprobs = [scripted_logprob(token, version) for token, version in zip(token_ids, known, strict=True)]
        return Completion(
            token_ids=np.asarray(token_ids, dtype=np.int32),
            logprobs=np.asarray(logprobs, dtype=np.float32),
            spans=_spans([one.number for one in versions]),
            finish_reason=reason,
        )

    def cache_status(self) -> CacheStatus | None:
        return None

    def child_pids(self) -> list[int]:
        return []

    async def shutdown(self) -> None:
        self._is_running.clear()


async def _wait(ended: asyncio.Event, time_s: float) -> None:
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(ended.wait(), time_s)


def _spans(versions: list[int]) -> tuple[Span, ...]:
    starts = [i for i, version in enumerate(versions) if i == 0 or version != versions[i - 1]]
    ends = [*starts[1:], len(versions)] if versions else []
    return tuple(Span(versions[start], start, end) for start, end in zip(starts, ends, strict=True))
