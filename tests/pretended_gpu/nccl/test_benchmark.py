"""The benchmark of direct transfers between GPUs: its logic, over the stand-in for NCCL."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from benchmarks.weight_sync import direct
from tests.pretended_gpu.device.nccl import take_gpu
from tests.pretended_gpu.device.tensors import GPU, PretendedGpu
from tests.weight_sync.direct.members import TIMEOUT, WAIT_S
from weight_sync.backends.rendezvous import open_store


def test_the_versions_that_are_timed_go_over_nccl_and_arrive(nccl, monkeypatch):
    monkeypatch.setattr(direct, "NUM_TURNS", 2)
    store, together = open_store("127.0.0.1", 0, TIMEOUT), threading.Barrier(3)
    order = direct.make_order(store.port, 3)

    def run(rank: int) -> list[float]:
        take_gpu(f"gpu-{rank}")
        with PretendedGpu():
            return direct.carry_versions(order, rank, GPU, 1 << 14, lambda: together.wait(WAIT_S))

    with ThreadPoolExecutor(3) as pool:
        seconds = list(pool.map(run, range(3)))
    assert [len(one) for one in seconds] == [2] * 3
    assert len(nccl) == 3


def test_it_says_that_it_does_not_run_without_two_gpus(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert direct.main([]) == 1
    assert direct.NOT_RUN in capsys.readouterr().err
