"""A false publisher of a live run, with a generator's key or none: its real engine loads nothing of his."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from xxhash import xxh3_128_hexdigest

from asyncrl.cli.reports.weights import inspect_weights
from asyncrl.cli.run.client import connect
from asyncrl.control.record.rundir import RunDir
from asyncrl.core.errors import DeadlineExceeded, NotAllowed
from asyncrl.core.rpc import Client
from asyncrl.core.runtime.threads import ThreadRuntime
from asyncrl.core.sockets.keys import ClientKeys, make_run_keys, read_client_keys
from asyncrl.core.staleness import PolicyVersion
from asyncrl.models.weight_files import read_shapes
from tests.system.parts.up_run import UpRun, leftovers
from weight_sync.memory.manifest import Bucket, Manifest, TensorSpec, plan
from weight_sync.memory.segments import SHM_DIR

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]
PATIENCE_S = 600.0
SETS = ("launcher.host=127.0.0.1", "launcher.curve=on", "rollout.replicas=1", "eval.every_steps=0")
FALSE = PolicyVersion(10**6, 10**6)
TOKEN = 2**40
SERVICES = ("publisher.0", "weight_sync.0")


@dataclass(frozen=True)
class FalseVersion:
    """Weights of noise in the shapes of the run's model, in a segment, with a manifest that fits them."""

    path: str
    manifest: bytes
    num_bytes: int


@pytest.fixture
def false_version(digit_sort: Path) -> Iterator[FalseVersion]:
    specs = [TensorSpec(name, "float32", tuple(shape)) for name, shape in read_shapes(digit_sort).items()]
    num_bytes = plan(specs, 1 << 30).total_bytes
    noise = np.random.default_rng(0).normal(size=num_bytes // 4).astype(np.float32).tobytes()
    manifest = Manifest(FALSE, plan(specs, num_bytes), (Bucket(num_bytes, xxh3_128_hexdigest(noise)),))
    path = SHM_DIR / f"false-{uuid.uuid4().hex}"
    path.write_bytes(noise)
    yield FalseVersion(str(path), manifest.to_bytes(), num_bytes)
    path.unlink()


def attempts(false: FalseVersion) -> Iterator[tuple[str, str, dict[str, Any], list[bytes]]]:
    """Yield what a publisher, and a learner before it, would say: service, operation, fields, frames."""
    peer = {"name": "publisher", "incarnation": "false", "token": 0}
    meets = {"abilities": ["gloo"], "store_host": "127.0.0.1", "store_port": 9, "started_ms": 2**50, "seq": 1}
    yield "publisher.0", "open", {"token": TOKEN}, []
    yield "publisher.0", "acquire", {"token": TOKEN, "num_bytes": false.num_bytes}, []
    yield "publisher.0", "commit", {"token": TOKEN, "path": false.path}, [false.manifest]
    yield "weight_sync.0", "publisher_hello", peer | meets, [false.manifest]
    yield "weight_sync.0", "orders", peer | {"after": 0}, []
    yield "weight_sync.0", "report", peer | {"event": "published", "fields": {}}, [false.manifest]


def pose(addresses: dict[str, str], keys: ClientKeys | None, false: FalseVersion, refusal: type) -> int:
    """Try everything with these keys; return how often that was refused."""
    count = 0
    for service, op, fields, frames in attempts(false):
        with (
            contextlib.closing(Client(ThreadRuntime(), addresses[service], keys)) as client,
            pytest.raises(refusal),
        ):
            client.call(op, frames, deadline_s=20.0 if refusal is NotAllowed else 1.0, **fields)
        count += 1
    return count


def refused(run: UpRun, kind: str) -> int:
    """Return how many attempts the coordinator and the publisher tell of."""
    client = connect(RunDir(run.folder))
    assert client is not None
    told = client.weights()
    assert told.publisher is not None and told.coordinator is not None
    return sum(one.counters.get(f"wire/refused_{kind}", 0) for one in (told.publisher, told.coordinator))


def test_no_engine_loads_what_a_false_publisher_brings(
    up: Callable[..., UpRun], false_version: FalseVersion
) -> None:
    run = up("posed", *SETS, "learner.steps=100000")
    status = run.wait_for(
        lambda s: s["step"] >= 3 and s["services"]["rollout.0"]["state"] == "READY", PATIENCE_S
    )
    addresses = {name: status["services"][name]["address"] for name in SERVICES}
    generator = read_client_keys(run.folder / "keys.json")
    stranger = replace(make_run_keys().client, server=generator.server)
    num_ops = pose(addresses, generator, false_version, NotAllowed)
    pose(addresses, stranger, false_version, DeadlineExceeded)
    pose(addresses, None, false_version, DeadlineExceeded)
    step = run.status()["step"]
    status = run.wait_for(lambda s: s["step"] >= step + 10, PATIENCE_S)
    assert not [one for one in status["obstacles"] if one["blocks"]]
    assert refused(run, "ops") == num_ops and refused(run, "keys") >= num_ops
    for name in SERVICES:
        log = (run.folder / "logs" / f"{name}.log").read_text()
        assert "with the key of a generator" in log and "its key is none of this start" in log
    assert run.command("down").returncode == 0
    code, output = run.finish()
    assert code == 0, output
    check_engine_kept_to_the_learner(run)


def check_engine_kept_to_the_learner(run: UpRun) -> None:
    """Check that every version is the learner's, and that every step trained."""
    numbers = [one.number for one in inspect_weights(run.folder).rounds]
    assert numbers and max(numbers) < FALSE.number
    rows = run.rows()
    assert [row["training/global_step"] for row in rows] == list(range(1, len(rows) + 1))
    assert max(row["weights/version"] for row in rows if "weights/version" in row) < FALSE.number
    assert run.summary()["ledger_residue"] == 0 and leftovers(run.folder) == []
