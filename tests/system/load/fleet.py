"""Replicas of the load test, each in a process of its own: two with a gateway, two with tools.

A process kills itself, or the tool server or the sandbox that it uses, when it passes the n-th of a point.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from asyncrl.buffer.client import ReplicaClient
from asyncrl.core.runtime.allocation import keep_freed_memory
from asyncrl.core.runtime.clock import SystemClock
from asyncrl.core.runtime.faults import set_hook
from asyncrl.core.runtime.threads import ThreadEvent, ThreadRuntime
from benchmarks.rollout.gateway.engine import ServedEngine, engine_arguments
from benchmarks.rollout.gateway.servers import MAX_SEQUENCES, MODEL_TOKENS, load_prompts, make_gateway
from rollout_service.engine.metered import MeteredEngine
from rollout_service.engine.scripted.engine import ScriptedEngine
from rollout_service.engine.vllm.environment import prepare_environment
from rollout_service.environments.registry import Episodes
from rollout_service.environments.runner import MultiTurn
from rollout_service.environments.tools.calls import Call
from rollout_service.environments.tools.code import Shell
from rollout_service.environments.tools.mcp_server import McpServer
from rollout_service.environments.tools.tool import Tool
from rollout_service.environments.tools.tool_use import ToolEpisode
from rollout_service.replica.parts import ReplicaParts, ReplicaSettings
from rollout_service.replica.service import Replica
from rollout_service.sampling.groups import GroupRunner, GroupSettings
from rollout_service.sandbox.local import EMPTY, LocalSandbox, make_sandboxes
from rollout_service.tasks.tiny_text import build_tokenizer
from tests.rollout.environments.parts import ExactMatch
from tests.rollout.replica.replica_parts import HandFedReceiver

GROUP_SIZE, MAX_TOKENS = 4, 256
LEASE_S = 20.0
VERSION = 1


@dataclass(frozen=True)
class Place:
    """Where a replica finds its buffer and its files, and the faults of its process: (point, number) each."""

    name: str
    address: str
    folder: Path
    has_gateway: bool
    faults: tuple[tuple[str, int], ...] = ()


class Points:
    """Counts the points that a process passes, and strikes at the chosen ones."""

    def __init__(self, place: Place) -> None:
        self._faults = dict(place.faults)
        self._passed: dict[str, itertools.count[int]] = {}

    def is_struck(self, name: str) -> bool:
        """Count, and tell whether it is the one."""
        number = next(self._passed.setdefault(name, itertools.count(1)))
        return self._faults.get(name) == number

    def __call__(self, name: str, where: tuple[int | None, ...]) -> None:
        if self.is_struck(name):
            os.kill(os.getpid(), signal.SIGKILL)


class StruckSandbox(LocalSandbox):
    """A sandbox whose processes are killed at the chosen command, once they run."""

    points: Points

    async def _talk(self, process: Any, message: bytes) -> Any:
        if self.points.is_struck("sandbox"):
            os.killpg(process.pid, signal.SIGKILL)
        return await super()._talk(process, message)


class EveryTurn:
    """Every answer calls the server and the shell."""

    roles = ("user",)

    def find(self, answer: str) -> list[Call]:
        return [Call("note", {"text": answer}), Call("shell", {"command": "echo done"})]

    def tell(self, results: list[str]) -> str:
        return "".join(results)


def run_replica(pipe: Connection, place: Place) -> None:
    """Entry of a replica's process: it works until it is told anything."""
    prepare_environment(has_gpu=False)
    keep_freed_memory()
    points = Points(place)
    set_hook(points)
    tools = {} if place.has_gateway else _start_tools(place)

    async def build() -> ReplicaParts:
        parts = _with_gateway(place) if place.has_gateway else _with_tools(place, points, tools)
        if parts.gateway is not None:
            start = parts.gateway.start

            async def start_and_tell(on_demand: Callable[[], None]) -> None:
                await start(on_demand)
                pipe.send(parts.gateway.url)  # type: ignore[union-attr]

            parts.gateway.start = start_and_tell  # type: ignore[method-assign]
        return parts

    settings = ReplicaSettings(64 if place.has_gateway else 1, LEASE_S, 60.0, True, not place.has_gateway)
    replica, stop, runtime = (
        Replica(ThreadRuntime(), place.name, settings, build),
        ThreadEvent(),
        ThreadRuntime(),
    )
    runtime.spawn("stop", lambda: _stop_when_told(pipe, stop))
    replica.run(stop)
    pipe.send(dict(replica.status().counters))


def _stop_when_told(pipe: Connection, stop: ThreadEvent) -> None:
    """Stop, too, when the test has ended without a word."""
    with contextlib.suppress(EOFError):
        pipe.recv()
    stop.set()


def _common(place: Place) -> dict[str, Any]:
    receiver = HandFedReceiver()
    receiver.offer(VERSION, 0)
    return {
        "buffer": ReplicaClient(place.address, place.name, 10.0),
        "weights": receiver,
        "evaluator": None,
    }


def _with_gateway(place: Place) -> ReplicaParts:
    engine = ServedEngine(engine_arguments(place.folder, MODEL_TOKENS, MAX_SEQUENCES), 0.0)
    gateway = make_gateway(place.folder, engine, GROUP_SIZE, deadline_s=120.0)
    metered = MeteredEngine(engine, SystemClock())
    return ReplicaParts(
        engine=metered,
        runner=gateway.manager,
        prompts=load_prompts(place.folder),
        gateway=gateway,
        **_common(place),
    )


def _start_tools(place: Place) -> dict[str, Tool]:
    """Return the tools by name; a server lists its own outside of the event loop."""
    server = McpServer(command=[sys.executable, str(place.folder / "server.py"), place.name])
    noted = server.list_tools()
    for tool in noted:
        tool.is_idempotent = True  # as this server's is: a call whose replica died in it is made again
    return {tool.name: tool for tool in (*noted, Shell())}


def _with_tools(place: Place, points: Points, tools: dict[str, Tool]) -> ReplicaParts:
    engine, tokenizer, prompts = ScriptedEngine(2, 200.0), build_tokenizer(), load_prompts(place.folder)
    metered, StruckSandbox.points = MeteredEngine(engine, SystemClock()), points
    sandboxes = make_sandboxes({"workers": 1})

    def begin(prompt: object, seed: int) -> ToolEpisode:
        return ToolEpisode(tools, EveryTurn(), sandbox=StruckSandbox(sandboxes, EMPTY))

    episodes = Episodes(begin, max_turns=2, is_restorable=True)
    runner = MultiTurn(metered, tokenizer, episodes, ExactMatch(), has_chats=True)
    groups = GroupRunner(runner, prompts, GroupSettings(0, GROUP_SIZE, 1.0, MAX_TOKENS))
    return ReplicaParts(engine=metered, runner=groups, prompts=prompts, **_common(place))
