"""Processes that do what they are told, over a pipe; they end with the benchmark, however it ends.

Owns the form of such a process: orders in, results out, an error as its text. All are forked from one
server that has imported torch already, and use one thread for arithmetic, as asyncrl's services do.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch

from asyncrl.core.errors import ServiceFailed

WAIT_S = 120.0
END_S = 10.0

FORKED, FRESH = "forkserver", "spawn"
multiprocessing.set_forkserver_preload(
    ["benchmarks.weight_sync.peers.services", "benchmarks.weight_sync.peers.gloo"]
)

Entry = Callable[..., None]
"""Run in the child with its end of the pipe and the arguments of `Peer`."""


class Peer:
    """One child process.

    >>> # peer = Peer("sender", run_sender, plan)
    >>> # seconds = peer.ask("publish", 1)

    Args:
        entry: A function of a module, see `Entry`; it is named so that the child finds it.
        way: FORKED, or FRESH for a child that starts processes itself.
    """

    def __init__(self, name: str, entry: Entry, *args: Any, way: str = FORKED) -> None:
        self.name = name
        context: Any = multiprocessing.get_context(way)
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_run, args=(entry, theirs, args), daemon=way == FORKED)
        self._process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        return int(self._process.pid or 0)

    def tell(self, *order: Any) -> None:
        """Give an order and go on."""
        self._pipe.send(order)

    def say(self, word: str) -> None:
        """Send a word that is no order."""
        self._pipe.send(word)

    def await_end(self) -> float:
        """Wait until the child has been killed; return when that was seen.

        Raises:
            ServiceFailed: It lives on.
        """
        self._process.join(WAIT_S)
        if self._process.is_alive():
            raise ServiceFailed(f"{self.name} was to be killed, and lives")
        return now_s()

    def hear(self, wait_s: float = WAIT_S) -> Any:
        """Return what the child says next.

        Raises:
            ServiceFailed: It says nothing in time, it ended, or what it says is an error.
        """
        try:
            if not self._pipe.poll(wait_s):
                raise ServiceFailed(f"{self.name} said nothing within {wait_s:g} s")
            said = self._pipe.recv()
        except (EOFError, OSError) as error:
            raise ServiceFailed(f"{self.name} has ended") from error
        if isinstance(said, ChildError):
            raise ServiceFailed(f"{self.name}: {said}")
        return said

    def ask(self, *order: Any) -> Any:
        """Give an order and return its result."""
        self.tell(*order)
        return self.hear()

    def close(self) -> None:
        """Let the child end by itself, or kill it."""
        self._pipe.close()
        self._process.join(END_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join(END_S)


class ChildError(str):
    """Error message of a child."""


def _run(entry: Entry, pipe: Connection, args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    try:
        entry(pipe, *args)
    except (EOFError, BrokenPipeError, KeyboardInterrupt):
        return  # the benchmark has ended, and this with it
    except Exception as error:  # process boundary: the parent raises it
        pipe.send(ChildError(f"{type(error).__name__}: {error}"[:500]))
        raise


def obey(pipe: Connection, acts: dict[str, Callable[..., Any]]) -> None:
    """Do what comes in over `pipe` until it closes, and send back each result."""
    while True:
        name, *args = pipe.recv()
        pipe.send(acts[name](*args))


def now_s() -> float:
    """Return seconds of the machine's monotonic clock, which all processes share."""
    return time.monotonic()
