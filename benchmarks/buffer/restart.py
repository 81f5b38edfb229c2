"""Restart time of the buffer after `kill -9`, with 10,000 groups in its journal.

    asyncrl bench restart [--quick] [--json FILE] [--check]

Groups of 53 KB (4,000 tokens) are pushed through the store, the process is killed, and a new one is
timed from its start (Python and imports included) to its first answer over ZMQ. Journals: files, Redis
that stayed alive, Redis that was killed too and reads its append-only file. The target: 2 seconds, for
the buffer's own death.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from asyncrl.buffer.journals.kind import open_journal
from asyncrl.buffer.journals.redis.server import RedisServer
from asyncrl.buffer.ledger.tickets import LedgerSettings
from asyncrl.buffer.service import BufferService
from asyncrl.buffer.store import ExperienceStore
from asyncrl.core.config.tree import BufferSection
from asyncrl.core.experience import Group, Trajectory, encode_group
from asyncrl.core.rpc import Client
from asyncrl.core.runtime.clock import SystemClock
from asyncrl.core.runtime.threads import ThreadEvent, ThreadRuntime
from asyncrl.core.staleness import Span
from benchmarks.harness import options

TARGET_S = 2.0
NUM_GROUPS = 10_000
QUICK_GROUPS = 2_000
NUM_TOKENS = 2_000
"""Of each of the group's two trajectories."""
REPEATS = 3
GROUPS_PER_STEP = 16
FILE, REDIS, REDIS_TOO = "files", "Redis alive", "Redis killed too"
SECTIONS = {
    "file": BufferSection(),
    "redis": BufferSection(journal="redis", url="managed"),
}


def main(arguments: Sequence[str]) -> int:
    """Measure as the command line says and return the exit code."""
    if arguments[:1] == ["serve"]:
        return _serve(arguments[1], Path(arguments[2]))
    if arguments[:1] == ["fill"]:
        return _fill(arguments[1], Path(arguments[2]), int(arguments[3]))
    parser = options.make_parser("asyncrl bench restart", __doc__, f"{QUICK_GROUPS} groups: under a minute")
    given = parser.parse_args(arguments)
    return options.report(given, measure(QUICK_GROUPS if given.quick else NUM_GROUPS), table, check)


def measure(num_groups: int) -> dict[str, Any]:
    """Return seconds from a process's start to its first answer, the median of three, by journal."""
    results: dict[str, Any] = {"groups": num_groups, "serving_s": {}, "recovery_s": {}}
    for kind in SECTIONS:
        with tempfile.TemporaryDirectory(prefix="asyncrl-restart-", dir=os.environ.get("TMPDIR")) as name:
            folder = Path(name)
            _run("fill", kind, str(folder), str(num_groups)).wait()
            try:
                _note(
                    results,
                    FILE if kind == "file" else REDIS,
                    [_restart(kind, folder) for _ in range(REPEATS)],
                )
                if kind == "redis":
                    _note(results, REDIS_TOO, [_restart_with_redis(folder) for _ in range(REPEATS)])
            finally:
                if kind == "redis":
                    RedisServer(folder / "buffer" / "redis").stop()
    return results


def _note(results: dict[str, Any], journal: str, times: list[tuple[float, float]]) -> None:
    serving, recovery = zip(*times, strict=True)
    results["serving_s"][journal] = sorted(serving)[len(serving) // 2]
    results["recovery_s"][journal] = sorted(recovery)[len(recovery) // 2]


def _restart_with_redis(folder: Path) -> tuple[float, float]:
    server = RedisServer(folder / "buffer" / "redis")
    assert server.pid is not None, "the last buffer left it alive"
    os.kill(server.pid, 9)
    return _restart("redis", folder)


def _restart(kind: str, folder: Path) -> tuple[float, float]:
    """Start a buffer, time its first answer, kill it; return that time and the share of the recovery."""
    began = time.monotonic()
    process = _run("serve", kind, str(folder))
    assert process.stdout is not None
    address, recovery_s, num_stored = process.stdout.readline().split()
    client = Client(ThreadRuntime(), address)
    status = client.call("status", deadline_s=60.0).args
    serving_s = time.monotonic() - began
    client.close()
    process.kill()
    process.wait()
    assert status["stored_groups"] == int(num_stored) and status["residue"] == 0
    return serving_s, float(recovery_s)


def _run(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "benchmarks.buffer.restart", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def _open(kind: str, folder: Path) -> ExperienceStore:
    max_lag = NUM_GROUPS // GROUPS_PER_STEP + 1
    settings = LedgerSettings(
        run_seed=0,
        groups_per_step=GROUPS_PER_STEP,
        max_lag=max_lag,
        ready_batches=max_lag,
        memory_bytes=2 << 30,
        max_group_bytes=1 << 17,
        lease_s=3600.0,
        max_attempts=3,
    )
    now = SystemClock().now()
    return ExperienceStore(settings, open_journal(SECTIONS[kind], folder), 2, False, now)


def _serve(kind: str, folder: Path) -> int:
    began = time.monotonic()
    store = _open(kind, folder)
    recovery_s = time.monotonic() - began
    service = BufferService(store, ThreadRuntime())
    print(service.address, recovery_s, len(store.ledger.state.tickets), flush=True)
    service.run(ThreadEvent())
    return 0


def _fill(kind: str, folder: Path, num_groups: int) -> int:
    """Push groups, a few to a turn, and end as after a crash."""
    store = _open(kind, folder)
    store.ledger.describe_data(num_groups, "digest")
    store.ledger.register_version(store.ledger.open("learner"), 0)
    for number in range(num_groups):
        (grant,) = store.ledger.lease("replica", 1, 1, 0.0)
        frames = encode_group(_make_group(grant.ticket, grant.attempt))
        assert store.push("replica", grant.ticket, grant.attempt, frames) == "stored"
        if number % 4 == 3:
            assert store.commit(0.0)
            store.journal.tick(0.0)
    assert store.commit(0.0)
    sys.stdout.flush()
    os._exit(0)


def _make_group(ticket: int, attempt: int) -> Group:
    rng = np.random.default_rng(ticket)
    trajectories = tuple(
        Trajectory(
            response_ids=rng.integers(0, 150_000, NUM_TOKENS, dtype=np.int32),
            loss_mask=np.ones(NUM_TOKENS, dtype=np.uint8),
            logprobs=rng.random(NUM_TOKENS, dtype=np.float32),
            spans=(Span(1, 0, NUM_TOKENS),),
            reward=float(sample),
            finish_reason="stop",
        )
        for sample in range(2)
    )
    return Group(ticket, attempt, np.arange(4_000, dtype=np.int32), trajectories)


def table(results: Mapping[str, Any]) -> str:
    """Return the figures as text."""
    lines = [
        f"{results['groups']} groups of 53 KB in the journal",
        f"{'':<18} serving again   of it recovery",
    ]
    for journal, serving_s in results["serving_s"].items():
        lines.append(f"{journal:<18} {serving_s:>11.2f} s {results['recovery_s'][journal]:>13.2f} s")
    return "\n".join(lines)


def check(results: Mapping[str, Any]) -> options.Verdict:
    """Judge the journals whose server, if they have one, did not die."""
    return options.judge({name: TARGET_S / results["serving_s"][name] for name in (FILE, REDIS)})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
