"""A holder of a run's keys against the buffer and the coordinator: neither ends, grows or goes deaf."""

from __future__ import annotations

import contextlib
import json
import math
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest
import zmq

from asyncrl.core.errors import AsyncrlError
from asyncrl.core.rpc import Client
from asyncrl.core.runtime.threads import ThreadRuntime
from asyncrl.core.sockets.keys import ClientKeys
from asyncrl.core.sockets.options import prepare_client
from asyncrl.core.staleness import PolicyVersion
from tests.buffer.hostile.hostile_mutations import CALLS, EDGES, Mutator
from tests.buffer.hostile.hostile_parts import header
from weight_sync.coordination.journal import JOURNAL_FILE, MAX_BYTES
from weight_sync.memory.manifest import Bucket, Manifest, TensorSpec, plan

FLAT_BYTES = 64 << 20
"""What a service may grow by after the first quarter of the messages."""
PLAIN_EDGES = [one for one in EDGES if not isinstance(one, msgpack.ExtType | msgpack.Timestamp)]
NUMBERS = (0, 1, 2, 3, 5, -1, 1 << 62, 1 << 63, (1 << 64) - 1, -(1 << 63))
NAMES = (*("publisher", "receiver.0", "receiver.1", "receiver.4095", "receiver.4096"), *("", "x\x1b[2J\n"))
EVENTS = (
    *("published", "sent", "send_failed", "goodbye", "attended", "pin", "unpin", "drain", "restarted"),
    *("loaded", "accepted", "verified", "failed", "weird"),
)
CAUSES = ("digest", "transport", "aborted", "superseded", "", "x" * 100_000)


class Keyed:
    """A service in a process of its own, and the keys that open it."""

    def __init__(self, kind: str, folder: Path) -> None:
        command = [sys.executable, "-m", "tests.buffer.hostile.keyed_process", kind, str(folder)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.address, *keys = json.loads(self._process.stdout.readline())
        self.keys = ClientKeys(*(key.encode() for key in keys))
        self.folder = folder

    @property
    def num_bytes(self) -> int:
        lines = Path(f"/proc/{self._process.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon:"))

    def end(self) -> None:
        assert self._process.poll() is None, "the service has ended"
        self._process.kill()
        self._process.wait(60.0)


@contextlib.contextmanager
def keyed(kind: str, folder: Path) -> Iterator[Keyed]:
    service = Keyed(kind, folder)
    try:
        yield service
    finally:
        service.end()


def random_bytes(dice: random.Random) -> list[bytes]:
    """Return a message that is no request."""
    kind = dice.randrange(5)
    if kind == 0:
        return [dice.randbytes(dice.randrange(2000)) for _ in range(dice.randrange(1, 4))]
    if kind == 1:
        whole = header(dice.choice(list(CALLS)))
        return [whole[: dice.randrange(len(whole))]]
    if kind == 2:
        return [b"\xdd\xff\xff\xff\xff" + b"\x80" * dice.randrange(100)]
    if kind == 3:
        return [b"\x91" * dice.choice((10, 600, 5000, 100_000))]
    return [b"\xc6\xff\xff\xff\xff" + b"a" * 50]


class BufferAbuse:
    """Messages of a key holder to the buffer, half of them with numbers that fit."""

    def __init__(self, seed: int, client: Client) -> None:
        self._mutator, self._dice, self._client = Mutator(seed), random.Random(seed), client

    def look(self) -> None:
        """Find the numbers that fit, and let a checkpoint fold what was trained."""
        told = self._client.call("status", deadline_s=60.0).args
        token = self._client.call("open", deadline_s=60.0, holder="evil").args["token"]
        step, given = told["steps_trained"], {"token": token, "step": told["steps_trained"]}
        with contextlib.suppress(AsyncrlError):
            self._client.call("resume", deadline_s=60.0, is_fork=False, note={}, refused=[], **given)
            self._client.call("checkpointed", deadline_s=60.0, digest="d", kept=[step], **given)
        ticket = max(1, told["issued"] - told["pending"]["leased"])
        self._mutator.hints = {**given, "version": told["last_version"], "ticket": ticket, "attempt": 1}

    def message(self) -> list[bytes]:
        dice = self._dice
        chance = dice.random()
        if chance < 0.6:
            return self._mutator.message()
        if chance < 0.8:
            return random_bytes(dice)
        op = dice.choice(list(CALLS))
        args = {name: dice.choice(PLAIN_EDGES) if dice.random() < 0.3 else v for name, v in CALLS[op].items()}
        if "replica" in args:
            args["replica"] = f"{dice.randrange(1 << 40)}" + "é" * dice.choice((0, 180, 400))
        if chance < 0.82:
            ids = [dice.choice((1, dice.randrange(1 << 40)))] * dice.choice((2, 9000))
            args |= {"tickets": ids, "have": ids, "kept": ids}
        with contextlib.suppress(OverflowError, ValueError):
            return [header(op, **args)]
        return [b""]

    def check(self, service: Keyed) -> None:
        told = self._client.call("status", deadline_s=60.0).args
        assert told["residue"] == 0
        counters = told["counters"]
        assert "wire/internal_errors" not in counters and "wire/reopened" not in counters, counters


