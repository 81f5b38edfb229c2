"""Load of every compared way, and the report of each (numpy and the standard library only).

Owns the trajectories of a turn, the pace of producers, and the windows in which deliveries count.
All times are CLOCK_MONOTONIC seconds, which the processes of one machine share.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

POOL_GROUPS = 4
"""Different groups that a producer sends in turn."""


@dataclass(frozen=True)
class Turn:
    """One measurement of one way.

    Attributes:
        num_tokens: Of each trajectory.
        group_size: Trajectories of a group.
        per_entry: Trajectories that a peer's entry holds: 1, or `group_size`.
        start_s, warm_s, stop_s: Producers begin; deliveries count; all stop.
        groups_per_s: Offered load over all producers; 0: as much as the way takes.
        options: Of the way, such as ours' journal.
    """

    name: str
    num_tokens: int
    group_size: int
    num_producers: int = 1
    num_consumers: int = 1
    start_s: float = 0.0
    warm_s: float = 0.0
    stop_s: float = 0.0
    groups_per_s: float = 0.0
    per_entry: int = 1
    options: dict[str, Any] = field(default_factory=dict)

    def as_values(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def num_bytes(self) -> int:
        """Bytes of a group's ids, masks and log-probs."""
        return 9 * self.num_tokens * self.group_size


class Way(Protocol):
    """One way from producers to consumers. Each role runs in a process of its own."""

    def open(self, turn: Turn) -> str:
        """Serve one turn; return what the others connect to."""

    def close(self) -> None:
        """End what `open` began."""

    def connect(self, address: str) -> None:
        """Do what takes a producer or consumer long, before its turn begins."""

    def produce(self, address: str, turn: Turn, index: int) -> Log:
        """Send until `turn.stop_s`."""

    def consume(self, address: str, turn: Turn, index: int) -> Log:
        """Take until `turn.stop_s`."""


@dataclass
class Log:
    """Log of one process: trajectories counted in the window; times of entries of a paced turn."""

    num_trajectories: int = 0
    times: dict[int, float] = field(default_factory=dict)
    last_s: float = 0.0

    def note(self, turn: Turn, number: int, num_trajectories: int) -> float:
        """Note that entry `number` was delivered just then; return the time."""
        now = time.monotonic()
        if turn.warm_s <= now < turn.stop_s:
            self.num_trajectories += num_trajectories
            self.last_s = now
        if turn.groups_per_s:
            self.times[number] = now
        return now

    def as_values(self) -> dict[str, Any]:
        return {"num_trajectories": self.num_trajectories, "times": list(self.times.items())}


Arrays = dict[str, npt.NDArray[Any]]


def make_pool(turn: Turn) -> list[list[Arrays]]:
    """Return groups of trajectories, each as separate arrays, the way an engine hands them over.

    Shapes, T tokens: `response_ids` int32 [T], `loss_mask` uint8 [T], `logprobs` float32 [T].
    """
    random = np.random.default_rng(0)
    return [
        [_make_trajectory(turn.num_tokens, random) for _ in range(turn.group_size)]
        for _ in range(POOL_GROUPS)
    ]


def _make_trajectory(num_tokens: int, random: np.random.Generator) -> Arrays:
    return {
        "response_ids": random.integers(0, 150_000, num_tokens, dtype=np.int32),
        "loss_mask": np.ones(num_tokens, np.uint8),
        "logprobs": -random.random(num_tokens, dtype=np.float32),
    }


def pace(turn: Turn, index: int, log: Log) -> Iterator[tuple[int, int]]:
    """Yield (serial number, entry number) of the entries to send, when each is due, until the turn's end.

    Entry numbers are unique over all producers. With an offered load, an entry's time in `log` is when
    it was due: a producer that falls behind makes the latencies long, not the load small.
    """
    sleep_until(turn.start_s)
    entries_per_s = turn.groups_per_s * turn.group_size / turn.per_entry / turn.num_producers
    serial = 0
    while time.monotonic() < turn.stop_s:
        number = serial * turn.num_producers + index + 1
        if entries_per_s:
            due = turn.start_s + (serial + index / turn.num_producers) / entries_per_s
            if due >= turn.stop_s:
                return
            sleep_until(due)
            log.times[number] = due
        yield serial, number
        serial += 1


def entry_of(pool: list[list[Arrays]], serial: int, turn: Turn) -> list[Arrays]:
    """Return the trajectories of a peer's entry: one, or a group."""
    group = pool[serial // max(1, turn.group_size // turn.per_entry) % len(pool)]
    if turn.per_entry >= turn.group_size:
        return group
    return [group[serial % turn.group_size]]


def sleep_until(when: float) -> None:
    """Sleep until the monotonic clock says `when`."""
    while (left := when - time.monotonic()) > 0:
        time.sleep(left)
