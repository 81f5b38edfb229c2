"""Requests that are almost right: every operation's valid message, changed a little, from a seed."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import Any

import msgpack

from asyncrl.core.experience import encode_group
from asyncrl.core.wire import RPC_VERSION
from tests.buffer.parts import make_group

EDGES: tuple[Any, ...] = (
    *(0, 1, -1, 127, 128, 255, 256, 65_535, 65_536, 1 << 31, (1 << 32) - 1, 1 << 32, 1 << 53),
    *((1 << 63) - 1, 1 << 63, (1 << 64) - 1, -(1 << 31), -(1 << 63)),
    *(0.0, 1.5, -0.5, 1e308, math.nan, math.inf, -math.inf),
    *(None, True, False, "", "a", "é" * 100, "x" * 5000, b"", b"\xff\xfe", b"\0" * 100),
    *([], {}, [[]], [1, 2], {"a": 1}, [[1, 1]], [[1, -1]], [[1, "guard"]], [["", None]]),
    *(msgpack.ExtType(5, b"x"), msgpack.Timestamp(1, 1)),
)
BYTES = (
    b"\x00\x01\x7f\x80\x81\x90\x91\xa0\xc0\xc1\xc4\xc6\xc7\xc9\xca\xcb\xcf\xd3\xd9\xdb\xdc\xdd\xde\xdf\xff"
)
REPLICA: dict[str, Any] = {"replica": "a"}
CALLS: dict[str, dict[str, Any]] = {
    "status": {},
    "describe_data": {"num_prompts": 100, "digest": "digest"},
    "lease": REPLICA | {"version": 1, "want": 1, "wait_s": 0.0, "evaluating": None},
    "renew": REPLICA | {"tickets": [[1, 1], [2, 1]]},
    "push": REPLICA | {"ticket": 1, "attempt": 1},
    "push_partial": REPLICA | {"ticket": 2, "attempt": 1},
    "push_turns": REPLICA | {"ticket": 3, "attempt": 1, "number": 1, "versions": [1, 1]},
    "fetch_partial": REPLICA | {"ticket": 2, "attempt": 2},
    "fail": REPLICA | {"ticket": 1, "attempt": 1, "reason": "timeout"},
    "release": REPLICA | {"tickets": [[3, 1]]},
    "deregister": REPLICA,
    "evaluated": REPLICA | {"id": 1, "version": 1, "metrics": {"accuracy": 0.5}},
    "open": {"holder": "learner"},
    "resume": {"token": 1, "step": 0, "is_fork": False, "note": {"lr": 1.0}, "refused": []},
    "register_version": {"token": 1, "step": 0},
    "reserve": {"token": 1, "step": 0, "wait_s": 0.0},
    "fetch": {"token": 1, "tickets": [1, 2]},
    "prefetch": {"token": 1, "num_groups": 2},
    "trained": {"token": 1, "step": 0, "dropped": [[1, "guard"]], "lag_max": 0},
    "checkpointed": {"token": 1, "step": 1, "digest": "d", "kept": [1]},
    "request_evaluation": {"token": 1, "step": 0},
}
WITH_GROUP = ("push", "push_partial")
UNDOING = ("open", "resume", "fail", "release", "deregister", "push_partial")
"""Asked seldom, so that some groups get as far as being trained."""


class Mutator:
    """Makes messages: a request's header and its frames. The same seed makes the same messages.

    `hints` are numbers that fit as they are, by the argument's name: a token, a step, a version.
    """

    def __init__(self, seed: int) -> None:
        self.hints: dict[str, int] = {}
        self._random = random.Random(seed)
        self._ops = [op for op in CALLS for _ in range(1 if op in UNDOING else 8)]
        self._headers = [self._pack(op, args) for op, args in CALLS.items()]

    def messages(self) -> Iterator[list[bytes]]:
        """Yield messages without end."""
        while True:
            yield self.message()

    def message(self) -> list[bytes]:
        """Return one message: sometimes right, mostly not quite."""
        chance = self._random.random()
        op = self._random.choice(self._ops)
        frames = self._group_frames() if op in WITH_GROUP else []
        if chance < 0.4:
            return [self._pack(op, self._numbered(CALLS[op])), *frames]
        if chance < 0.6:
            return [self._pack(op, self._changed(self._numbered(CALLS[op]))), *frames]
        if chance < 0.7:
            fields = {"v": RPC_VERSION, "id": 1, "op": op, "args": CALLS[op]}
            return [msgpack.packb(self._changed(fields)), *frames]
        if chance < 0.75:
            return [self._pack(op, CALLS[op]), *[self._random.randbytes(8)] * self._random.randrange(20)]
        return [self.damage(self._pack(op, CALLS[op])), *frames]

    def group(self) -> list[bytes]:
        """Return the frames of a group, one of them not as it should be."""
        return self._group_frames()

    def damage(self, data: bytes) -> bytes:
        """Return `data` with bits flipped, cut short, grown, spliced with other data, or with odd bytes."""
        draw, changed = self._random, bytearray(data)
        kind = draw.randrange(5) if changed else 3
        if kind == 0:
            for _ in range(draw.randint(1, 8)):
                changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
        elif kind == 1:
            del changed[draw.randrange(len(changed)) :]
        elif kind == 2:
            other = draw.choice(self._headers)
            changed[draw.randrange(len(changed)) :] = other[draw.randrange(len(other)) :]
        elif kind == 3:
            at = draw.randint(0, len(changed))
            changed[at:at] = draw.randbytes(draw.randint(1, 16))
        else:
            changed[draw.randrange(len(changed))] = draw.choice(BYTES)
        return bytes(changed)

    def _pack(self, op: str, args: dict[str, Any]) -> bytes:
        return bytes(msgpack.packb({"v": RPC_VERSION, "id": 1, "op": op, "args": args}))

    def _numbered(self, args: dict[str, Any]) -> dict[str, Any]:
        """Return `args` with numbers that fit, or nearly do, in the place of its numbers."""
        return {name: self._number(name) if type(value) is int else value for name, value in args.items()}

    def _number(self, name: str) -> int:
        fitting = self.hints.get(name)
        if fitting is None or self._random.random() < 0.1:
            return self._random.randrange(8)
        return fitting

    def _changed(self, fields: dict[str, Any]) -> dict[str, Any]:
        """Return `fields` with one of them replaced, removed or added."""
        changed, name = dict(fields), self._random.choice([*fields, "more"])
        if self._random.random() < 0.15:
            changed.pop(name, None)
        else:
            changed[name] = self.value(self._random.randrange(9))
        return changed

    def value(self, depth: int) -> Any:
        """Return any value of msgpack's, nested up to `depth`."""
        draw = self._random
        if depth == 0 or draw.random() < 0.6:
            return draw.choice(EDGES)
        if draw.random() < 0.5:
            return [self.value(depth - 1) for _ in range(draw.randrange(3))]
        return {draw.choice(("a", "b", "v")): self.value(depth - 1) for _ in range(draw.randrange(3))}

    def _group_frames(self) -> list[bytes]:
        draw = self._random
        numbers = (self._number("ticket"), self._number("attempt"), self._number("version"))
        frames = [bytes(frame) for frame in encode_group(make_group(*numbers))]
        chance = draw.random()
        if chance < 0.2:
            fields = msgpack.unpackb(frames[0])
            frames[0] = bytes(msgpack.packb(self._changed(fields)))
        elif chance < 0.4:
            number = draw.randrange(len(frames))
            frames[number] = self.damage(frames[number])
        elif chance < 0.5:
            del frames[draw.randrange(len(frames))]
        return frames