class CoordinatorAbuse:
    """Reports, hellos and polls in any order, mostly of the right types, to the coordinator."""

    def __init__(self, seed: int, client: Client) -> None:
        self._dice, self._client = random.Random(seed), client
        self._layout = plan([TensorSpec("w", "float32", (64,))], 128)

    def look(self) -> None:
        """Nothing has to be known."""

    def _number(self) -> int:
        return self._dice.choice(NUMBERS[:5] if self._dice.random() < 0.8 else NUMBERS)

    def _manifest(self) -> bytes:
        chance = self._dice.random()
        if chance < 0.1:
            return b"\xdd\x00\x00\xff\xff" + b"\x80" * self._dice.choice((0xFFFF, 1 << 17))
        buckets = (Bucket(128, "0" * 32),) * self._layout.num_buckets
        number = self._dice.randint(1, 8)
        data = Manifest(PolicyVersion(number, 0), self._layout, buckets).to_bytes()
        return data if chance < 0.9 else data[: self._dice.randrange(len(data))]

    def message(self) -> list[bytes]:
        dice = self._dice
        if dice.random() < 0.1:
            return random_bytes(dice)
        name = dice.choice(NAMES) if dice.random() < 0.9 else f"receiver.{dice.randrange(1 << 16)}"
        who: dict[str, Any] = {"name": name, "incarnation": dice.choice(("a", "b", "i" * 300))}
        frames = [self._manifest()] if dice.random() < 0.3 else []
        kind = dice.randrange(4)
        if kind == 0:
            return [header("next_order", after=self._number(), **who)]
        if kind == 1:
            operation = dice.choice(("hello", "hello", "publisher_hello"))
            return [header(operation, **who, **self._hello(is_publisher=operation != "hello")), *frames]
        return [header("report", event=dice.choice(EVENTS), fields=self._fields(), **who), *frames]

    def _hello(self, *, is_publisher: bool) -> dict[str, Any]:
        dice = self._dice
        marks = {name: self._number() for name in ("seq", "told")} if dice.random() < 0.3 else {}
        said = {"started_ms": self._number()} | marks
        if is_publisher:
            return said | {"store_host": "h" * dice.choice((9, 9, 9, 5000)), "store_port": self._number()}
        numbers = {name: self._number() for name in ("serving", "staged", "base")}
        return said | numbers | {name: dice.random() < 0.3 for name in ("attended", "pinned", "draining")}

    def _fields(self) -> dict[str, Any]:
        dice = self._dice
        numbers = {
            name: self._number() for name in ("round", "num_bytes", "number", "serving", "num_buckets")
        }
        said = {name: dice.choice(CAUSES) for name in ("cause", "error")}
        return (
            numbers | said | {"ok": dice.random() < 0.7, "begun_s": dice.choice((-1.0, 0.0, 1e300, math.nan))}
        )

    def check(self, service: Keyed) -> None:
        told = self._client.call("status", deadline_s=60.0).args
        assert len(told["members"]) <= 4096
        assert (service.folder / JOURNAL_FILE).stat().st_size <= MAX_BYTES


def read_answer(end: zmq.Socket[bytes]) -> list[str]:
    answer = msgpack.unpackb(end.recv_multipart()[0], strict_map_key=False)
    return ["ok" if answer.get("ok") else str(answer.get("kind"))]


ABUSES: dict[str, Callable[[int, Client], Any]] = {"buffer": BufferAbuse, "coordinator": CoordinatorAbuse}


def abuse(kind: str, folder: Path, num_messages: int, seed: int) -> dict[str, Any]:
    """Send so many messages with valid keys; return what the service took, and how long others waited."""
    with keyed(kind, folder) as service:
        client = Client(ThreadRuntime(), service.address, service.keys)
        if kind == "buffer":
            client.call("describe_data", deadline_s=60.0, num_prompts=1_000_000, digest="digest")
            token = client.call("open", holder="h").args["token"]
            client.call("register_version", deadline_s=60.0, step=0, token=token)
        hostile, counts, early, waits = ABUSES[kind](seed, client), Counter[str](), 0, []
        with contextlib.closing(zmq.Context.instance().socket(zmq.DEALER)) as end:
            prepare_client(end, service.address, service.keys)
            end.setsockopt(zmq.SNDTIMEO, 60_000)
            end.connect(service.address)
            for number in range(num_messages):
                if number % 500 == 0:
                    hostile.look()
                    began = time.monotonic()
                    client.call("status", deadline_s=60.0)
                    waits.append(time.monotonic() - began)
                if number == num_messages // 4:
                    early = service.num_bytes
                end.send_multipart(hostile.message())
                while number % 50 == 0 and end.poll(0):
                    counts.update(read_answer(end))
            while end.poll(1000):
                counts.update(read_answer(end))
        hostile.check(service)
        grown = service.num_bytes - early
        client.close()
    assert counts["RemoteError"] == 0, counts
    assert grown < FLAT_BYTES, f"it grew by {grown >> 20} MiB"
    return {**counts, "grown_mib": grown >> 20, "longest_wait_s": round(max(waits), 2)}


@pytest.mark.parametrize("kind", ABUSES)
def test_a_key_holder_ends_no_service_and_takes_no_memory(kind: str, tmp_path: Path) -> None:
    counts = abuse(kind, tmp_path, 4000, seed=1)
    assert counts["ok"] > 100 and counts["WireError"] > 100, counts


@pytest.mark.long
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("kind", ABUSES)
def test_half_a_million_messages_of_a_key_holder_leave_memory_flat(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    counts = abuse(kind, tmp_path, 500_000, seed=2)
    with capsys.disabled():
        print(f"\n{kind}: {counts}")
