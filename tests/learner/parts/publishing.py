"""Ranks that publish together, and a replica that says what has arrived, tensor by tensor."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors.torch import load_file

from asyncrl.core.rpc import Client
from asyncrl.core.runtime import faults
from asyncrl.core.runtime.threads import ThreadRuntime
from asyncrl.core.staleness import PolicyVersion
from learner.backend import Placement
from learner.fsdp2.backend import Fsdp2Backend
from learner.megatron.backend import MegatronBackend
from learner.ranks import Ranks
from tests.learner.parts.training import open_backend, train
from tests.weight_sync.cluster import Cluster, running_cluster
from weight_sync.memory.manifest import Manifest
from weight_sync.memory.parts import Part
from weight_sync.memory.sharded_publish import TogetherWriter, Written
from weight_sync.memory.staging import Staged, open_tensors
from weight_sync.publisher_client import PublisherClient, publish_sharded

BUCKET_BYTES = 100_000
"""Of which the models' larger tensors fill more than one."""
WAIT_S = 60.0
NUM_VERSIONS = 3

Table = list[list[Any]]
"""Name, dtype, shape and digest of each tensor, in order."""


def describe(name: str, tensor: torch.Tensor) -> list[Any]:
    data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data
    return [name, str(tensor.dtype), list(tensor.shape), xxhash.xxh3_128(data).hexdigest()]


class Arrivals:
    """Does as a replica does, and describes what it gets."""

    def __init__(self, receiver_address: str) -> None:
        self._client = Client(ThreadRuntime(), receiver_address)
        self._serving = 0

    def next(self, number: int) -> tuple[Table, list[str]]:
        """Return the tensors of version `number`, and the digests of its buckets.

        A replica that has just started may be given the version before it first.
        """
        while True:
            table, digests = self._load()
            if self._serving >= number:
                assert self._serving == number
                return table, digests

    def _load(self) -> tuple[Table, list[str]]:
        reply = self._client.call("next_staged", deadline_s=WAIT_S + 5, serving=self._serving, wait_s=WAIT_S)
        assert reply.args["path"], f"after version {self._serving} nothing arrived"
        manifest = Manifest.from_bytes(bytes(reply.frames[0]))
        staged = Staged(manifest.version, reply.args["path"], manifest)
        table = [describe(name, tensor) for name, tensor in open_tensors(staged)]
        self._serving = manifest.version.number
        self._client.call("loaded", deadline_s=WAIT_S, number=self._serving, ok=True, error="")
        return table, [bucket.digest for bucket in manifest.buckets]

    def close(self) -> None:
        self._client.close()


def run_publish(placement: Placement, job: dict[str, Any], out: Path) -> dict[str, Any]:
    """Publish the loaded weights twice, and those after an update; say what arrived, and what should have.

    The first version is gathered; the next ones every rank writes by itself, unless the job says that a
    rank is elsewhere.
    """
    make = Fsdp2Backend if job["changes"].get("backend") == "fsdp2" else MegatronBackend
    backend = open_backend(Path(job["model"]), placement, make=make, **job["changes"])
    cluster, arrived, saved, were_direct = job["cluster"], [], [], []
    leads = placement.rank == 0
    ranks = Ranks(placement.rank, placement.world_size, torch.device("cpu"))
    together, publisher_client = WatchedWriter(ranks), None
    if leads:
        publisher_client = PublisherClient(
            ThreadRuntime(), cluster["publisher"], cluster["shm_prefix"], BUCKET_BYTES, token=job["number"]
        )
        arrivals = Arrivals(cluster["receiver"])
    if placement.rank == job.get("dies"):
        os.environ[faults.VARIABLE] = "together.written"
    for number in range(10 * job["number"], 10 * job["number"] + NUM_VERSIONS):
        if publisher_client is not None:
            assert publisher_client.has_room()
        path = ranks.share_bytes(publisher_client.shared_path.encode() if publisher_client else None).decode()
        if placement.rank in job.get("elsewhere", ()):
            path = path and "/dev/shm/asyncrl-another-host"
        version = PolicyVersion(number, number)
        together.num_writes = 0
        assert publish_sharded(publisher_client, together, path, version, backend)
        were_direct.append(together.num_writes == 1)
        if leads:
            arrived.append(arrivals.next(number))
        if "lora" in job["changes"]:  # what is saved are whole weights
            saved.append([describe(name, tensor) for name, tensor in backend.named_tensors()])
        else:
            backend.save_hf(out / job["name"])
        if leads and "lora" not in job["changes"]:
            weights = load_file(out / job["name"] / "model.safetensors")
            saved.append([describe(name, tensor) for name, tensor in weights.items()])
        if number % 10 == 1:
            train(backend, range(1))
    backend.close()
    if publisher_client is not None:
        publisher_client.close()
        arrivals.close()
    return {"arrived": arrived, "saved": saved, "were_direct": were_direct}


class WatchedWriter(TogetherWriter):
    """Counts how often the ranks have written together."""

    num_writes = 0

    def write(self, path: str, parts: tuple[Part, ...]) -> Written | None:
        self.num_writes += 1
        return super().write(path, parts)


@contextmanager
def publishing_cluster() -> Iterator[Cluster]:
    """A publisher with one receiver, for jobs that publish one after another."""
    with running_cluster() as cluster:
        cluster.start("receiver.0")
        yield cluster


def publish_job(
    cluster: Cluster, name: str, number: int, model: Path, elsewhere: Sequence[int] = (), **changes: Any
) -> dict[str, Any]:
    """Return a job for `run_publish`; `number` rises from job to job in the order in which they run.

    The ranks `elsewhere` cannot map the publisher's segments.
    """
    addresses = {kind: cluster.children[f"{kind}.0"].address for kind in ("publisher", "receiver")}
    places = {"shm_prefix": cluster.shm_prefix, **addresses}
    job = {"name": name, "kind": "publish", "number": number, "model": model, "cluster": places}
    return job | {"elsewhere": list(elsewhere), "changes": changes}


def assert_published_alike(
    out: Path, alone: dict[str, Any], folder: Path, were_direct: Sequence[bool] = (False, True, True)
) -> None:
    """Ranks publish, name by name and bit by bit, what one process does before it has trained.

    The same weights, gathered first and written by each rank then, are the same bytes in the same
    buckets. After an update the ranks publish what they save, which is not what they started with.
    """
    found = json.loads((out / f"{alone['name']}.0.json").read_text())
    wanted = run_publish(Placement(), alone, folder)
    assert found["were_direct"] == list(were_direct)
    assert wanted["were_direct"] == [False, True, True]
    assert found["arrived"][0] == found["arrived"][1]
    for given in found["arrived"][:2]:
        assert given == json.loads(json.dumps(wanted["arrived"][0]))
    for (tensors, _), saved in zip(found["arrived"], found["saved"], strict=True):
        assert sorted(tensors) == sorted(saved)
    _, before, after = (digests for _, digests in found["arrived"])
    assert not set(before) & set(after), "every bucket changes with an update"
