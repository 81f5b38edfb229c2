"""The buffer is started again at its address: what it had not answered is asked again, and nothing is held
for those who died or never heard of it.
"""

from __future__ import annotations

import contextlib
import math
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from asyncrl.buffer.client import LearnerClient
from asyncrl.buffer.service import BufferService
from asyncrl.core.errors import ConnectionLost, DeadlineExceeded
from asyncrl.core.experience import encode_group
from asyncrl.core.rpc import Client, Request, Server
from asyncrl.core.rpc.message import Done
from asyncrl.core.runtime.threads import ThreadEvent, ThreadRuntime
from asyncrl.core.service_command import Bound, DeregisterReplica, Tighten
from tests.buffer.parts import make_group, make_store
from tests.threads import in_thread

WAIT_S = 20.0


class Deaf:
    """A buffer that takes requests in and dies before it answers."""

    def __init__(self) -> None:
        self.has_heard = ThreadEvent()

    def handle(self, request: Request) -> None:
        self.has_heard.set()

    def wake_at(self) -> float:
        return math.inf

    def tick(self, now: float) -> None:
        pass


class Address:
    """One address, at which one buffer after the other listens; all of them have the same journal."""

    def __init__(self, folder: Path) -> None:
        self.name = f"ipc://{folder}/buffer.0"
        self._journal = folder / "journal"

    @contextlib.contextmanager
    def serving(self) -> Iterator[BufferService]:
        service = BufferService(make_store(self._journal), ThreadRuntime(), self.name)
        with in_thread(service.run):
            yield service
        self._wait_until_gone()

    def _wait_until_gone(self) -> None:
        """A socket closes in libzmq's own time: who connects meanwhile would lose that connection."""
        path, end = self.name.removeprefix("ipc://"), time.monotonic() + WAIT_S
        with contextlib.suppress(OSError):
            while time.monotonic() < end:
                with contextlib.closing(socket.socket(socket.AF_UNIX)) as probe:
                    probe.connect(path)
                time.sleep(0.01)

    def lose(self, call: Callable[[], Any]) -> Any:
        """Let a buffer die that has heard `call`; return what its successor answers."""
        deaf, results = Deaf(), []
        server = Server(ThreadRuntime(), self.name)
        thread = threading.Thread(target=lambda: results.append(call()), daemon=True)
        with in_thread(lambda stop: server.serve(deaf, stop)):
            thread.start()
            assert deaf.has_heard.wait(WAIT_S)
        with self.serving():
            thread.join(WAIT_S)
        assert results, "the call did not end"
        return results[0]


@pytest.fixture
def address(tmp_path: Path) -> Address:
    return Address(tmp_path)


@pytest.fixture
def learner(address: Address) -> Iterator[LearnerClient]:
    """A learner that has registered version 1."""
    with contextlib.closing(LearnerClient(address.name, deadline_s=WAIT_S)) as client:
        with address.serving(), contextlib.closing(Client(ThreadRuntime(), address.name)) as raw:
            raw.call("describe_data", num_prompts=10, digest="d")
            client.open("learner.0")
            client.register_version(0)
        yield client


def lease(raw: Client, want: int, replica: str = "a", **args: Any) -> list[tuple[int, int]]:
    wanted: dict[str, Any] = {"replica": replica, "version": 1, "want": want, "wait_s": 0.0, **args}
    grants = raw.call("lease", **wanted).args["grants"]
    return [(grant["ticket"], grant["attempt"]) for grant in grants]


@pytest.fixture
def raw(address: Address, learner: LearnerClient) -> Iterator[Client]:
    with contextlib.closing(Client(ThreadRuntime(), address.name)) as client:
        yield client


@pytest.fixture
def batch(address: Address, raw: Client) -> list[int]:
    """The tickets of the first batch, complete."""
    with address.serving():
        granted = lease(raw, 2)
        for ticket, attempt in granted:
            frames = encode_group(make_group(ticket, attempt))
            raw.call("push", frames, replica="a", ticket=ticket, attempt=attempt)
    return [ticket for ticket, _ in granted]


