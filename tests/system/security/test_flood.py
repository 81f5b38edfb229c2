"""A flood over many connections, with a generator's key or none: the run trains on, and others are heard."""

from __future__ import annotations

import contextlib
import json
import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest
import zmq

from asyncrl.buffer.client import LearnerClient
from asyncrl.cli.run.client import connect
from asyncrl.control.record.rundir import RunDir
from asyncrl.core import wire
from asyncrl.core.rpc import Client
from asyncrl.core.runtime.threads import ThreadRuntime
from asyncrl.core.sockets.keys import ClientKeys, make_run_keys, read_client_keys
from asyncrl.core.sockets.options import prepare_client
from tests.system.parts.gateway_agent import Episodes, agents_at
from tests.system.parts.up_run import UpRun, leftovers

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]
NUM_CONNECTIONS, RATE, FLOOD_S = 600, 200.0, 6.0
"""Connections in all, messages a second in all: what a CPU of this machine sends beside a run."""
PATIENCE_S = 600.0
GROWTH_BYTES = 512 << 20
ENDLESS = b"GET /status HTTP/1.1\r\nHost: 127.0.0.1\r\n"
"""A head that never ends."""
SETS = ("launcher.host=127.0.0.1", "launcher.curve=on", "rollout.replicas=1", "rollout.engine=scripted")
SHORT = ("eval.every_steps=0", "learner.steps=1000000")


class Flood:
    """Connections to one address, over which messages go in turn, at a bounded rate; nothing is read.

    Args:
        said: Over HTTP: what each new connection says.
    """

    def __init__(
        self, address: str, keys: ClientKeys | None, num_connections: int, said: bytes = ENDLESS
    ) -> None:
        self._address, self._keys, self._num, self._said = address, keys, num_connections, said
        self._stop, self.num_sent = threading.Event(), 0
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Flood:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(60.0)

    def _run(self) -> None:
        is_http = self._address.startswith("http")
        with contextlib.ExitStack() as held:
            ends = [self._http(held) if is_http else self._zmq(held) for _ in range(self._num)]
            at = 0
            while not self._stop.wait(1.0 / RATE):
                ends[at % self._num]()
                at, self.num_sent = at + 1, self.num_sent + 1

    def _zmq(self, held: contextlib.ExitStack) -> Callable[[], None]:
        end = zmq.Context.instance().socket(zmq.DEALER)
        held.callback(end.close, 0)
        prepare_client(end, self._address, self._keys)
        end.setsockopt(zmq.SNDHWM, 8)
        end.connect(self._address)
        said = {"id": 1, "op": "status", "args": {}, "sent_s": 0.0, "within_s": 60.0}

        def send() -> None:
            with contextlib.suppress(zmq.Again):
                end.send(wire.pack_header(said, wire.RPC_VERSION), zmq.NOBLOCK)

        return send

    def _http(self, held: contextlib.ExitStack) -> Callable[[], None]:
        place = urlsplit(self._address)
        ends: list[socket.socket] = []

        def send() -> None:
            for old in ends:
                old.close()
            ends.clear()
            with contextlib.suppress(OSError):
                ends.append(socket.create_connection((str(place.hostname), place.port or 0), timeout=0.2))
                ends[0].sendall(self._said)

        held.callback(lambda: [end.close() for end in ends])
        return send


@contextlib.contextmanager
def measuring(asks: Mapping[str, Callable[[], Any]]) -> Iterator[dict[str, list[float]]]:
    """Ask each service again and again; yield how long the answers took, in seconds."""
    took: dict[str, list[float]] = {name: [] for name in asks}
    stop = threading.Event()

    def measure(name: str, ask: Callable[[], Any]) -> None:
        while not stop.wait(0.05):
            begun = time.monotonic()
            ask()
            took[name].append(time.monotonic() - begun)

    threads = [threading.Thread(target=measure, args=pair, daemon=True) for pair in asks.items()]
    for thread in threads:
        thread.start()
    try:
        yield took
        assert all(thread.is_alive() for thread in threads), "every question was answered"
    finally:
        stop.set()
        for thread in threads:
            thread.join(60.0)


def medians_of(run: UpRun, asks: Mapping[str, Callable[[], Any]], seconds: float) -> dict[str, float]:
    """Return the median answer of each service in milliseconds, and the steps per second."""
    step, begun = run.status()["step"], time.monotonic()
    with measuring(asks) as took:
        time.sleep(seconds)
    rate = (run.status()["step"] - step) / (time.monotonic() - begun)
    return {name: 1000 * statistics.median(found) for name, found in took.items()} | {"steps/s": rate}


def memory_of(run: UpRun) -> dict[str, int]:
    services = {name: one["pid"] for name, one in run.status()["services"].items()}
    live = json.loads((run.folder / "run.json").read_text())
    return {name: psutil.Process(pid).memory_info().rss for name, pid in services.items()} | {
        "head": psutil.Process(live["pid"]).memory_info().rss
    }


