"""One trial: parties are killed where a seed says, the harness restarts them, then all is recounted."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from asyncrl.buffer.journals.redis.server import RedisServer
from asyncrl.buffer.ledger.census import take_census
from asyncrl.buffer.ledger.tickets import PAYLOAD_STATES, State
from asyncrl.core.errors import DeadlineExceeded
from asyncrl.core.rpc import Client
from asyncrl.core.runtime.threads import ThreadRuntime
from tests.buffer.journals.redis.redis_parts import free_port
from tests.buffer.killed import killed_parties
from tests.buffer.killed.killed_parties import NUM_STEPS, digest_of

REPOSITORY = Path(__file__).parents[3]
TRIAL_S = 40.0
LAST_TICKET = 2 * NUM_STEPS
POINTS = {
    "buffer": [
        *(("buffer.appending", LAST_TICKET), ("buffer.appended", LAST_TICKET)),
        *(("buffer.committing", 25), ("buffer.committed", 25), ("buffer.sent", 25)),
        *(("buffer.snapshotting", 0), ("buffer.snapshotted", 0)),
    ],
    "producer": [
        *(("producer.leased", LAST_TICKET), ("producer.pushing", LAST_TICKET)),
        ("producer.pushed", LAST_TICKET),
    ],
    "consumer": [
        *((f"consumer.{point}", NUM_STEPS - 1) for point in ("reserved", "fetched", "training", "trained")),
        *(("consumer.checkpointing", 0), ("consumer.checkpointed", 0)),
    ],
}
"""Where each party may die: the point, and the highest number to choose for it; 0 for none."""
POINTS_OF_KIND = {
    "file": [("buffer.deleting", 0), ("buffer.packing", 0)],
    "redis": [("redis.half_sent", 25), ("redis.sent", 25)],
}


class ForkServer:
    """The process that forks the parties of many trials."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.buffer.killed.killed_forkserver"],
            cwd=REPOSITORY,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, **request: Any) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{json.dumps(request)}\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer

    def close(self) -> None:
        self._process.communicate(timeout=30.0)


@dataclass
class Plan:
    """Who dies where, in order. `redis_kills`: after how many acknowledged groups."""

    faults: dict[str, list[str]]
    redis_kills: list[int]
    fsync: str

    @classmethod
    def draw(cls, kind: str, rng: random.Random) -> Plan:
        points = POINTS | {"buffer": POINTS["buffer"] + POINTS_OF_KIND[kind]}
        faults: dict[str, list[str]] = {party: [] for party in points}
        for _ in range(rng.choice((1, 1, 2, 3))):
            party = rng.choice(("buffer", "buffer", "producer", "consumer"))
            name, highest = rng.choice(points[party])
            faults[party].append(f"{name}@{rng.randint(1, highest)}" if highest else name)
        kills = []
        if kind == "redis":
            kills = sorted(rng.randrange(LAST_TICKET - 2) for _ in range(rng.choice((0, 1, 2))))
        fsync = rng.choice(("everysec", "always"))
        if kills and faults["buffer"]:
            fsync = "always"  # with everysec both together may lose 2 s: docs/journals.md, test_slow_disk.py
        return cls(faults, kills, fsync)


@dataclass
class Report:
    """What a trial saw."""

    killed: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    num_acknowledged: int = 0


