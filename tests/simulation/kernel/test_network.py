"""The simulated network: what TCP and ZMQ promise, and nothing more."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator

import pytest

from asyncrl.core.errors import ConnectionLost, DeadlineExceeded
from asyncrl.core.rpc import Client, Limits, Request, Server
from tests.simulation.kernel.network import SILENCE_S, Wires
from tests.simulation.kernel.runtime import SimRuntime
from tests.simulation.kernel.world import World

ADDRESS = "ipc:///simulated/server"


class Stage:
    """A world with a server that answers with its process's name and counts its calls."""

    def __init__(self, seed: str = "test") -> None:
        self.world = World(seed)
        self.wires = Wires(self.world)
        self.said: list[object] = []
        self.num_heard = 0
        self.server = self.serve("server")

    def serve(self, name: str) -> SimRuntime:
        runtime = SimRuntime(self.world.process(name), self.wires)
        runtime.spawn("main", lambda: Server(runtime, ADDRESS).serve(_Echo(self, runtime), runtime.event()))
        return runtime

    def ask(self, work: Callable[[SimRuntime, Client], object], name: str = "client") -> SimRuntime:
        runtime = SimRuntime(self.world.process(name), self.wires)

        def run() -> None:
            self.said.append(work(runtime, Client(runtime, ADDRESS)))

        runtime.spawn("main", run)
        return runtime


class _Echo:
    def __init__(self, stage: Stage, runtime: SimRuntime) -> None:
        self._stage, self._runtime = stage, runtime

    def handle(self, request: Request) -> None:
        self._stage.num_heard += 1
        request.reply(who=self._runtime.process.name, **request.args)

    def wake_at(self) -> float:
        return math.inf

    def tick(self, now: float) -> None:
        pass


@pytest.fixture
def stage() -> Iterator[Stage]:
    stage = Stage()
    yield stage
    stage.world.end()


def call(runtime: SimRuntime, client: Client, deadline_s: float = 5.0) -> object:
    try:
        return client.call("echo", deadline_s=deadline_s, number=7).args
    except (DeadlineExceeded, ConnectionLost) as error:
        return type(error)


def test_production_calls_are_answered_over_it(stage: Stage) -> None:
    stage.ask(call)
    stage.world.run(1.0)
    assert stage.said == [{"who": "server", "number": 7}]


def test_a_look_costs_time_or_a_loop_that_only_looks_would_stop_the_world(stage: Stage) -> None:
    runtime = SimRuntime(stage.world.process("looker"), stage.wires)
    listener = runtime.network.router("ipc:///simulated/other", None, Limits(), Counter())

    def look() -> None:
        while stage.world.now < 0.1:
            listener.wait(0.0)
        stage.said.append("went on")

    runtime.spawn("main", look)
    stage.world.run(1.0)
    assert stage.said == ["went on"]


def test_a_call_whose_server_dies_ends_at_once_and_the_next_one_reaches_its_successor(stage: Stage) -> None:
    def work(runtime: SimRuntime, client: Client) -> object:
        first = call(runtime, client)
        stage.world.after(0.0, stage.server.process.kill)
        stage.world.after(1.0, stage.serve, "successor")
        runtime.sleep(0.5)
        return first, call(runtime, client)

    stage.ask(work)
    stage.world.run(20.0)
    assert stage.said == [({"who": "server", "number": 7}, {"who": "successor", "number": 7})]


def test_what_was_sent_before_a_break_may_arrive_and_nothing_behind_a_lost_message_does() -> None:
    heard = set()
    for seed in range(30):
        stage = Stage(str(seed))

        def work(runtime: SimRuntime, client: Client, stage: Stage = stage) -> object:
            client.call("echo", deadline_s=5.0)
            begun = [client.begin("echo", deadline_s=5.0) for _ in range(4)]
            runtime.process.kill()
            return begun

        stage.ask(work)
        stage.world.run(5.0)
        heard.add(stage.num_heard)
        stage.world.end()
    assert heard <= {1, 2, 3, 4, 5} and len(heard) > 2


def test_a_partition_holds_messages_up_or_breaks_their_connection(stage: Stage) -> None:
    def work(runtime: SimRuntime, client: Client) -> object:
        call(runtime, client)
        stage.wires.part("client", "server", 2.0)
        before = stage.world.now
        return call(runtime, client, 10.0), stage.world.now - before > 1.9 or stage.num_heard == 1

    stage.ask(work)
    stage.world.run(20.0)
    assert stage.said[0] in (({"who": "server", "number": 7}, True), (ConnectionLost, True))


def test_a_connection_that_is_silent_for_longer_than_the_heartbeats_allow_breaks(stage: Stage) -> None:
    def work(runtime: SimRuntime, client: Client) -> object:
        call(runtime, client)
        stage.wires.part("client", "server", 100.0)
        before = stage.world.now
        return call(runtime, client, 90.0), stage.world.now - before <= SILENCE_S + 1.0

    stage.ask(work)
    stage.world.run(200.0)
    assert stage.said == [(ConnectionLost, True)]


def test_nobody_connects_to_a_process_that_stands_still_until_it_goes_on(stage: Stage) -> None:
    stage.world.after(0.1, stage.server.process.freeze)
    stage.world.after(3.0, stage.server.process.thaw)

    def work(runtime: SimRuntime, client: Client) -> object:
        runtime.sleep(0.5)
        late = Client(runtime, ADDRESS)
        return call(runtime, late, 1.0), call(runtime, late, 5.0)

    stage.ask(work)
    stage.world.run(20.0)
    assert stage.said == [(DeadlineExceeded, {"who": "server", "number": 7})]


def test_an_address_is_its_last_binders_and_old_connections_stay_with_the_one_before(stage: Stage) -> None:
    def work(runtime: SimRuntime, client: Client) -> object:
        first = call(runtime, client)
        stage.serve("successor")
        runtime.sleep(0.5)
        return [first, call(runtime, client), call(runtime, Client(runtime, ADDRESS))]

    stage.ask(work)
    stage.world.run(10.0)
    assert [one["who"] for one in stage.said[0]] == ["server", "server", "successor"]  # type: ignore[union-attr]


def test_equal_seeds_give_equal_traces_and_other_seeds_others() -> None:
    def trace(seed: str) -> str:
        stage = Stage(seed)
        for number in range(5):
            stage.ask(call, f"client-{number}")
        stage.world.run(3.0)
        found = stage.world.trace
        stage.world.end()
        return found

    assert trace("a") == trace("a") != trace("b")