def test_a_run_trains_on_and_answers_beside_a_flood_over_many_connections_and_its_memory_is_bounded(
    up: Callable[..., UpRun],
) -> None:
    run = up("flooded", *SETS, *SHORT)
    status = run.wait_for(lambda s: s["step"] >= 20, PATIENCE_S)
    places = {name: status["services"][name]["address"] for name in ("buffer.0", "weight_sync.0")}
    services, generator = (read_client_keys(run.folder / f) for f in ("service_keys.json", "keys.json"))
    stranger = replace(make_run_keys().client, server=generator.server)
    api = connect(RunDir(run.folder))
    assert api is not None
    with contextlib.ExitStack() as held:
        buffer = held.enter_context(contextlib.closing(LearnerClient(places["buffer.0"], keys=services)))
        coordinator = held.enter_context(
            contextlib.closing(Client(ThreadRuntime(), places["weight_sync.0"], services))
        )
        asks = {"buffer": buffer.status, "coordinator": lambda: coordinator.call("status"), "api": api.status}
        before = memory_of(run)
        calm = [medians_of(run, asks, FLOOD_S)]
        told: list[str] = []
        for who, keys in (("generator", generator), ("stranger", stranger), ("no key", None)):
            for name in (*places, "api"):
                step = run.status()["step"]
                with Flood(places.get(name, api.url), keys, NUM_CONNECTIONS) as flood:
                    time.sleep(2.0)
                    found = medians_of(run, asks, FLOOD_S)
                assert run.status()["step"] > step
                calm.append(medians_of(run, asks, FLOOD_S / 4))
                told.append(f"{who} at {name}: sent {flood.num_sent}, {found}; then {calm[-1]}")
                print(told[-1], flush=True)
        grown = {name: size - before.get(name, size) for name, size in memory_of(run).items()}
        print("calm", calm[0], "grown", {name: size >> 20 for name, size in grown.items()}, flush=True)
    assert run.command("down").returncode == 0
    code, output = run.finish()
    assert code == 0, output
    assert run.summary()["ledger_residue"] == 0 and leftovers(run.folder) == []
    assert max(grown.values()) < GROWTH_BYTES


NUM_AGENTS = 4


def test_agents_are_answered_beside_a_flood_of_the_gateway_and_its_memory_is_bounded(
    up: Callable[..., UpRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    key = "a-key-that-agents-know"
    monkeypatch.setenv("ASYNCRL_GATEWAY_KEY", key)
    small = ("rollout.replicas=1", "rollout.group_size=4", "learner.groups_per_step=4")
    run = up("flooded-gateway", *SHORT, *small, "rollout.gateway={port: 0}")
    status = run.wait_for(lambda s: bool(s["services"].get("rollout.0", {}).get("gateway")), PATIENCE_S)
    gateway = status["services"]["rollout.0"]["gateway"]
    with agents_at(gateway, NUM_AGENTS, key) as episodes:
        run.wait_for(lambda s: s["step"] >= 10, PATIENCE_S)
        before = memory_of(run)
        calm = episodes_within(FLOOD_S, episodes)
        for who, said in (
            ("a head without end", ENDLESS),
            ("a wrong key", session_request("not-the-key", b"{}")),
            ("nonsense with the key", session_request(key, b"{")),
            ("a bad number with the key", session_request(key, b'{"wait_s": "for ever"}')),
        ):
            step = run.status()["step"]
            with Flood(gateway, None, NUM_CONNECTIONS, said) as flood:
                told = episodes_within(FLOOD_S, episodes)
            print(f"{who}: sent {flood.num_sent}, {told} (calm {calm})", flush=True)
            assert flood.num_sent > RATE and run.status()["step"] > step
            calm = episodes_within(FLOOD_S / 2, episodes)
        grown = {name: size - before.get(name, size) for name, size in memory_of(run).items()}
        print("grown", {name: size >> 20 for name, size in grown.items()}, flush=True)
    assert run.command("down").returncode == 0
    code, output = run.finish()
    assert code == 0, output
    assert run.summary()["ledger_residue"] == 0 and leftovers(run.folder) == []
    assert max(grown.values()) < GROWTH_BYTES


def episodes_within(seconds: float, episodes: Episodes) -> str:
    """Return the agents' episodes per second and their median answer."""
    before = len(episodes.took_s)
    time.sleep(seconds)
    took_s = episodes.took_s[before:]
    assert len(took_s) > NUM_AGENTS, "the agents are answered"
    return f"{len(took_s) / seconds:.1f} episodes/s, {1000 * statistics.median(took_s):.0f} ms"


def session_request(key: str, body: bytes) -> bytes:
    head = f"POST /sessions HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {key}\r\n"
    kind = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    return (head + kind).encode() + body
