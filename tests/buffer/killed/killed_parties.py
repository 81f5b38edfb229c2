"""The parties of a trial: a buffer, a producer, a consumer. Each runs in a process that may be killed.

Whatever a party promises others it first writes where its death cannot take it: what the buffer
acknowledged to the producer, what the consumer has trained.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import xxhash

import asyncrl.buffer.client
from asyncrl.buffer.client import LearnerClient
from asyncrl.buffer.journals.file_journal import FileJournal
from asyncrl.buffer.journals.journal import Journal
from asyncrl.buffer.journals.redis.journal import RedisJournal
from asyncrl.buffer.ledger.tickets import LedgerSettings
from asyncrl.buffer.service import BufferService
from asyncrl.buffer.store import ExperienceStore
from asyncrl.core.errors import AsyncrlError, DeadlineExceeded, LedgerError
from asyncrl.core.experience import encode_group
from asyncrl.core.rpc import Client
from asyncrl.core.runtime.faults import fault_point
from asyncrl.core.runtime.threads import ThreadEvent, ThreadRuntime
from asyncrl.core.wire import Frame
from tests.buffer.parts import GROUP_SIZE, make_group

NUM_STEPS = 5
GROUPS_PER_STEP = 2
ANSWER_S = 0.3
"""How long a party waits for an answer before it asks again; a dead buffer gives none."""
MAX_GROUP_BYTES = 4096
SETTINGS = LedgerSettings(
    run_seed=7,
    groups_per_step=GROUPS_PER_STEP,
    max_lag=2,
    ready_batches=2,
    memory_bytes=64 * MAX_GROUP_BYTES,
    max_group_bytes=MAX_GROUP_BYTES,
    lease_s=0.6,
    max_attempts=50,
)
Result = TypeVar("Result")


def open_journal(kind: str, folder: Path, url: str, fsync: str) -> Journal:
    """Small segments and frequent snapshots, so that every trial sees both change."""
    if kind == "redis":
        return RedisJournal(lambda: url, folder.name, events_per_snapshot=20)
    return FileJournal(
        folder / "journal",
        fsync,  # type: ignore[arg-type]
        segment_bytes=1500,
        events_per_snapshot=20,
        block_commits=8,
    )


def open_store(kind: str, folder: Path, url: str, fsync: str) -> ExperienceStore:
    now = ThreadRuntime().now()
    return ExperienceStore(SETTINGS, open_journal(kind, folder, url, fsync), GROUP_SIZE, True, now)


def serve(folder: Path, address: str, kind: str, url: str, fsync: str) -> None:
    store = open_store(kind, folder, url, fsync)
    BufferService(store, ThreadRuntime(), address).run(ThreadEvent())


def ask(client: Client, op: str, frames: list[Frame] | None = None, **args: Any) -> dict[str, Any]:
    """Call until there is an answer."""
    while True:
        try:
            return client.call(op, frames or [], ANSWER_S, **args).args
        except DeadlineExceeded:
            continue


def digest_of(frames: list[Frame]) -> str:
    return xxhash.xxh3_64_hexdigest(b"".join(bytes(frame) for frame in frames))


def text_digest(text: str) -> str:
    return xxhash.xxh3_64_hexdigest(text.encode())


def note(path: Path, values: list[Any]) -> None:
    """Append a line that is there even if this process dies right after."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.write(descriptor, f"{json.dumps(values)}\n".encode())
    os.close(descriptor)


def produce(folder: Path, address: str) -> None:
    client, life = Client(ThreadRuntime(), address), time.monotonic_ns()
    ask(client, "deregister", replica="producer")
    ask(client, "describe_data", num_prompts=1000, digest="digest")
    while True:
        version = ask(client, "status")["last_version"]
        if version == 0:
            continue
        lease = {"replica": "producer", "version": version, "want": 2, "wait_s": 0.05}
        for grant in ask(client, "lease", **lease)["grants"]:
            fault_point("producer.leased", grant["ticket"])
            push(client, folder, version, grant["ticket"], grant["attempt"], life)