class Trial:
    """Runs one plan in one folder."""

    def __init__(self, forks: ForkServer, kind: str, folder: Path, plan: Plan) -> None:
        folder.mkdir(parents=True)
        self._forks, self._kind, self._folder, self._plan = forks, kind, folder, plan
        self._address = f"tcp://127.0.0.1:{free_port()}"
        self._server: RedisServer | None = None
        self._parties: dict[int, str] = {}
        self._faults: dict[int, str] = {}
        self.report = Report()

    def run(self) -> Report:
        """Let the parties work and die until the consumer is done, then recount."""
        if self._kind == "redis":
            self._server = RedisServer(self._folder / "redis", self._plan.fsync)  # type: ignore[arg-type]
            self._server.ensure()
        try:
            for party in ("buffer", "producer", "consumer"):
                self._start(party)
            self._await_consumer()
            self._check_status()
            self._kill_all()
            self._recount()
        finally:
            self._kill_all()
            if self._server is not None:
                self._server.stop()
        return self.report

    @property
    def _url(self) -> str:
        return self._server.url if self._server else ""

    def _start(self, party: str) -> None:
        faults = self._plan.faults[party]
        fault = faults.pop(0) if faults else ""
        args = {
            "folder": str(self._folder),
            "address": self._address,
            "kind": self._kind,
            "url": self._url,
            "fsync": self._plan.fsync,
        }
        pid = self._forks.ask(op="start", role=party, args=args, fault=fault)["pid"]
        self._parties[pid], self._faults[pid] = party, fault

    def _await_consumer(self) -> None:
        began, is_over = time.monotonic(), False
        while not is_over and not self.report.problems:
            self._kill_redis()
            is_over = self._bury_ended()
            time.sleep(0.005)
            self._expect(time.monotonic() - began < TRIAL_S, f"not done after {TRIAL_S:g} s")

    def _bury_ended(self) -> bool:
        """Bury all that have ended since the last call; return whether the consumer is done."""
        buried = [self._bury(pid, code) for pid, code in self._forks.ask(op="poll")["ended"]]
        return any(buried)

    def _bury(self, pid: int, code: int) -> bool:
        """Start the next life of a party that was killed; return whether the consumer is done."""
        party = self._parties.pop(pid)
        if code == -signal.SIGKILL:
            self.report.killed.append(self._faults[pid])
            self._start(party)
        elif (party, code) != ("consumer", 0):
            self.report.problems.append(f"the {party} ended by itself with {code}")
        return (party, code) == ("consumer", 0)

    def _kill_redis(self) -> None:
        kills = self._plan.redis_kills
        if kills and len(self._acknowledged()) >= kills[0]:
            kills.pop(0)
            assert self._server is not None and self._server.pid is not None
            os.kill(self._server.pid, signal.SIGKILL)
            self.report.killed.append("redis")
            while self._server.pid is not None:
                time.sleep(0.001)
            self._server.ensure()

    def _check_status(self) -> None:
        """Ask the buffer for its account; it may die as the consumer ends, and is started again then."""
        client = Client(ThreadRuntime(), self._address)
        with contextlib.closing(client):
            for _ in range(10):
                self._bury_ended()
                with contextlib.suppress(DeadlineExceeded):
                    status = client.call("status", deadline_s=1.0).args
                    self._expect(status["residue"] == 0, f"the residue is {status['residue']}")
                    return
        self._expect(False, "the buffer does not answer")

    def _kill_all(self) -> None:
        for pid in self._parties:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        while self._parties:
            for pid, _ in self._forks.ask(op="poll")["ended"]:
                self._parties.pop(pid, None)
            time.sleep(0.002)

    def _recount(self) -> None:
        """Open the journal once more and compare it with what the parties were promised."""
        if self.report.problems:
            return
        store = killed_parties.open_store(self._kind, self._folder, self._url, self._plan.fsync)
        with contextlib.closing(store.journal):
            state = store.ledger.state
            self._expect(take_census(state).residue == 0, "the residue is not 0 after a restart")
            self._expect(state.steps_trained == NUM_STEPS, f"{state.steps_trained} steps are trained")
            self._expect(state.reissues["lost"] == 0, "payloads were lost")
            self._expect(store.journal.counters["redis_wiped"] == 0, "Redis lost turns")
            weights = json.loads((self._folder / "weights.json").read_text())
            self._check_weights(weights)
            trained = {row[0]: row for batch in weights for row in batch}
            for ticket, attempt, digest in self._acknowledged():
                self.report.num_acknowledged += 1
                self._check_acknowledged(store, trained, ticket, attempt, digest)

    def _check_weights(self, weights: list[list[list[Any]]]) -> None:
        tickets = [ticket for batch in weights for ticket, _, _ in batch]
        self._expect(len(set(tickets)) == len(tickets), f"trained twice in one lineage: {tickets}")
        self._expect(len(tickets) == 2 * NUM_STEPS, f"{len(tickets)} groups are trained")
        known = {(ticket, attempt): digest for ticket, attempt, digest in self._acknowledged()}
        for ticket, attempt, digest in (row for batch in weights for row in batch):
            pushed = known.get((ticket, attempt), digest)  # its answer may never have come
            self._expect(pushed == digest, f"ticket {ticket} was trained on other bytes than were pushed")

    def _check_acknowledged(
        self, store: Any, trained: dict[int, list[Any]], ticket: int, attempt: int, digest: str
    ) -> None:
        found = store.ledger.state.tickets.get(ticket)
        if found is None or found.state in (State.TRAINED, State.ACKED):
            is_there = trained.get(ticket, [0, 0, ""])[1:] == [attempt, digest]
        else:
            frames = store.journal.read(ticket, attempt)
            is_there = found.state in PAYLOAD_STATES and frames is not None and digest_of(frames) == digest
        self._expect(is_there, f"ticket {ticket}, attempt {attempt} was acknowledged and is lost")

    def _acknowledged(self) -> list[tuple[int, int, str]]:
        path = self._folder / "acknowledged.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [(ticket, attempt, digest) for ticket, attempt, digest in map(json.loads, lines)]

    def _expect(self, is_so: bool, problem: str) -> None:
        if not is_so:
            self.report.problems.append(problem)
