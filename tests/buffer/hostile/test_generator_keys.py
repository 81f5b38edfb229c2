"""A holder of a generator's key against the services: what he may ask, and what only services may."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from asyncrl.buffer.client import LearnerClient
from asyncrl.core.errors import AsyncrlError, NotAllowed
from asyncrl.core.rpc import Client
from asyncrl.core.runtime.threads import ThreadEvent, ThreadRuntime
from asyncrl.core.sockets.keys import ClientKeys, RunKeys, make_run_keys
from tests.buffer.hostile.hostile_mutations import CALLS
from tests.buffer.hostile.keyed_process import make_buffer, make_coordinator

LEARNERS = {
    *("open", "resume", "register_version", "reserve", "fetch", "prefetch", "trained", "checkpointed"),
    "request_evaluation",
}


@pytest.fixture(scope="module")
def keys() -> RunKeys:
    return make_run_keys()


@contextlib.contextmanager
def serving(kind: str, folder: Path, keys: RunKeys) -> Iterator[str]:
    service = {"buffer": make_buffer, "coordinator": make_coordinator}[kind](folder, keys.server)
    stop = ThreadEvent()
    thread = threading.Thread(target=service.run, args=(stop,))
    thread.start()
    try:
        yield service.status().address
    finally:
        stop.set()
        thread.join(60.0)


def refused_of(address: str, keys: ClientKeys, ops: list[str]) -> set[str]:
    """Return which operations the key does not open; others may fail for what they are asked with."""
    refused = set()
    with contextlib.closing(Client(ThreadRuntime(), address, keys)) as client:
        for op in ops:
            try:
                client.call(op, deadline_s=60.0, **CALLS.get(op, {}))
            except NotAllowed:
                refused.add(op)
            except AsyncrlError:
                pass
    return refused


def test_the_buffer_gives_generators_what_they_work_with_and_nothing_of_a_learner(
    tmp_path: Path, keys: RunKeys
) -> None:
    with serving("buffer", tmp_path, keys) as address:
        assert refused_of(address, keys.of_generator().client, [*CALLS]) == LEARNERS
        assert refused_of(address, keys.client, [*CALLS]) == set()


def test_a_generator_cannot_fence_a_runs_learner(tmp_path: Path, keys: RunKeys) -> None:
    with serving("buffer", tmp_path, keys) as address:
        with contextlib.closing(LearnerClient(address, keys=keys.client)) as learner:
            learner.open("learner.0")
            with (
                contextlib.closing(LearnerClient(address, keys=keys.of_generator().client)) as pretender,
                pytest.raises(NotAllowed, match=r"'open' is not for .* service_keys\.json"),
            ):
                pretender.open("generator")
            assert learner.register_version(0) == 1


def test_the_coordinator_hears_services_alone(tmp_path: Path, keys: RunKeys) -> None:
    ops = ["next_order", "report", "hello", "status"]
    with serving("coordinator", tmp_path, keys) as address:
        assert refused_of(address, keys.of_generator().client, ops) == set(ops)
        assert refused_of(address, keys.client, ops) == set()
