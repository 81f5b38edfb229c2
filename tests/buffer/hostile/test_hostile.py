"""Hostile input at the buffer's own socket: none of it runs, crashes the service or stays in memory."""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest

from asyncrl.core.errors import AsyncrlError, FencedError, LedgerError, WireError
from asyncrl.core.rpc import Client
from asyncrl.core.runtime.threads import ThreadRuntime
from asyncrl.core.wire import RPC_VERSION
from tests.buffer.hostile.hostile_parts import (
    GREETING,
    BufferProcess,
    Honest,
    dealer,
    header,
    push_frames,
    raw_peer,
    raw_socket,
    send_all,
)

GROWTH_BYTES = 96 << 20
"""What the process may grow by in a test; the attacks would take gigabytes."""


class WritesAFile:
    """Unpickled, it would write a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.write_text, (self.path, "run"))


@pytest.fixture(scope="module")
def buffer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BufferProcess]:
    process = BufferProcess(tmp_path_factory.mktemp("hostile"))
    yield process
    process.end()


@pytest.fixture(scope="module")
def honest(buffer: BufferProcess) -> Iterator[Honest]:
    pair = Honest(buffer.address)
    pair.train_one_batch()
    yield pair
    pair.close()


@pytest.fixture
def unharmed(buffer: BufferProcess, honest: Honest) -> Iterator[None]:
    """Around a test: the buffer lives, grew little, made no internal error and serves honest clients."""
    before = buffer.num_bytes
    yield
    assert buffer.is_alive
    honest.train_one_batch()
    assert buffer.num_bytes - before < GROWTH_BYTES
    counters = honest.learner.status().counters
    assert "wire/internal_errors" not in counters, counters
    assert "wire/reopened" not in counters, counters


def evil_lease(honest: Honest) -> tuple[int, int]:
    return asyncio.run(honest.lease("evil"))


def answer_of(buffer: BufferProcess, frames: list[bytes]) -> AsyncrlError | None:
    """Return the error that a right request with such frames is answered with, None if it is not."""
    fields = msgpack.unpackb(frames[0])
    client = Client(ThreadRuntime(), buffer.address)
    try:
        client.call(fields["op"], frames[1:], 10.0, **fields["args"])
    except AsyncrlError as error:
        return error
    finally:
        client.close()
    return None


def with_frame(frames: list[bytes], number: int, data: bytes) -> list[bytes]:
    return [*frames[:number], data, *frames[number + 1 :]]


def changed_header(frames: list[bytes], **changes: Any) -> list[bytes]:
    """Return a push whose group's header says something else."""
    return with_frame(frames, 1, bytes(msgpack.packb({**msgpack.unpackb(frames[1]), **changes})))


BAD_GROUPS = {
    "a missing frame": lambda push: push[:-1],
    "a frame too many": lambda push: [*push, b""],
    "no frames": lambda push: push[:1],
    "a truncated array": lambda push: with_frame(push, 3, push[3][:-1]),
    "log-probs of float64": lambda push: with_frame(push, 5, push[5] * 2),
    "log-probs that are not numbers": lambda push: with_frame(push, 5, b"\xff" * len(push[5])),
    "rewards that are infinite": lambda push: with_frame(push, 7, struct.pack("<2f", 1.0, float("inf"))),
    "spans of negative length": lambda push: with_frame(push, 6, struct.pack("<8q", 0, 1, 5, 0, 1, 1, 0, 5)),
    "spans of a huge sample": lambda push: with_frame(
        push, 6, struct.pack("<8q", 1 << 62, 1, 0, 5, 1, 1, 0, 5)
    ),
    "lengths beyond the arrays": lambda push: changed_header(push, lengths=[5, 6]),
    "lengths beyond any memory": lambda push: changed_header(push, lengths=[1 << 62, 1 << 62]),
    "lengths that are not numbers": lambda push: changed_header(push, lengths=[float("nan"), 5]),
    "lengths that are negative": lambda push: changed_header(push, lengths=[-5, 15]),
    "a count of spans that is not a number": lambda push: changed_header(push, num_spans=float("nan")),
    "ten thousand trajectories of nothing": lambda push: changed_header(
        push, lengths=[0] * 10_000, finish=[0] * 10_000
    ),
    "finish reasons that do not exist": lambda push: changed_header(push, finish=[0, 9]),
    "a schema of the future": lambda push: changed_header(push, v=2),
    "another ticket inside": lambda push: changed_header(push, ticket=1 << 63),
    "a pickle for a header": lambda push: with_frame(push, 1, pickle.dumps({"lengths": [5, 5]})),
    "a group over the limit": lambda push: with_frame(push, 2, bytes(6000)),
}


