"""A real Redis server for the tests of the buffer."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from asyncrl.buffer.journals.redis.server import RedisServer


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
