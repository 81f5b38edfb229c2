"""One process in which every way generates, one at a time.

The ways share what they would each need anyway: vLLM's import, and the fork server of its cores. While one
is measured the engine cores of the others are stopped where they are, with their requests in flight, so that
no turn begins or ends empty: nothing is lost or made up between two turns of a way.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

from asyncrl.core.errors import ServiceFailed
from asyncrl.core.service import ServiceContext
from benchmarks.rollout.ways import setting
from benchmarks.rollout.ways.bare import Bare
from benchmarks.rollout.ways.ours import POLL_S, Ours
from benchmarks.rollout.ways.setting import START_S, Count, Rate, rate_between
from benchmarks.weight_sync.peers.peers import obey


class Way(Protocol):
    """Something that generates as long as its engine core runs."""

    def core_pids(self) -> list[int]: ...

    def count(self) -> Count: ...

    def close(self) -> None: ...


class Contest:
    """The ways by name. They run until `hold`; then each runs only while it is measured.

    Args:
        contexts: Of the replicas, by their way's name.
    """

    def __init__(self, contexts: Mapping[str, ServiceContext], folder: Path) -> None:
        self._replicas = {name: Ours(context) for name, context in contexts.items()}
        self._bare = Bare(folder)
        self._bare.begin()
        self._ways: dict[str, Way] = {"bare": self._bare, **self._replicas}

    def hold(self) -> None:
        """Stop all ways once each is in its stride: as many requests as a batch holds have ended."""
        end = time.monotonic() + START_S
        while min(way.count().num_requests for way in self._ways.values()) < setting.MAX_SEQUENCES:
            if time.monotonic() > end:
                raise ServiceFailed("one of the ways generates nothing")
            time.sleep(POLL_S)
        for way in self._ways.values():
            _signal(way.core_pids(), signal.SIGSTOP)

    def measure(self, name: str, seconds: float) -> Rate:
        """Return a way's rates over `seconds`, in which it alone runs."""
        way = self._ways[name]
        before = way.count()
        _signal(way.core_pids(), signal.SIGCONT)
        time.sleep(seconds)
        _signal(way.core_pids(), signal.SIGSTOP)
        return rate_between(before, way.count())

    def compare_prefixes(self, num_turns: int) -> dict[str, list[Rate]]:
        """See `Bare.compare_prefixes`."""
        _signal(self._bare.core_pids(), signal.SIGCONT)
        return self._bare.compare_prefixes(num_turns)

    def counters(self) -> dict[str, Any]:
        """Return what the replicas counted beside what they generated."""
        return {name: dict(replica.status().counters) for name, replica in self._replicas.items()}

    def gateway(self, name: str) -> str:
        """Return the address of a replica's gateway."""
        gateway = self._replicas[name].status().gateway
        assert gateway is not None, "the replica has started"
        return gateway.url

    def close(self) -> None:
        """Let all run again, and end them."""
        for way in self._ways.values():
            _signal(way.core_pids(), signal.SIGCONT)
        for way in self._ways.values():
            way.close()


def _signal(pids: Sequence[int], number: signal.Signals) -> None:
    for pid in pids:
        os.kill(pid, number)


def run_contest(pipe: Connection, contexts: Mapping[str, ServiceContext], folder: Path) -> None:
    """Entry of the process."""
    contest = Contest(contexts, folder)
    pipe.send("started")
    try:
        names = ("hold", "measure", "compare_prefixes", "counters", "gateway")
        obey(pipe, {name: getattr(contest, name) for name in names})
    finally:
        contest.close()
