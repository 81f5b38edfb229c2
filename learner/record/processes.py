"""A replay in as many processes on this machine as the run's learner had ranks.

Owns their start and end: one that fails ends all, and so does silence. Rank 0 says what it compared, a JSON
line per step as that is done; a rank that fails for a reason that has a name says that as such a line. Must
never take another line for one of these: libraries print too, and a rank that is ended leaves half a line.
Each of them runs `learner.record.rank`.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict
from typing import IO, TypedDict

import msgspec

from asyncrl.core import errors as named_errors
from asyncrl.core.errors import AsyncrlError, ServiceFailed
from learner.record.comparison import ComparedStep, Comparison
from learner.record.plan import Plan

POLL_S = 0.05
END_S = 10.0
TAIL_CHARS = 2000
SILENCE_S = 1800.0
"""Longest silence of all ranks: a collective would have given up before."""
ERROR = "error"
DIFFERENCES = "differences"
"""Keys that a line of an error and a line of a step have."""


class _Order(TypedDict):
    """Order to a rank: the fields of a `Plan`, those of `--set`, and of a `Placement`."""

    plan: dict[str, object]
    overrides: list[str]
    placement: dict[str, object]


def replay_on_ranks(
    plan: Plan, overrides: Sequence[str], num_ranks: int, say: Callable[[str], None]
) -> Comparison:
    """Replay `plan` in `num_ranks` processes and return what rank 0 compared; `say` it as it comes.

    Raises:
        AsyncrlError: The one that a rank has ended with.
        ServiceFailed: A rank has ended with another error, which is quoted; or nothing moves.
    """
    say(f"{num_ranks} processes, as the run's learner had")
    order = _Order(
        plan={**asdict(plan), "folder": str(plan.folder)},
        overrides=list(overrides),
        placement={"world_size": num_ranks, "rendezvous": f"127.0.0.1:{_free_port()}"},
    )
    with ExitStack() as stack:
        outputs = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(num_ranks)]
        errors = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(num_ranks)]
        ranks: list[subprocess.Popen[str]] = []
        stack.callback(_end, ranks)
        for output, error in zip(outputs, errors, strict=True):
            ranks.append(_start(order, len(ranks), output, error))
        steps: list[ComparedStep] = []
        lines = _Lines(outputs[0])

        def hear() -> None:
            for step in _find_steps(lines):
                steps.append(step)
                say(str(step))

        _await(ranks, outputs, errors, hear)
    return Comparison(plan.began_at, plan.first, steps)


class _Lines:
    """The JSON objects that a rank has said since they were last taken.

    Must never move the place at which the rank writes: the file is open once, for both.
    """

    def __init__(self, output: IO[str]) -> None:
        self._file = output.fileno()
        self._num_taken_bytes = 0

    def take(self) -> Iterator[dict[str, object]]:
        """Yield those of whole lines; what is not a JSON object is none of ours."""
        size = os.fstat(self._file).st_size
        said = os.pread(self._file, size - self._num_taken_bytes, self._num_taken_bytes)
        whole = said[: said.rfind(b"\n") + 1]
        self._num_taken_bytes += len(whole)
        for line in whole.splitlines():
            with suppress(ValueError):
                fields = json.loads(line)
                if isinstance(fields, dict):
                    yield fields


def _find_steps(lines: _Lines) -> Iterator[ComparedStep]:
    for fields in lines.take():
        if DIFFERENCES in fields:
            yield msgspec.convert(fields, ComparedStep)


def _start(order: _Order, rank: int, output: IO[str], errors: IO[str]) -> subprocess.Popen[str]:
    given = json.dumps({**order, "placement": {**order["placement"], "rank": rank}})
    command = [sys.executable, "-m", "learner.record.rank", given]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=errors, text=True)


def _await(
    ranks: Sequence[subprocess.Popen[str]],
    outputs: Sequence[IO[str]],
    errors: Sequence[IO[str]],
    hear: Callable[[], None] = lambda: None,
    silence_s: float = SILENCE_S,
) -> None:
    """Wait until all have ended, and `hear` them; raise the error of a rank that fails as soon as one has."""
    num_bytes, heard = 0, time.monotonic()
    while any(rank.poll() is None for rank in ranks) and not any(rank.poll() for rank in ranks):
        said = sum(os.fstat(file.fileno()).st_size for file in (*outputs, *errors))
        if said != num_bytes:
            num_bytes, heard = said, time.monotonic()
            hear()
        if time.monotonic() - heard > silence_s:
            raise ServiceFailed(f"no rank of the replay has answered for {silence_s:g} s")
        time.sleep(POLL_S)
    hear()
    failed = [at for at, rank in enumerate(ranks) if rank.poll()]
    # Those that failed for a reason of their own come first: the others miss them.
    for error in filter(None, (_find_error(outputs[at]) for at in failed)):
        raise error
    for at in failed:
        errors[at].seek(0)
        raise ServiceFailed(f"rank {at} of the replay has failed: {errors[at].read()[-TAIL_CHARS:]}")


def _find_error(output: IO[str]) -> AsyncrlError | None:
    """Return the error that a rank has put into words, if it has."""
    for fields in _Lines(output).take():
        kind = getattr(named_errors, str(fields.get(ERROR)), None)
        if isinstance(kind, type) and issubclass(kind, AsyncrlError) and {"message", "hint"} <= fields.keys():
            return kind(str(fields["message"]), hint=str(fields["hint"]))
    return None


def _end(ranks: Sequence[subprocess.Popen[str]]) -> None:
    """Kill all, then see them end: one that hangs in the kernel keeps none of the others."""
    for rank in ranks:
        if rank.poll() is None:
            rank.kill()
    end = time.monotonic() + END_S
    for rank in ranks:
        with suppress(subprocess.TimeoutExpired):
            rank.wait(max(0.0, end - time.monotonic()))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
