"""Learner ranks in processes of their own, over gloo, against one process."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.learner.rank_process import LAYOUTS
from tests.learner.samples import save_model
from tests.learner.training import open_backend, train

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 240.0


def free_ports(count):
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"), "qwen3")


@pytest.fixture(scope="module")
def ranks(model, tmp_path_factory):
    """Train in two processes, all layouts, and return the folder of results."""
    out = tmp_path_factory.mktemp("ranks")
    ports = ",".join(str(port) for port in free_ports(len(LAYOUTS) + 1))
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.learner.rank_process", str(rank), "2", ports, str(model), str(out)],
            cwd=ROOT,
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        for process in processes:
            _, errors = process.communicate(timeout=DEADLINE_S)
            assert process.returncode == 0, errors[-4000:]
    finally:
        for process in processes:
            process.kill()
    return out


@pytest.fixture(scope="module")
def alone(model, tmp_path_factory):
    out = tmp_path_factory.mktemp("alone")
    backend = open_backend(model)
    metrics = train(backend, range(3))
    backend.save_hf(out)
    backend.close()
    return metrics, load_file(out / "model.safetensors")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_ranks_train_as_one_process_does(layout, ranks, alone):
    metrics, weights = alone
    for rank in range(2):
        found = json.loads((ranks / f"{layout}.{rank}.json").read_text())
        assert len(found) == len(metrics) == 6
        for ours, reference in zip(found, metrics, strict=True):
            assert ours == pytest.approx(reference, abs=1e-5)
    exported = load_file(ranks / layout / "model.safetensors")
    assert exported.keys() == weights.keys()
    for name, tensor in exported.items():
        torch.testing.assert_close(tensor, weights[name], rtol=0, atol=1e-4)


def test_training_moves_the_weights_far_beyond_the_tolerance(model, alone):
    start = load_file(model / "model.safetensors")
    moved = max((tensor - start[name]).abs().max().item() for name, tensor in alone[1].items())
    assert moved > 2e-3


def test_a_resume_of_two_ranks_is_bit_exact_and_empty_shares_are_fine(ranks):
    results = [json.loads((ranks / f"resume.{rank}.json").read_text()) for rank in range(2)]
    assert all(result["is_equal"] for result in results)
    assert results[0]["few"] == results[1]["few"]
    assert all(update["actor/skipped_updates"] == 0 for update in results[0]["few"])
    assert results[0]["reduced"] == pytest.approx({"a": 1.75, "a_max": 1.0})
