"""A buffer in a process of its own, an honest replica and learner, and sockets that behave badly."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgpack
import zmq

from asyncrl.buffer.client import LearnerClient, ReplicaClient
from asyncrl.core.experience import encode_group
from asyncrl.core.wire import RPC_VERSION
from tests.buffer.parts import make_group

NUM_PROMPTS = 1_000_000
GREETING = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + b"NULL".ljust(20, b"\0") + b"\0" + bytes(31)
"""What a ZMTP 3 connection without keys begins with."""


def header(op: str = "status", call_id: Any = 1, version: Any = RPC_VERSION, **args: Any) -> bytes:
    """Return a request's header, right but for what is asked for."""
    return bytes(msgpack.packb({"v": version, "id": call_id, "op": op, "args": args}))


class BufferProcess:
    """A buffer over a file journal, and what its process takes."""

    def __init__(self, folder: Path, module: str = "tests.buffer.hostile.hostile_process") -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, str(folder)], stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        self.address = self._process.stdout.readline().strip()

    @property
    def num_descriptors(self) -> int:
        return len(list(Path(f"/proc/{self._process.pid}/fd").iterdir()))

    @property
    def num_bytes(self) -> int:
        """Anonymous memory."""
        lines = Path(f"/proc/{self._process.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon:"))

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def end(self) -> None:
        self._process.kill()
        self._process.wait(60.0)


class Honest:
    """One replica and one learner that pass groups and train them, over sockets of their own."""

    def __init__(self, address: str) -> None:
        self._address = address
        self.learner = LearnerClient(address)
        opening = self.learner.open("honest")
        self._step = opening.steps_trained
        if self._step:
            self.learner.resume(0)
        self.version = self.learner.register_version(0)
        asyncio.run(self._describe())

    async def _describe(self) -> None:
        with contextlib.closing(ReplicaClient(self._address, "honest")) as replica:
            await replica.describe_data(NUM_PROMPTS, "digest")

    def train_one_batch(self) -> None:
        """Generate two groups, reserve, fetch and train them: every answer must be right."""
        asyncio.run(self._generate(2))
        reservation = self.learner.reserve(self._step, wait_s=10.0)
        assert reservation is not None
        groups = self.learner.fetch([one.ticket for one in reservation.tickets])
        assert [group.ticket for group in groups] == [one.ticket for one in reservation.tickets]
        self.learner.trained(self._step, lag_max=0)
        self._step += 1
        self.version = self.learner.register_version(self._step)

    async def _generate(self, num_groups: int) -> None:
        with contextlib.closing(ReplicaClient(self._address, "honest")) as replica:
            for _ in range(num_groups):
                (grant,) = (await replica.lease(self.version, 1, 10.0)).grants
                group = make_group(grant.ticket, grant.attempt, self.version)
                assert await replica.push(group) == "stored"

    async def lease(self, replica_name: str) -> tuple[int, int]:
        """Return (ticket, attempt) of a lease for a replica that will not behave."""
        with contextlib.closing(ReplicaClient(self._address, replica_name)) as replica:
            (grant,) = (await replica.lease(self.version, 1, 10.0)).grants
            return grant.key

    def close(self) -> None:
        self.learner.close()


@contextlib.contextmanager
def dealer(address: str) -> Iterator[zmq.Socket[bytes]]:
    """Yield a socket that sends whatever it is told to, in a context of its own."""
    context = zmq.Context()
    end = context.socket(zmq.DEALER)
    end.setsockopt(zmq.LINGER, 2000)
    end.setsockopt(zmq.SNDTIMEO, 5000)
    end.setsockopt(zmq.RCVTIMEO, 5000)
    end.connect(address)
    try:
        yield end
    finally:
        end.close()
        context.term()


def raw_socket(address: str) -> socket.socket:
    """Return a bare TCP connection to `address`."""
    host, port = address.removeprefix("tcp://").split(":")
    return socket.create_connection((host, int(port)), timeout=60.0)


def raw_peer(address: str) -> socket.socket:
    """Return a TCP connection that has shaken hands as a DEALER without keys."""
    end = raw_socket(address)
    shake_hands(end)
    return end


def shake_hands(end: socket.socket) -> None:
    """Do a DEALER's part of ZMTP's handshake without keys."""
    end.sendall(GREETING)
    left = 64
    while left:
        left -= len(end.recv(left))
    traits = b"".join(
        bytes([len(name)]) + name + struct.pack(">I", len(value)) + value
        for name, value in ((b"Socket-Type", b"DEALER"), (b"Identity", b""))
    )
    command = b"\x05READY" + traits
    end.sendall(bytes([4, len(command)]) + command)


def raw_part(data: bytes, has_more: bool) -> bytes:
    """Return `data` as a part of a ZMTP message."""
    return struct.pack(">BQ", 2 | has_more, len(data)) + data


def push_frames(ticket: int, attempt: int, version: int) -> list[bytes]:
    """Return a right push, header first."""
    names = {"replica": "evil", "ticket": ticket, "attempt": attempt}
    return [header("push", **names), *map(bytes, encode_group(make_group(ticket, attempt, version)))]


def send_all(address: str, messages: Sequence[Sequence[bytes]]) -> None:
    """Send messages over a connection of their own and wait until the last byte is out."""
    with dealer(address) as end:
        for message in messages:
            end.send_multipart(list(message))
