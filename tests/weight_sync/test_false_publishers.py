"""False publishers: a generator's key speaks for no service in weight sync, and its weights are refused."""

from __future__ import annotations

import shutil
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from asyncrl.core.config.tree import Config
from asyncrl.core.errors import NotAllowed
from asyncrl.core.rpc import Client
from asyncrl.core.runtime.threads import ThreadRuntime
from asyncrl.core.service import ServiceContext
from asyncrl.core.sockets.keys import RunKeys, make_run_keys
from tests.threads import in_thread
from tests.weight_sync.protocol.test_protocol_peer import WAIT_S
from weight_sync.composition import build_publisher, build_receiver
from weight_sync.control_composition import build_coordinator
from weight_sync.memory.segments import SHM_DIR
from weight_sync.receiving.replica_session import REPLICA_OPS

ORDERS = {
    "weight_sync.0": ("hello", "orders", "report", "status"),
    "publisher.0": ("open", "acquire", "await_room", "commit", "status"),
    "receiver.0": ("offer", "transfer", "commit", "abort", "status"),
}
"""What a false publisher, coordinator or learner would say to each of them."""


@contextmanager
def running(service: Any) -> Iterator[str]:
    with in_thread(service.run):
        yield str(service.status().address)


@pytest.fixture
def keys() -> RunKeys:
    return make_run_keys()


@pytest.fixture
def addresses(tmp_path: Path, keys: RunKeys) -> Iterator[dict[str, str]]:
    """Where the three services of weight sync listen, each with the keys that it has in a run."""
    sections = {"model": {"path": "m"}, "data": {"train": "t"}, "reward": {"fn": "digit_sort"}}
    config = Config.model_validate(sections)
    context = ServiceContext(config, "weight_sync.0", tmp_path, uuid.uuid4().hex[:8], keys=keys)
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, SHM_DIR / context.shm_prefix, ignore_errors=True)
        found = {"weight_sync.0": stack.enter_context(running(build_coordinator(context)))}
        for name, build in (("publisher.0", build_publisher), ("receiver.0", build_receiver)):
            own = replace(context, name=name, addresses=dict(found))
            found[name] = stack.enter_context(running(build(own)))
        yield found


def await_told(client: Client, num_refused: int) -> dict[str, Any]:
    """Return the status of a service once it tells of so many refusals."""
    end = time.monotonic() + WAIT_S
    while True:
        told = client.call("status", deadline_s=WAIT_S).args
        if told["counters"].get("wire/refused_ops") == num_refused:
            return told
        assert time.monotonic() < end, told
        time.sleep(0.05)


def test_a_generators_key_gives_no_orders_to_weight_sync(addresses: dict[str, str], keys: RunKeys) -> None:
    for name, orders in ORDERS.items():
        false = Client(ThreadRuntime(), addresses[name], keys.of_generator().client)
        for op in orders:
            assert op not in REPLICA_OPS
            with pytest.raises(NotAllowed, match="not for the key of a generator"):
                false.call(op, deadline_s=WAIT_S, name="publisher", number=1, token=10**6)
        false.close()
        true = Client(ThreadRuntime(), addresses[name], keys.client)
        told = await_told(true, len(orders))
        assert "address" in told, "the others' key opens it"
        true.close()