@pytest.mark.parametrize("name", BAD_GROUPS)
@pytest.mark.usefixtures("unharmed")
def test_a_malformed_group_is_refused_to_its_sender_by_name(
    buffer: BufferProcess, honest: Honest, name: str
) -> None:
    frames = push_frames(*evil_lease(honest), honest.version)
    assert isinstance(answer_of(buffer, BAD_GROUPS[name](frames)), WireError)


NESTED = msgpack.packb({"v": 1, "id": 1, "op": "status", "args": {"a": [[[[[[[[1]]]]]]]]}})
BAD_HEADERS = {
    "nothing": b"",
    "no msgpack": b"\xc1" * 100,
    "a truncated header": header()[:-3],
    "a list": msgpack.packb([1, 2, 3]),
    "no id": msgpack.packb({"v": 1, "op": "status", "args": {}}),
    "a future schema": header(version=RPC_VERSION + 1),
    "a schema that is not a number": header(version=float("nan")),
    "an id that is not a number": header(call_id=float("nan")),
    "an operation of bytes": msgpack.packb({"v": 1, "id": 1, "op": b"status", "args": {}}),
    "an operation with a long name": header(op="x" * 100_000),
    "nested deeper than anything honest": NESTED,
    "nested a hundred thousand deep": b"\x91" * 100_000,
    "a map of a hundred thousand maps": b"\x81\xa1a" * 30_000 + b"\xc0",
    "a list that declares four billion items": b"\xdd\xff\xff\xff\xff",
    "a map that declares four billion items": b"\xdf\xff\xff\xff\xff",
    "bytes that declare four gigabytes": b"\x81\xa1v\xc6\xff\xff\xff\xff",
    "a text that declares four gigabytes": b"\x81\xa1v\xdb\xff\xff\xff\xff",
    "a name that is not UTF-8": b"\x81\xa2\xff\xfe\x01",
    "a type of its own": msgpack.packb(
        {"v": 1, "id": 1, "op": "status", "args": {"a": msgpack.ExtType(5, b"x")}}
    ),
    "a timestamp": msgpack.packb({"v": 1, "id": 1, "op": "status", "args": {"a": msgpack.Timestamp(1, 1)}}),
    "a header over the limit": header(text="x" * (257 << 10)),
    "a quarter of a million empty lists": b"\xdd" + struct.pack(">I", 250_000) + b"\x90" * 250_000,
}


@pytest.mark.parametrize("name", BAD_HEADERS)
@pytest.mark.usefixtures("unharmed")
def test_a_malformed_header_is_counted_and_ignored(buffer: BufferProcess, honest: Honest, name: str) -> None:
    before = honest.learner.status().counters.get("wire/malformed", 0)
    send_all(buffer.address, [[BAD_HEADERS[name]]] * 3)
    end = time.monotonic() + 60.0
    while honest.learner.status().counters.get("wire/malformed", 0) < before + 3:
        assert time.monotonic() < end, honest.learner.status().counters


