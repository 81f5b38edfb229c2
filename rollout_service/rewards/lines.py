"""Scoring of the lines of a file: `asyncrl score`.

Invariant: the target is written whole or not at all; the first line that cannot be read or scored ends it,
by its number.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import shutil
import sys
import tempfile
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TypedDict

import msgspec
from pydantic import ValidationError

from asyncrl.core.config.reading.document import read_document
from asyncrl.core.config.tree import RewardSection
from asyncrl.core.errors import ConfigError, DataError
from rollout_service.rewards.registry import build_parts
from rollout_service.rewards.score import Answer, RewardError, Score
from rollout_service.rewards.total import TotalReward

STANDARD = "-"
"""Stands for standard input or output."""
MAX_UNDER_WAY = 64
SPOOL_BYTES = 16 << 20
KINDS: Mapping[str, type | tuple[type, ...]] = {
    "response": str,
    "ground_truth": object,
    "prompt": (str, list),
    "data_source": str,
    "extra_info": dict,
    "finish_reason": str,
    "num_tokens": int,
}
"""Fields of a line; anything else in it is kept and not read."""
DEFAULTS = {"prompt": "", "data_source": "", "extra_info": {}, "finish_reason": "stop", "num_tokens": 0}


class Line(TypedDict):
    """Fields of a line that a reward reads, with `DEFAULTS` where the line has none."""

    response: str
    ground_truth: object
    prompt: str | list[dict[str, object]]
    data_source: str
    extra_info: dict[str, object]
    finish_reason: str
    num_tokens: int | bool


@dataclass(frozen=True)
class LineTask:
    """The task of one line, as a reward sees it."""

    row: int
    content: str | list[dict[str, object]]
    ground_truth: object
    data_source: str
    extra_info: Mapping[str, object]


def score_lines(rewards: Sequence[str], source: str, target: str) -> int:
    """Add `score`, and `parts` where there are several rewards, to each line; return how many there are.

    Args:
        rewards: Names, `file.py:function`, URLs, or sections in braces (`{fn: format, weight: 0.2}`).
        source: A file of JSON lines with `response` and `ground_truth`, or `-`.
        target: The file to write, or `-`.

    Raises:
        ConfigError: A reward cannot be used.
        DataError: A line cannot be read, or a file cannot be read or written.
        RewardError: A line cannot be scored.
    """
    reward = TotalReward(build_parts(_section(rewards).fn))
    try:
        with _reading(source) as lines, _writing(target) as out:
            return asyncio.run(_score_all(reward, lines, source, out, has_parts=len(rewards) > 1))
    except OSError as error:
        raise DataError(f"cannot score {source} into {target}: {error}") from error


def _section(rewards: Sequence[str]) -> RewardSection:
    values: list[object] = []
    for text in rewards:
        document = read_document(text, "--reward", is_file=False) if text.startswith("{") else None
        if document is not None and document.problems:
            raise ConfigError(f"--reward {text}: {document.problems[0].what}")
        values.append(text if document is None else document.values)
    try:
        return RewardSection.model_validate({"fn": values})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise ConfigError(f"--reward {'.'.join(map(str, first['loc'][2:]))}: {first['msg']}") from error


async def _score_all(
    reward: TotalReward, lines: Iterator[bytes], source: str, out: IO[str], has_parts: bool
) -> int:
    """Score lines, some at once, and write them in their order."""
    under_way: deque[tuple[int, dict[str, object], asyncio.Task[Score]]] = deque()
    num_lines = 0
    try:
        await reward.start()
        for number in itertools.count(1):
            line = await asyncio.to_thread(next, lines, None)  # a pipe may have none for long
            if line is None:
                break
            if not line.strip():
                continue
            fields = _read_line(line, f"{source}, line {number}")
            answer = _answer_of(fields, number, f"{source}, line {number}")
            under_way.append((number, fields, asyncio.create_task(reward.score(answer))))
            num_lines += 1
            if len(under_way) >= MAX_UNDER_WAY:
                await _write_next(under_way, source, out, has_parts)
        while under_way:
            await _write_next(under_way, source, out, has_parts)
    finally:
        for _, _, task in under_way:
            task.cancel()
        await asyncio.gather(*(task for _, _, task in under_way), return_exceptions=True)
        await reward.close()
    return num_lines


async def _write_next(
    under_way: deque[tuple[int, dict[str, object], asyncio.Task[Score]]],
    source: str,
    out: IO[str],
    has_parts: bool,
) -> None:
    number, fields, task = under_way[0]
    try:
        score = await task
    except RewardError as error:
        raise RewardError(f"{source}, line {number}: {error.message}", kind=error.kind) from error
    under_way.popleft()
    added = {"score": score.value} | ({"parts": dict(score.parts)} if has_parts else {})
    out.write(json.dumps(fields | added, ensure_ascii=False) + "\n")


def _read_line(line: bytes, where: str) -> dict[str, object]:
    try:
        fields = json.loads(line)
    except ValueError as error:  # UnicodeDecodeError is one
        raise DataError(f"{where} is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise DataError(f"{where} is not a JSON object")
    return fields


def _answer_of(fields: Mapping[str, object], number: int, where: str) -> Answer:
    told: dict[str, object] = {**DEFAULTS, **fields}
    for name, kind in KINDS.items():
        if name not in told:
            raise DataError(f"{where} has no '{name}'")
        if not isinstance(told[name], kind):
            raise DataError(f"{where}: '{name}' is a {type(told[name]).__name__}")
    try:
        line = msgspec.convert(told, Line)
    except msgspec.ValidationError:
        raise DataError(f"{where}: 'prompt' is neither text nor a list of messages") from None
    task = LineTask(number, line["prompt"], line["ground_truth"], line["data_source"], line["extra_info"])
    return Answer(task, line["response"], line["finish_reason"], line["num_tokens"])


@contextlib.contextmanager
def _reading(source: str) -> Iterator[Iterator[bytes]]:
    if source == STANDARD:
        yield iter(sys.stdin.buffer)
        return
    with open(source, "rb") as file:
        yield iter(file)


@contextlib.contextmanager
def _writing(target: str) -> Iterator[IO[str]]:
    """Yield a file that becomes the target at the end of the block, if nothing is raised in it."""
    if target == STANDARD:
        with tempfile.SpooledTemporaryFile(
            SPOOL_BYTES, "w+", encoding="utf-8", errors="backslashreplace", newline=""
        ) as spool:
            yield spool
            spool.seek(0)
            shutil.copyfileobj(spool, sys.stdout)
            sys.stdout.flush()
        return
    aside = Path(target).with_name(f".{Path(target).name}.{os.getpid()}")
    try:
        with open(aside, "x", encoding="utf-8", errors="backslashreplace", newline="") as file:
            yield file
        aside.replace(target)
    finally:
        aside.unlink(missing_ok=True)
