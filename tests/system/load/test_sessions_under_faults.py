"""10,000 sessions over scripted replicas of which each kind of process dies under load.

Killed by itself, or in its n-th call: a replica's process with its gateway, a replica whose episodes are in
their tools, a tool server (MCP), a sandbox. Nothing is lost, and the memory of those that live on stays flat.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest

from asyncrl.buffer.client import LearnerClient
from asyncrl.cli.audit.report import verify_run
from asyncrl.core.config.load import dump_resolved
from asyncrl.core.config.tree import Config
from asyncrl.core.errors import ServiceFailed
from asyncrl.core.service import ServiceContext
from asyncrl.core.status.service import BufferStatus
from benchmarks.rollout.gateway.servers import PROMPT_TOKENS, make_model
from benchmarks.rollout.ways.ours import run_buffer
from benchmarks.rollout.ways.setting import NO_BOUND
from benchmarks.weight_sync.peers.peers import FRESH, Peer
from tests.system.load.fleet import GROUP_SIZE, LEASE_S, MAX_TOKENS, Place, run_replica

pytestmark = pytest.mark.long

NUM_SESSIONS, NUM_EARLY = 10_000, 2_000
NUM_AGENTS, GROUPS_PER_STEP = 32, 25
MAX_GROWTH_BYTES = 16 << 20
"""Of a process that lives on, from `NUM_EARLY` sessions to the end: 2 KiB a session."""
START_S, DEADLINE_S = 120.0, 450.0
SERVER_DIES_AT = 20
FAULTS: dict[str, tuple[tuple[str, int], ...]] = {
    "rollout.0": (("rollout.push", 40),),
    "rollout.1": (),
    "rollout.2": (("rollout.called", 9),),
    "rollout.3": (("sandbox", 30),),
}
GATEWAYS, KILLED = ("rollout.0", "rollout.1"), ("rollout.0", "rollout.2")
SERVER = f"""
import os, signal, sys
from pathlib import Path

from mcp.server.mcpserver import MCPServer

server, calls, mark = MCPServer("load"), [], Path(__file__).with_suffix(".killed")


@server.tool()
def note(text: str) -> str:
    calls.append(text)
    if sys.argv[1] == "rollout.3" and len(calls) == {SERVER_DIES_AT} and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return "noted"