def test_what_a_learner_asked_of_a_buffer_that_died_is_answered_by_its_successor(
    address: Address, learner: LearnerClient, batch: list[int]
) -> None:
    with address.serving():
        assert learner.reserve(0, WAIT_S) is not None
    groups = address.lose(lambda: learner.fetch(batch))
    assert [group.ticket for group in groups] == batch
    address.lose(lambda: learner.trained(0))
    assert address.lose(lambda: learner.register_version(1)) == 2
    address.lose(lambda: learner.checkpointed(1, "digest", [1]))
    assert learner.num_repeated == 4
    with address.serving():
        status = learner.status()
        assert (status.steps_trained, status.checkpoints, status.residue) == (1, (1,), 0)


def test_the_reservation_and_the_fencing_token_outlive_the_buffer(
    address: Address, learner: LearnerClient, batch: list[int]
) -> None:
    for _ in range(2):
        with address.serving():
            found = learner.reserve(0, WAIT_S)
            assert found is not None and [row.ticket for row in found.tickets] == batch
            assert learner.status().token == learner.token


def test_a_long_poll_is_not_asked_again_unheard(address: Address, learner: LearnerClient) -> None:
    def reserve() -> str:
        try:
            learner.reserve(0, WAIT_S)
        except DeadlineExceeded as error:
            return type(error).__name__
        return "answered"

    assert address.lose(reserve) == "ConnectionLost"


def test_a_call_whose_connection_breaks_when_its_time_is_over_is_not_made_again(
    address: Address, learner: LearnerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(learner, "_deadline_s", 0.0)

    def lose(left_s: float) -> None:
        raise ConnectionLost("the connection broke")

    with pytest.raises(ConnectionLost):
        learner._repeat(lose)
    assert learner.num_repeated == 0


def test_a_prefetch_without_a_buffer_is_no_failure(
    address: Address, learner: LearnerClient, batch: list[int]
) -> None:
    learner.prefetch(2)
    with address.serving():
        assert learner.reserve(0, WAIT_S) is not None
        assert len(learner.fetch(batch)) == 2


def test_grants_whose_answer_was_lost_go_to_who_asks_next(address: Address, raw: Client) -> None:
    with address.serving() as service:
        assert lease(raw, 2) == [(1, 1), (2, 1)]
        assert lease(raw, 1, held=[[2, 1]]) == [(1, 2)], "it never heard of the first"
        assert lease(raw, 1, held=[[2, 1], [1, 1]]) == [(1, 3)], "an earlier attempt is not this one"
        service._handler.refresh_status()
        assert service.status().counters["grants_lost"] == 2
        assert service.status().leases == {"a": 2}


def test_a_bound_that_is_tightened_holds_for_those_who_lease(
    address: Address, raw: Client, learner: LearnerClient
) -> None:
    with address.serving() as service:
        assert service.command(Tighten(0)) == Bound(0)
        assert len(lease(raw, 100)) == 2, "those of one step"


def test_what_a_dead_replica_held_is_issued_again_when_the_buffer_is_told(
    address: Address, raw: Client, learner: LearnerClient
) -> None:
    with address.serving() as service:
        assert lease(raw, 2, "dead") == [(1, 1), (2, 1)]
        assert service.command(DeregisterReplica("dead")) == Done()
        while learner.status().leases:
            pass
        assert lease(raw, 2, "other") == [(1, 2), (2, 2)]
        assert learner.status().reissues == {"deregistered": 2}, "before their leases expired"


def test_what_a_dead_replica_waits_for_is_granted_to_another(
    address: Address, raw: Client, learner: LearnerClient
) -> None:
    with address.serving() as service, contextlib.closing(Client(ThreadRuntime(), address.name)) as dead:
        all_that_may_be_open = lease(raw, 100, "other")
        wanted = {"replica": "dead", "version": 1, "want": 2, "wait_s": WAIT_S}
        parked = dead.begin("lease", deadline_s=2 * WAIT_S, **wanted)
        while learner.status().parked == 0:
            pass
        service.command(DeregisterReplica("dead"))
        assert parked.end().args["grants"] == []
        raw.call("release", replica="other", tickets=[list(pair) for pair in all_that_may_be_open])
        assert lease(raw, 2, "third") == [(1, 2), (2, 2)]
