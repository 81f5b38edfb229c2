"""The ceiling: a bare ZMQ pipe of columnar groups. Nothing is checked, remembered or answered."""

from __future__ import annotations

import json
import socket as sockets
import struct
import time

import numpy as np
import zmq

from benchmarks.buffer.peers.load import Arrays, Log, Turn, make_pool, pace

QUEUED_GROUPS = 32
DRAIN_S = 0.3
_HEADER = struct.Struct("<qI")
COLUMNS = {"response_ids": np.int32, "loss_mask": np.uint8, "logprobs": np.float32}


class ZmqPipe:
    """PUSH to PULL over TCP: a header frame and one frame per column of a group."""

    def open(self, turn: Turn) -> str:
        ports = _free_ports(turn.num_consumers)
        return json.dumps([f"tcp://127.0.0.1:{port}" for port in ports])

    def connect(self, address: str) -> None:
        pass

    def close(self) -> None:
        pass

    def produce(self, address: str, turn: Turn, index: int) -> Log:
        log, pool = Log(), make_pool(turn)
        socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUSH)
        with socket:
            socket.set(zmq.LINGER, 200)
            socket.set(zmq.SNDHWM, QUEUED_GROUPS)
            socket.set(zmq.SNDTIMEO, 200)
            for one in json.loads(address):
                socket.connect(one)
            for serial, number in pace(turn, index, log):
                frames = encode(number, pool[serial % len(pool)])
                try:
                    socket.send_multipart(frames, copy=False)
                except zmq.Again:
                    continue
        return log

    def consume(self, address: str, turn: Turn, index: int) -> Log:
        log = Log()
        socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PULL)
        with socket:
            socket.set(zmq.RCVHWM, QUEUED_GROUPS)
            socket.bind(json.loads(address)[index])
            # libzmq aborts a producer whose connection goes while it is half way through a message.
            end_s = turn.stop_s + DRAIN_S
            while (now := time.monotonic()) < end_s:
                if socket.poll(max(1, int(1000 * (end_s - now)))):
                    number, trajectories = decode(socket.recv_multipart(copy=False))
                    log.note(turn, number, len(trajectories))
        return log


def encode(number: int, trajectories: list[Arrays]) -> list[bytes | memoryview]:
    """Return a group's frames: header, then the columns."""
    lengths = np.array([len(one["response_ids"]) for one in trajectories], np.int64)
    columns = (np.concatenate([one[name] for one in trajectories]).data for name in COLUMNS)
    return [_HEADER.pack(number, len(trajectories)), lengths.data, *columns]


def decode(frames: list[zmq.Frame]) -> tuple[int, list[Arrays]]:
    """Return (entry number, trajectories)."""
    number, _ = _HEADER.unpack(frames[0].buffer)
    ends = np.cumsum(np.frombuffer(frames[1].buffer, np.int64))[:-1]
    columns = [
        np.split(np.frombuffer(frame.buffer, dtype), ends)
        for frame, dtype in zip(frames[2:], COLUMNS.values(), strict=True)
    ]
    return number, [dict(zip(COLUMNS, parts, strict=True)) for parts in zip(*columns, strict=True)]


def _free_ports(count: int) -> list[int]:
    found = [sockets.socket() for _ in range(count)]
    for one in found:
        one.bind(("127.0.0.1", 0))
    ports = [int(one.getsockname()[1]) for one in found]
    for one in found:
        one.close()
    return ports
