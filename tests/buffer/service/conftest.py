"""A service and its clients, for the tests that talk to one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from asyncrl.buffer.client import LearnerClient
from asyncrl.buffer.service import BufferService
from asyncrl.core.rpc import Client
from asyncrl.core.runtime.threads import ThreadRuntime
from tests.buffer.parts import make_store, serving


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
    client.call("describe_data", deadline_s=20.0, num_prompts=10, digest="d")
    yield client
    client.close()