server.run("stdio")
"""


class Fleet:
    """The buffer, the replicas, and who starts again what was killed."""

    def __init__(self, folder: Path, opened: contextlib.ExitStack) -> None:
        self.folder, self.run_dir, self._opened = make_model(folder / "model"), folder / "run", opened
        (self.folder / "server.py").write_text(SERVER)
        config = make_config(self.folder)
        self.run_dir.mkdir()
        (self.run_dir / "resolved.yaml").write_text(dump_resolved(config))
        self.buffer = self._open(
            "buffer.0", run_buffer, ServiceContext(config, "buffer.0", self.run_dir, "load")
        )
        self.address: str = self.buffer.hear(START_S)
        self.urls: dict[str, str] = {}
        self.replicas = {name: self._replica(name, faults) for name, faults in FAULTS.items()}
        self._await(*GATEWAYS)
        self.struck: list[str] = []
        for name in KILLED:
            threading.Thread(target=self._start_again, args=(name,), daemon=True).start()

    def _open(self, name: str, entry: Any, given: Any) -> Peer:
        return self._opened.enter_context(contextlib.closing(Peer(name, entry, given, way=FRESH)))

    def _replica(self, name: str, faults: tuple[tuple[str, int], ...] = ()) -> Peer:
        return self._open(name, run_replica, Place(name, self.address, self.folder, name in GATEWAYS, faults))

    def _await(self, *names: str) -> None:
        for name in names:
            self.urls[name] = self.replicas[name].hear(START_S)

    def _start_again(self, name: str) -> None:
        while True:
            with contextlib.suppress(ServiceFailed):
                self.replicas[name].await_end()
                break
        self.urls.pop(name, None)
        self.replicas[name] = self._replica(name)
        self.struck.append(name)
        if name in GATEWAYS:
            self._await(name)

    def memory(self) -> dict[str, int]:
        """Return the resident bytes of what is not killed."""
        living = {"buffer.0": self.buffer} | {
            name: one for name, one in self.replicas.items() if name not in KILLED
        }
        return {name: psutil.Process(one.pid).memory_info().rss for name, one in living.items()}

    def stop(self) -> dict[str, dict[str, int]]:
        """Let the replicas leave; return what each counted."""
        return {name: one.ask("stop") for name, one in self.replicas.items()}


def make_config(folder: Path) -> Config:
    return Config.model_validate(
        {
            "model": {"path": str(folder), "dtype": "float32"},
            "data": {"train": str(folder / "prompts.jsonl"), "max_prompt_tokens": PROMPT_TOKENS},
            "reward": {"fn": "exact_match"},
            "rollout": {"group_size": GROUP_SIZE, "max_tokens": MAX_TOKENS},
            "learner": {"groups_per_step": GROUPS_PER_STEP, "minibatches": 1},
            "staleness": {"max_lag": NO_BOUND, "ready_batches": NO_BOUND},
            "buffer": {"lease_s": LEASE_S},
            "algorithm": {"drop_constant_groups": False},
        }
    )


class Learner:
    """Trains nothing, and takes every batch: a checkpoint every ten steps lets the journal go on."""

    def __init__(self, address: str) -> None:
        self.client, self._stop = LearnerClient(address), threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def _work(self) -> None:
        self.client.open("load")
        for step in itertools.count():
            while self.client.reserve(step, 0.5) is None:
                if self._stop.is_set():
                    return
            self.client.trained(step)
            if step % 10 == 9:
                self.client.checkpointed(step + 1, "load", [step + 1])

    def end(self) -> BufferStatus:
        self._stop.set()
        self._thread.join(60)
        assert not self._thread.is_alive()
        time.sleep(1.0)  # the status is at most half a second old
        status = self.client.status()
        self.client.close()
        return status


class Lost(Exception):
    """A call of a session was refused: its group has ended."""


class Agents:
    """Sessions of two turns; the second one is streamed. One that is lost is another one's to do."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet, self._turns = fleet, itertools.count()
        self.num_rewarded = self.num_lost = 0
        self.early: dict[str, int] = {}

    async def work(self) -> None:
        async with asyncio.timeout(DEADLINE_S), aiohttp.ClientSession() as http, asyncio.TaskGroup() as tasks:
            for _ in range(NUM_AGENTS):
                tasks.create_task(self._go_on(http))

    async def _go_on(self, http: aiohttp.ClientSession) -> None:
        while self.num_rewarded < NUM_SESSIONS or len(self._fleet.struck) < len(KILLED):
            urls = sorted(self._fleet.urls.values())
            try:
                await self._episode(http, urls[next(self._turns) % len(urls)])
            except (aiohttp.ClientError, Lost):
                self.num_lost += 1
                await asyncio.sleep(0.1)
            if self.num_rewarded >= NUM_EARLY and not self.early:
                self.early = self._fleet.memory()

    async def _episode(self, http: aiohttp.ClientSession, url: str) -> None:
        async with http.post(f"{url}/sessions", json={"wait_s": 5}) as opened:
            if opened.status == 503:
                return
            session = await opened.json()
        messages = [*session["prompt"]]
        for stream in (False, True):
            body = {"model": "policy", "messages": messages, "max_tokens": 8, "stream": stream}
            said = await self._post(http, f"{session['base_url']}/chat/completions", body)
            if not stream:
                answer = json.loads(said)["choices"][0]["message"]["content"]
                messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "Go on."}]
        await self._post(http, f"{url}/sessions/{session['key']}/reward", {"reward": float(len(said) % 2)})
        self.num_rewarded += 1

    async def _post(self, http: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> str:
        async with http.post(url, json=body) as answered:
            text = await answered.text()
            if answered.status != 200:
                raise Lost(text)
            return text


@contextlib.contextmanager
def open_fleet(folder: Path) -> Iterator[Fleet]:
    with contextlib.ExitStack() as opened:
        yield Fleet(folder, opened)


def test_nothing_is_lost_and_memory_is_flat_when_each_kind_of_process_is_killed(tmp_path: Path) -> None:
    with open_fleet(tmp_path) as fleet:
        learner, agents = Learner(fleet.address), Agents(fleet)
        asyncio.run(agents.work())
        late = fleet.memory()
        counted = fleet.stop()
        status = learner.end()
    assert sorted(fleet.struck) == sorted(KILLED)
    failures = [name for name in status.counters if name.startswith("failed/")]
    assert any("MCP server" in name for name in failures), failures
    assert any("sandbox failed" in name for name in failures), failures
    assert all("MCP server" in name or "sandbox failed" in name for name in failures), failures
    print({"rewarded": agents.num_rewarded, "lost": agents.num_lost, "early": agents.early, "late": late})
    print({"issued": status.issued, "trained": status.trained, "reissues": dict(status.reissues)}, counted)
    growth = {name: late[name] - agents.early[name] for name in late}
    assert max(growth.values()) < MAX_GROWTH_BYTES, growth
    assert status.residue == 0 and not status.dropped and not status.given_up, status
    assert status.trained * GROUP_SIZE >= NUM_SESSIONS * 9 // 10
    assert verify_run(str(fleet.run_dir), "")["findings"] == []
