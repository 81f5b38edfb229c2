"""DeepMind's Reverb: a queue table in its server. Runs in an environment of its own (with TensorFlow)."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.buffer.peers.load import Log, Turn, entry_of, make_pool, pace, sleep_until

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
TABLE = "queue"
AHEAD_GROUPS = 16
COLUMNS = ("response_ids", "loss_mask", "logprobs")


class Reverb:
    """`Table.queue`, one entry per insert; the consumer reads one long sampler stream."""

    def __init__(self) -> None:
        self._server: Any = None

    def open(self, turn: Turn) -> str:
        import reverb

        table = reverb.Table.queue(TABLE, max(2, AHEAD_GROUPS * turn.group_size // turn.per_entry))
        self._server = reverb.Server(tables=[table], port=None)
        return f"localhost:{self._server.port}"

    def connect(self, address: str) -> None:
        import reverb  # noqa: F401 - it takes seconds

    def close(self) -> None:
        if self._server is not None:
            self._server.stop()
            self._server = None

    def produce(self, address: str, turn: Turn, index: int) -> Log:
        return _run_until_stop(_insert, address, turn, index)

    def consume(self, address: str, turn: Turn, index: int) -> Log:
        return _run_until_stop(_sample, address, turn, index)


def _run_until_stop(work: Callable[[str, Turn, int, Log], None], address: str, turn: Turn, index: int) -> Log:
    """Work in a thread: the client's calls have no deadline, they end with the turn's server."""
    log = Log()
    threading.Thread(target=work, args=(address, turn, index, log), daemon=True).start()
    sleep_until(turn.stop_s)
    return Log(log.num_trajectories, dict(log.times))


def _insert(address: str, turn: Turn, index: int, log: Log) -> None:
    import reverb

    pool, client = make_pool(turn), reverb.Client(address)
    for serial, number in pace(turn, index, log):
        entry = entry_of(pool, serial, turn)
        columns = [np.concatenate([one[name] for one in entry]) for name in COLUMNS]
        try:
            client.insert([np.int64(number), *columns], {TABLE: 1.0})
        except RuntimeError:  # the turn's server has gone
            return


def _sample(address: str, turn: Turn, index: int, log: Log) -> None:
    import reverb

    client = reverb.Client(address)
    while time.monotonic() < turn.stop_s:
        try:
            for sample in client.sample(TABLE, num_samples=8, emit_timesteps=False):
                number, *columns = sample.data
                assert all(len(column) for column in columns)
                log.note(turn, int(number), turn.per_entry)
        except (RuntimeError, StopIteration):  # the turn's server has gone
            return
