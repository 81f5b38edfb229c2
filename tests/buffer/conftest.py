"""Fixtures of the buffer's tests: real Redis servers, a service and its clients."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from asyncrl.buffer.client import LearnerClient
from asyncrl.buffer.journals.redis.server import RedisServer
from asyncrl.buffer.service import BufferService
from asyncrl.core.rpc import Client
from asyncrl.core.runtime.threads import ThreadRuntime
from tests.buffer.parts import make_store, serving


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """A server that all tests share; each has its own run in it."""
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    server.ensure()
    yield server
    server.stop()


@pytest.fixture
def own_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """A server of one test, which may kill it and wipe it.

    `always`: under `everysec` a killed server may lose two seconds if the disk is slow (test_slow_disk.py).
    """
    server = RedisServer(tmp_path_factory.mktemp("own-redis"), "always")
    server.ensure()
    yield server
    server.stop()


@pytest.fixture
def service() -> Iterator[BufferService]:
    with serving(make_store()) as running:
        yield running


@pytest.fixture
def learner(service: BufferService) -> Iterator[LearnerClient]:
    """The learner that has opened the run and registered version 1."""
    client = LearnerClient(service.address)
    client.open("learner.0")
    client.register_version(0)
    yield client
    client.close()


@pytest.fixture
def raw(service: BufferService, learner: LearnerClient) -> Iterator[Client]:
    """A client that may say anything."""
    client = Client(ThreadRuntime(), service.address)
    client.call("describe_data", deadline_s=60.0, num_prompts=10, digest="d")
    yield client
    client.close()