def push(client: Client, folder: Path, version: int, ticket: int, attempt: int, life: int) -> None:
    """Push a group that no other life of a producer would push the same."""
    num_tokens = 5 + life % 7
    frames = encode_group(make_group(ticket, attempt, version, num_tokens=num_tokens))
    fault_point("producer.pushing", ticket)
    result = ask(client, "push", frames, replica="producer", ticket=ticket, attempt=attempt)["result"]
    if result == "stored":
        note(folder / "acknowledged.jsonl", [ticket, attempt, digest_of(frames)])
    fault_point("producer.pushed", ticket)


class Consumer:
    """Trains `NUM_STEPS` steps; its weights are the list of what it trained."""

    def __init__(self, folder: Path, address: str) -> None:
        asyncrl.buffer.client.MARGIN_S = ANSWER_S
        self._folder = folder
        self._client = LearnerClient(address, deadline_s=ANSWER_S)
        self._weights: list[list[list[Any]]] = []
        self._digests: dict[int, str] = {}

    def run(self) -> None:
        opening = self._ask(lambda: self._client.open("consumer"))
        committed = {one.step: one.digest for one in opening.checkpoints}
        for path in self._checkpoints():
            text = path.read_text()
            if committed.get(int(path.stem)) == text_digest(text):
                self._weights = json.loads(text)
        step = len(self._weights)
        if opening.steps_trained or opening.checkpoints:
            self._ask(lambda: self._client.resume(step))
        self._ask(lambda: self._client.register_version(step))
        while len(self._weights) < NUM_STEPS:
            self._train(len(self._weights))
        (self._folder / "weights.json").write_text(json.dumps(self._weights))

    def _checkpoints(self) -> list[Path]:
        return sorted((self._folder / "checkpoints").glob("*.json"), key=lambda path: int(path.stem))

    def _train(self, step: int) -> None:
        batch = self._ask(lambda: self._client.reserve(step, 0.1))
        if batch is None:
            return
        fault_point("consumer.reserved", step)
        tickets = [row.ticket for row in batch.tickets]
        try:
            groups = self._ask(lambda: self._client.fetch(tickets))
        except LedgerError as error:
            note(self._folder / "lost.jsonl", [step, str(error)])
            return
        fault_point("consumer.fetched", step)
        trained = [[group.ticket, group.attempt, digest_of(encode_group(group))] for group in groups]
        fault_point("consumer.training", step)
        self._ask(lambda: self._client.trained(step))
        fault_point("consumer.trained", step)
        self._weights.append(trained)
        self._ask(lambda: self._client.register_version(step + 1))
        if step % 2:
            self._checkpoint(step + 1)

    def _checkpoint(self, step: int) -> None:
        folder, text = self._folder / "checkpoints", json.dumps(self._weights)
        folder.mkdir(exist_ok=True)
        (folder / "new").write_text(text)
        (folder / "new").replace(folder / f"{step}.json")
        fault_point("consumer.checkpointing", step)
        kept = [int(path.stem) for path in self._checkpoints()][-2:]
        self._ask(lambda: self._client.checkpointed(step, text_digest(text), kept))
        fault_point("consumer.checkpointed", step)

    def _ask(self, call: Callable[[], Result]) -> Result:
        while True:
            try:
                return call()
            except DeadlineExceeded:
                continue


def play(role: str, args: dict[str, Any]) -> None:
    """Be one party until it is done; the process's exit code says how it went."""
    folder, address = Path(args["folder"]), args["address"]
    try:
        if role == "buffer":
            serve(folder, address, args["kind"], args["url"], args["fsync"])
        elif role == "producer":
            produce(folder, address)
        else:
            Consumer(folder, address).run()
    except AsyncrlError as error:
        print(f"{role}: {type(error).__name__}: {error}", flush=True)
        os._exit(3)
