"""A judge: a language model that scores answers, behind any OpenAI-compatible server.

Owns the prompt, the parsing of the verdict, the cache and the budget. Invariant: a verdict that cannot be
read, a server that cannot be reached and a budget that is used up are failures, never a number.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import functools
import hashlib
import json
import os
import re
import struct
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from asyncrl.core.errors import ConfigError
from asyncrl.core.states import Reason
from rollout_service.rewards.score import Answer, RewardError, Score, checked_number
from rollout_service.rewards.served.posting import SHOWN_CHARS, JsonServer, TryAgain

PROMPT = """Judge an answer to a task.

Task:
{prompt}

Reference answer:
{ground_truth}

Answer:
{response}

"""
ASKS_SCORE = "Say in a few words how good the answer is. End with a line `Score: ` and a number from 0 to 10."
ASKS_RUBRIC = (
    "Criteria:\n{criteria}\n\nEnd with a JSON list of true or false, one for each criterion in order."
)
SCORE = r"score\s*[:=]\s*\**\s*(-?\d+(?:\.\d+)?)"
_PLACES = re.compile(r"\{(prompt|response|ground_truth)\}")
COUNTS = struct.Struct("<QQ")
_LIST = re.compile(r"\[[^\[\]]*\]")


@dataclass(frozen=True)
class JudgeSettings:
    """Server, question and limits of a judge.

    Attributes:
        base_url: Of an OpenAI-compatible API, `http://host:8000/v1`.
        prompt: Text with the places {prompt}, {response} and {ground_truth}.
        rubric: Criteria, or weights by criterion; the score is the share of those that hold.
        parse: Without a rubric, a regular expression; the group of its last match is the number.
        scale: The number is divided by it.
        api_key_env: Environment variable that holds the key.
        max_tokens, concurrency, attempts: Of a verdict; requests at once; most requests for one verdict.
        max_calls, max_total_tokens: Budget of a run, failed calls too; null for none.
        cache: Verdicts that are kept, by the text of the whole prompt.
    """

    base_url: str
    model: str
    prompt: str | None = None
    rubric: Sequence[str] | Mapping[str, float] = ()
    parse: str = SCORE
    scale: float = 10.0
    api_key_env: str | None = None
    max_tokens: int = 512
    concurrency: int = 16
    attempts: int = 5
    max_calls: int | None = None
    max_total_tokens: int | None = None
    cache: int = 4096

    def __post_init__(self) -> None:
        """Raise ConfigError where a value cannot be used."""
        for key in ("max_tokens", "concurrency", "attempts", "max_calls", "max_total_tokens", "cache"):
            value = getattr(self, key)
            may_be_none = key.startswith(("max_calls", "max_total")) and value is None
            if not may_be_none and (type(value) is not int or value < 1):
                raise ConfigError(f"'{key}' of a judge must be a whole number above 0, not {value!r}")
        weights = [*self.weights.values(), self.scale]
        if not all(isinstance(one, int | float) and one > 0 for one in weights):
            raise ConfigError("the weights of a judge's rubric and its scale must be numbers above 0")
        if not isinstance(self.prompt, str | None) or "{response}" not in (self.prompt or PROMPT):
            raise ConfigError("a judge's prompt needs a place for the answer", hint="Write {response} in it")
        try:
            groups = re.compile(self.parse).groups
        except (re.error, TypeError) as error:
            raise ConfigError(f"a judge's parse rule is no regular expression: {error}") from error
        if groups != 1:
            raise ConfigError(f"a judge's parse rule has {groups} groups", hint="One, around the number")

    @property
    def weights(self) -> Mapping[str, float]:
        """Weights of the rubric by criterion."""
        return self.rubric if isinstance(self.rubric, Mapping) else dict.fromkeys(self.rubric, 1.0)

    def ask(self, answer: Answer) -> str:
        """Return the text that the judge reads."""
        content = answer.prompt.content
        chat = "" if isinstance(content, str) else "\n".join(f"{m['role']}: {m['content']}" for m in content)
        told = {
            "prompt": content if isinstance(content, str) else chat,
            "response": answer.response,
            "ground_truth": str(answer.prompt.ground_truth),
        }
        text = _PLACES.sub(lambda place: told[place[1]], self.prompt or PROMPT)
        if not self.rubric:
            return text if self.prompt else text + ASKS_SCORE
        lines = (f"{number}. {criterion}" for number, criterion in enumerate(self.weights, 1))
        return text + ASKS_RUBRIC.replace("{criteria}", "\n".join(lines))

    def read(self, verdict: str) -> float | None:
        """Return the score that a verdict states, None if it states none."""
        if not self.rubric:
            found = re.findall(self.parse, verdict, re.IGNORECASE)
            return _as_number(found[-1], self.scale) if found else None
        weights = list(self.weights.values())
        for text in reversed(_LIST.findall(verdict)):
            held = _as_list(text)
            if len(held) == len(weights) and all(type(one) is bool for one in held):
                return sum(weight for weight, one in zip(weights, held, strict=True) if one) / sum(weights)
        return None


class JudgeReward:
    """A part that a judge computes.

    Args:
        deadline_s: Of all attempts at one verdict, from the first.
    """

    def __init__(self, name: str, settings: JudgeSettings, deadline_s: float = 60.0) -> None:
        self.name = name
        self._settings = settings
        url = settings.base_url.rstrip("/") + "/chat/completions"
        self._server = JsonServer(name, url, settings.api_key_env, deadline_s, settings.attempts)
        self._free = asyncio.Semaphore(settings.concurrency)
        self._running: set[asyncio.Task[Score]] = set()
        self._verdicts: OrderedDict[bytes, asyncio.Task[Score]] = OrderedDict()
        self.num_calls = self.num_tokens = 0
        self._counts: Path | None = None

    def count_in(self, folder: Path) -> None:
        """Count what is spent in a file of a run's folder: that of all processes which ever counted there."""
        if (self._settings.max_calls, self._settings.max_total_tokens) != (None, None):
            folder.mkdir(parents=True, exist_ok=True)
            self._counts = folder / f"judge-{quote(self.name, safe='')}.spent"

    async def start(self) -> None:
        """Nothing is asked yet: the server may come up later."""

    async def value(self, answer: Answer) -> Score:
        """Return the judge's number; asked again about the same answer, the one that it gave."""
        text = self._settings.ask(answer)
        key = hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=16).digest()
        task = self._verdicts.pop(key, None) or self._begin(key, text)
        self._verdicts[key] = task
        while len(self._verdicts) > self._settings.cache:
            self._verdicts.popitem(last=False)
        return await asyncio.shield(task)  # others may wait for the same verdict

    def _begin(self, key: bytes, text: str) -> asyncio.Task[Score]:
        task = asyncio.create_task(self._judge(text))
        self._running.add(task)
        task.add_done_callback(functools.partial(self._end, key))
        return task

    def _end(self, key: bytes, task: asyncio.Task[Score]) -> None:
        self._running.discard(task)
        has_failed = task.cancelled() or task.exception() is not None
        if has_failed and self._verdicts.get(key) is task:
            del self._verdicts[key]

    async def close(self) -> None:
        """End what is under way, and the connections."""
        tasks = tuple(self._running)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._server.close()

    def child_pids(self) -> list[int]:
        """Return none."""
        return []

    async def _judge(self, text: str) -> Score:
        settings = self._settings
        body: dict[str, object] = {
            "model": settings.model,
            "messages": [{"role": "user", "content": text.encode("utf-8", "replace").decode()}],
            "temperature": 0.0,
            "max_tokens": settings.max_tokens,
        }
        async with self._free:
            return await self._server.ask(body, self._read, self._spend)

    def _spend(self) -> None:
        settings = self._settings
        with self._counting():
            for name, used in (("max_calls", self.num_calls), ("max_total_tokens", self.num_tokens)):
                limit = getattr(settings, name)
                if limit is not None and used >= limit:
                    what = f"the budget of the judge '{self.name}' is used up: {name} is {limit}"
                    raise RewardError(what, kind="refused", reason=Reason.BUDGET)
            self.num_calls += 1

    @contextlib.contextmanager
    def _counting(self) -> Iterator[None]:
        """Bring the counts up to date, and keep what is made of them meanwhile."""
        if self._counts is None:
            yield
            return
        try:
            with open(os.open(self._counts, os.O_RDWR | os.O_CREAT, 0o600), "r+b", buffering=0) as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                found = file.read()
                self.num_calls, self.num_tokens = COUNTS.unpack(found) if found else (0, 0)
                yield
                os.pwrite(file.fileno(), COUNTS.pack(self.num_calls, self.num_tokens), 0)
        except OSError as error:
            what = f"what the judge '{self.name}' has spent cannot be counted: {error}"
            raise RewardError(what, reason=Reason.INFRASTRUCTURE) from error

    def _read(self, reply: object) -> Score:
        try:
            verdict, is_whole, tokens = _content_of(reply)
        except (LookupError, TypeError) as error:
            raise TryAgain(f"no chat completion: {str(reply)[:SHOWN_CHARS]}") from error
        with self._counting():
            self.num_tokens += tokens
        value = self._settings.read(verdict) if is_whole else None
        if value is None:
            raise TryAgain(f"a verdict without a score: {verdict[-SHOWN_CHARS:]!r}", reason=Reason.REWARD)
        value = checked_number(self.name, value)
        return Score(value, reason=Reason.WRONG if value <= 0 else "")


def _content_of(reply: object) -> tuple[str, bool, int]:
    """Return the text of a chat completion, whether it came to its end, and the tokens that it took.

    Raises:
        LookupError, TypeError: It is none.
    """
    if not isinstance(reply, Mapping):
        raise TypeError("no object")
    choice = reply["choices"][0]
    content = choice["message"]["content"]
    if not isinstance(content, str):
        raise TypeError("no text")
    usage = reply.get("usage")
    tokens = usage.get("total_tokens") if isinstance(usage, Mapping) else None
    return content, choice.get("finish_reason") != "length", tokens if isinstance(tokens, int) else 0


def _as_number(text: str, scale: float) -> float | None:
    try:
        return float(text) / scale
    except ValueError:
        return None


def _as_list(text: str) -> list[object]:
    try:
        found: list[object] = json.loads(text)
    except ValueError:
        return []
    return found
