"""Frames between a replica and a child process beside it: a length, then msgpack.

Owns both the form of a message and the child's end of the pipes. Invariant: the child's printed output goes
to the replica's log and never among the messages; the child ends when its parent is gone.
"""

from __future__ import annotations

import ctypes
import os
import queue
import signal
import struct
import threading
from collections.abc import Mapping
from typing import BinaryIO

import msgpack

HEAD = struct.Struct(">I")
HEAD_BYTES = HEAD.size
MAX_BODY_BYTES = 256 << 20
_PR_SET_PDEATHSIG = 1


def pack_frame(fields: Mapping[str, object]) -> bytes:
    """Return a message. Raises ValueError if `fields` holds something else than plain values."""
    try:
        body = bytes(msgpack.packb(fields, use_bin_type=True))
    except (TypeError, OverflowError) as error:
        raise ValueError(f"this is not a plain value: {error}") from error
    if len(body) > MAX_BODY_BYTES:
        raise ValueError(f"a message of {len(body)} bytes is too long")
    return HEAD.pack(len(body)) + body


def body_bytes(head: bytes) -> int:
    """Return the length of the body after this head. Raises ValueError if it is over the limit."""
    (length,) = HEAD.unpack(head)
    if length > MAX_BODY_BYTES:
        raise ValueError(f"a message of {length} bytes is too long")
    return int(length)


def unpack_body(body: bytes) -> dict[str, object]:
    """Return the fields of a message. Raises ValueError if it is none."""
    fields = msgpack.unpackb(body, raw=False, strict_map_key=False)
    if not isinstance(fields, dict):
        raise ValueError("a message must be a map")
    return fields


class ParentLink:
    """The child's end. A thread reads, so that it sees the parent leave while a request is worked on."""

    def __init__(self) -> None:
        self._sending = os.fdopen(os.dup(1), "wb")
        receiving = os.fdopen(os.dup(0), "rb")
        os.dup2(2, 1)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
        # A thread cannot end the process while a C function holds the interpreter; the kernel can.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        self._requests: queue.SimpleQueue[dict[str, object]] = queue.SimpleQueue()
        threading.Thread(target=self._read, args=(receiving,), daemon=True).start()

    def receive(self) -> dict[str, object]:
        """Return the next request."""
        return self._requests.get()

    def send(self, fields: Mapping[str, object]) -> None:
        """Send an answer."""
        self._sending.write(pack_frame(fields))
        self._sending.flush()

    def _read(self, receiving: BinaryIO) -> None:
        while True:
            head = receiving.read(HEAD_BYTES)
            body = receiving.read(body_bytes(head)) if len(head) == HEAD_BYTES else b""
            if not body:
                _end_with_all_that_was_started()
            self._requests.put(unpack_body(body))


def _end_with_all_that_was_started() -> None:
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(0)