BAD_ARGUMENTS = (
    ("nonsense", {}),
    ("lease", {"replica": "evil", "version": 1 << 63, "want": 1, "wait_s": 0.0}),
    ("lease", {"replica": "evil", "version": 1, "want": float("nan"), "wait_s": 0.0}),
    ("lease", {"replica": "evil", "version": 1, "want": 1, "wait_s": float("nan")}),
    ("lease", {"replica": "evil", "version": 1, "want": 1, "wait_s": 1e300}),
    ("lease", {"replica": "x" * 10_000, "version": 1, "want": 1, "wait_s": 0.0}),
    ("renew", {"replica": "evil", "tickets": [[1]]}),
    ("renew", {"replica": "evil", "tickets": [["a", None]]}),
    ("push", {"replica": "evil", "ticket": (1 << 64) - 1, "attempt": (1 << 64) - 1}),
    ("evaluated", {"replica": "evil", "id": 1, "version": 1, "metrics": {"a": float("nan")}}),
    ("trained", {"token": -(1 << 63), "step": -1, "dropped": [], "lag_max": 0}),
    ("fetch", {"token": 0, "tickets": [(1 << 64) - 1]}),
    ("describe_data", {"num_prompts": (1 << 64) - 1, "digest": "digest"}),
    ("register_version", {"token": (1 << 64) - 1, "step": 0}),
    ("checkpointed", {"token": 0, "step": 0, "digest": "", "kept": [float("nan")]}),
)


@pytest.mark.parametrize(("op", "args"), BAD_ARGUMENTS)
@pytest.mark.usefixtures("unharmed")
def test_arguments_that_make_no_sense_are_answered_with_an_error_or_nothing_given(
    buffer: BufferProcess, op: str, args: dict[str, Any]
) -> None:
    client = Client(ThreadRuntime(), buffer.address)
    with contextlib.closing(client), contextlib.suppress(WireError, LedgerError, FencedError, AsyncrlError):
        reply = client.call(op, deadline_s=60.0, **args)
        assert not reply.args.get("grants"), reply


@pytest.mark.usefixtures("unharmed")
def test_a_pickle_is_never_opened(buffer: BufferProcess, honest: Honest, tmp_path: Path) -> None:
    mark = tmp_path / "was-run"
    payload = pickle.dumps(WritesAFile(mark))
    push = push_frames(*evil_lease(honest), honest.version)
    answer_of(buffer, [push[0], *[payload] * 7])
    send_all(buffer.address, [[payload], [header("push"), payload], [payload] * 8])
    honest.train_one_batch()
    assert not mark.exists()
    pickle.loads(payload)
    assert mark.exists(), "the payload was harmless"


@pytest.mark.usefixtures("unharmed")
def test_frames_of_an_earlier_push_are_a_duplicate_or_late_and_count_once(
    buffer: BufferProcess, honest: Honest
) -> None:
    frames = push_frames(*evil_lease(honest), honest.version)
    before = honest.learner.status().counters
    assert answer_of(buffer, frames) is None
    for _ in range(20):
        assert answer_of(buffer, frames) is None
    after = honest.learner.status().counters
    assert after["duplicates"] - before.get("duplicates", 0) == 20


@pytest.mark.usefixtures("unharmed")
def test_a_message_of_very_many_parts_is_refused_to_its_sender(buffer: BufferProcess) -> None:
    with dealer(buffer.address) as end:
        end.send_multipart([header(), *[b"x"] * 100_000])
        reply = msgpack.unpackb(end.recv())
    assert reply["kind"] == "WireError"
    assert "parts" in reply["message"]


@pytest.mark.usefixtures("unharmed")
def test_a_part_longer_than_any_group_ends_its_connection_before_it_is_read(
    buffer: BufferProcess, honest: Honest
) -> None:
    before = honest.learner.status().counters
    send_all(buffer.address, [[header(), bytes(64 << 20)]] * 3)
    with contextlib.closing(raw_peer(buffer.address)) as end:
        end.sendall(struct.pack(">BQ", 3, 1 << 30) + b"x")  # declared, never sent
        while end.recv(4096):
            pass
    after = honest.learner.status().counters
    assert after["wire/requests"] == before["wire/requests"] + 1
    assert after.get("wire/oversized", 0) == before.get("wire/oversized", 0)


@pytest.mark.usefixtures("unharmed")
def test_a_thousand_connections_that_never_finish_a_handshake_hold_up_nobody(
    buffer: BufferProcess, honest: Honest
) -> None:
    ends = [raw_socket(buffer.address) for _ in range(1000)]
    try:
        for number, end in enumerate(ends):
            end.sendall((b"", GREETING[:11], GREETING, b"GET / HTTP/1.1\r\n\r\n", b"\x00" * 64)[number % 5])
        honest.train_one_batch()
    finally:
        for end in ends:
            end.close()
