"""Ranks that publish together, and a replica that says what has arrived, tensor by tensor."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors.torch import load_file

from asyncrl.rpc import Client
from asyncrl.versions import PolicyVersion
from learner.backend import Placement
from tests.learner.parts.training import open_backend, train
from tests.weight_sync.cluster import Cluster, running_cluster
from weight_sync.handoff import Handoff
from weight_sync.memory.manifest import Manifest
from weight_sync.memory.staging import Staged, open_tensors

BUCKET_BYTES = 100_000
"""Of which the models' larger tensors fill more than one."""
WAIT_S = 60.0

Table = list[list[Any]]
"""Name, dtype, shape and digest of each tensor, in order."""


def describe(name: str, tensor: torch.Tensor) -> list[Any]:
    data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data
    return [name, str(tensor.dtype), list(tensor.shape), xxhash.xxh3_128(data).hexdigest()]


class Arrivals:
    """Does as a replica does, and describes what it gets."""

    def __init__(self, receiver_address: str) -> None:
        self._client = Client(receiver_address)
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
    """Publish the loaded weights, and those after an update; say what arrived, and what should have."""
    backend = open_backend(Path(job["model"]), placement, **job["changes"])
    cluster, arrived, saved = job["cluster"], [], []
    leads = placement.rank == 0
    if leads:
        prefix, token = cluster["shm_prefix"], job["number"]
        handoff = Handoff(cluster["publisher"], prefix, BUCKET_BYTES, token=token)
        arrivals = Arrivals(cluster["receiver"])
    for number in (10 * job["number"], 10 * job["number"] + 1):
        tensors = backend.named_tensors()
        if leads:
            assert handoff.publish(PolicyVersion(number, number), tensors)
            arrived.append(arrivals.next(number))
        else:
            for _ in tensors:
                pass
        backend.save_hf(out / job["name"])
        if leads:
            weights = load_file(out / job["name"] / "model.safetensors")
            saved.append([describe(name, tensor) for name, tensor in weights.items()])
        if not number % 10:
            train(backend, range(1))
    backend.close()
    if leads:
        handoff.close()
        arrivals.close()
    return {"arrived": arrived, "saved": saved}


@contextmanager
def publishing_cluster() -> Iterator[Cluster]:
    """A publisher with one receiver, for jobs that publish one after another."""
    with running_cluster() as cluster:
        cluster.start("receiver.0")
        yield cluster


def publish_job(cluster: Cluster, name: str, number: int, model: Path, **changes: Any) -> dict[str, Any]:
    """Return a job for `run_publish`; `number` rises from job to job in the order in which they run."""
    addresses = {kind: cluster.children[f"{kind}.0"].address for kind in ("publisher", "receiver")}
    places = {"shm_prefix": cluster.shm_prefix, **addresses}
    return {"name": name, "kind": "publish", "number": number, "model": model, "cluster": places} | {
        "changes": changes
    }


def assert_published_alike(out: Path, alone: dict[str, Any], folder: Path) -> None:
    """Ranks publish, name by name and bit by bit, what one process does before it has trained.

    After that they publish what they save, which is not what they started with.
    """
    found = json.loads((out / f"{alone['name']}.0.json").read_text())
    wanted = run_publish(Placement(), alone, folder)
    assert found["arrived"][0] == json.loads(json.dumps(wanted["arrived"][0]))
    for (tensors, _), saved in zip(found["arrived"], found["saved"], strict=True):
        assert sorted(tensors) == sorted(saved)
    before, after = (digests for _, digests in found["arrived"])
    assert not set(before) & set(after), "every bucket changes with an update"
