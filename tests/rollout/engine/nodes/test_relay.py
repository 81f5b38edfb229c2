"""Relay of a version between the workers of nodes: real gloo groups, in a thread for each worker."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch.distributed import HashStore, ProcessGroupGloo

from asyncrl.core.errors import SyncError
from asyncrl.core.staleness import PolicyVersion
from rollout_service.engine.vllm.nodes import relay
from rollout_service.engine.vllm.nodes.relay import Relay
from tests.rollout.engine.engine_parts import make_model, stage
from weight_sync.memory.manifest import Manifest
from weight_sync.memory.staging import Staged, open_tensors

NUM_NODES, PER_NODE = 3, 2
Outcome = str | dict[str, torch.Tensor]


def run_workers(
    path: str, manifest: Manifest, on_worker: Callable[[int], None] = lambda rank: None
) -> list[Outcome]:
    """Relay a version to the workers of all nodes; return the tensors that each has got, or its error."""
    store, barrier = HashStore(), threading.Barrier(NUM_NODES * PER_NODE, timeout=30.0)
    failed: set[tuple[int, str]] = set()

    def work(rank: int) -> Outcome:
        group = ProcessGroupGloo(store, rank, NUM_NODES * PER_NODE, timedelta(seconds=30))

        @contextmanager
        def together(stage_name: str) -> Iterator[None]:
            error: Exception | None = None
            try:
                yield
            except Exception as caught:  # of any kind, as in a worker
                error = caught
                failed.add((rank, stage_name))
            barrier.wait()
            if error is not None:
                raise error
            if any(stage_name == told for _, told in failed):
                raise SyncError(f"another worker could not {stage_name}")

        on_worker(rank)
        try:
            with Relay(group, PER_NODE, together).carried(path, manifest) as here:
                assert (here == path) == (rank < PER_NODE)
                staged = Staged(manifest.version, here, manifest)
                with together("open the version"):
                    return {name: tensor.clone() for name, tensor in open_tensors(staged)}
        except SyncError as error:
            return str(error)

    with ThreadPoolExecutor(NUM_NODES * PER_NODE) as pool:
        return list(pool.map(work, range(NUM_NODES * PER_NODE)))


def open_memory() -> list[str]:
    """Return this process's anonymous versions."""
    links = (Path("/proc/self/fd") / one for one in os.listdir("/proc/self/fd"))
    return [
        str(link.readlink()) for link in links if link.is_symlink() and "asyncrl-version" in os.readlink(link)
    ]


def test_each_worker_of_each_node_maps_the_bytes_of_the_first() -> None:
    model = make_model(3)
    with stage(model, PolicyVersion(7, 3)) as staged:
        outcomes = run_workers(staged.path, staged.manifest)
    wanted = dict(model.named_parameters())
    for outcome in outcomes:
        assert isinstance(outcome, dict), outcome
        assert outcome.keys() == {entry.name for entry in staged.manifest.tensors}
        assert all(torch.equal(tensor, wanted[name]) for name, tensor in outcome.items())
    assert open_memory() == []


def test_bytes_of_another_digest_reach_no_worker() -> None:
    with stage(make_model(3), PolicyVersion(7, 3)) as staged:
        data = bytearray(Path(staged.path).read_bytes())
        data[-1] ^= 1
        Path(staged.path).write_bytes(data)
        outcomes = run_workers(staged.path, staged.manifest)
    last = len(staged.manifest.buckets) - 1
    wrong = f"bucket {last} of version 7 is not what the learner wrote"
    other = "another worker could not relay the version"
    assert outcomes == [other, other, wrong, other, wrong, other]
    assert open_memory() == []


def test_a_file_that_is_gone_is_sent_to_nobody() -> None:
    with stage(make_model(3), PolicyVersion(7, 3)) as staged:
        outcomes = run_workers(f"{staged.path}-gone", staged.manifest)
    assert outcomes[0] == f"the segment {staged.path}-gone is gone"
    assert outcomes[1:] == ["another worker could not hold the version"] * 5
    assert open_memory() == []


def test_a_node_without_room_refuses_before_anything_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    full = threading.local()
    reserve = os.posix_fallocate

    def reserve_some(descriptor: int, offset: int, num_bytes: int) -> None:
        if getattr(full, "is_full", False):
            raise OSError(28, "No space left on device")
        reserve(descriptor, offset, num_bytes)

    monkeypatch.setattr(relay.os, "posix_fallocate", reserve_some)

    def fill(rank: int) -> None:
        full.is_full = rank == 4

    with stage(make_model(3), PolicyVersion(7, 3)) as staged:
        outcomes = run_workers(staged.path, replace(staged.manifest), fill)
    assert "no room for the" in str(outcomes[4])
    assert outcomes[0] == "another worker could not hold the version"
    assert open_memory() == []
