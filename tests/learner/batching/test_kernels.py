"""The written-out elementwise functions against the plain formulas, and what one rank leaves out."""

import importlib
import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
import torch._dynamo
from transformers.activations import ACT2FN

from asyncrl.models.architectures import FAMILIES
from learner.batching.batch import build_batch
from learner.megatron.model import kernels
from learner.megatron.model.kernels import GatedUnit, Rotate
from tests.learner.batching.compiled_kernels import LENGTHS, compare
from tests.learner.parts.samples import make_groups, save_model
from tests.learner.parts.training import open_backend


def draw(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def differentiate(function, x):
    x = x.clone().requires_grad_()
    y = function(x)
    y.backward(torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view(y.shape))
    return y.detach(), x.grad


def by_halves(x, activation):
    gate, up = x.chunk(2, -1)
    return ACT2FN[activation](gate) * up


def by_rotated_halves(x, angles):
    whole = torch.cat((angles, angles), -1)
    first, second = x.chunk(2, -1)
    return x * whole.cos() + torch.cat((-second, first), -1) * whole.sin()


@pytest.mark.parametrize("activation", sorted({family.activation for family in FAMILIES.values()}))
def test_the_gated_unit_is_the_activation_of_one_half_times_the_other(activation):
    x = draw(7, 1, 24)
    found = differentiate(lambda x: GatedUnit.apply(x, activation), x)
    for ours, plain in zip(found, differentiate(lambda x: by_halves(x, activation), x), strict=True):
        torch.testing.assert_close(ours, plain)


@pytest.mark.parametrize("is_contiguous", [True, False])
def test_a_rotation_is_that_of_hugging_face_and_its_gradient_turns_back(is_contiguous):
    x = draw(5, 3, 8) if is_contiguous else draw(5, 3, 20)[..., 4:12]
    angles = draw(5, 1, 4)
    found = differentiate(lambda x: Rotate.apply(x, angles.cos(), angles.sin()), x)
    for ours, plain in zip(found, differentiate(lambda x: by_rotated_halves(x, angles), x), strict=True):
        torch.testing.assert_close(ours, plain)


ROUNDING = {"float32": 1e-6, "bfloat16": 2.0**-7}
"""Largest error beside the eager form, of the largest value: two roundings of the last place."""


def test_a_compiled_kernel_gives_what_the_eager_one_does_and_is_made_once_for_all_lengths(monkeypatch):
    """A length of one position takes a graph of its own, so does a norm of heads beside that of layers."""
    monkeypatch.setattr(kernels, "BACKEND", "eager")
    monkeypatch.setattr(kernels, "OPTIONS", None)
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "0")
    with torch._dynamo.config.patch(disable=False, recompile_limit=8):
        errors, graphs = compare(torch.float32, LENGTHS[:6])
        assert torch._dynamo.config.recompile_limit == kernels.GRAPHS, "of every width, frozen or not"
    assert max(errors.values()) <= ROUNDING["float32"], errors
    assert graphs == {"normalise": 3, "rotate": 2, "gated_unit": 2}
    assert all(getattr(kernels, kernel)._compiled is not None for kernel in graphs)


@pytest.mark.long  # 90 s of a C++ compiler
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on the CPU")
def test_what_inductor_makes_of_the_kernels_rounds_as_they_do():
    command = [sys.executable, "-m", "tests.learner.batching.compiled_kernels"]
    environment = {**os.environ, "TORCHDYNAMO_DISABLE": "0"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    for dtype, (errors, graphs) in found.items():
        assert max(errors.values()) <= ROUNDING[dtype], errors
        assert graphs == {"normalise": 3, "rotate": 2, "gated_unit": 2}


def test_one_rank_sends_neither_gradients_nor_weights_to_itself(tmp_path, monkeypatch):
    backend = open_backend(save_model(tmp_path / "model"))
    batch = build_batch(make_groups(), 0, {1: 0})
    buffers = importlib.import_module("megatron.core.distributed.param_and_grad_buffer")
    monkeypatch.setattr(buffers, "_coalescing_manager", None)  # all its collectives run within one
    before = {name: tensor.clone() for name, tensor in backend.named_tensors()}
    metrics = backend.update(batch, lambda lp, h, part: (lp.sum(), {}))
    assert metrics["actor/grad_norm"] > 0
    assert any(not torch.equal(tensor, before[name]) for name, tensor in backend.named_tensors())
    backend.close()
