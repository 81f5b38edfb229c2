"""Deterministic algorithms on a pretended GPU: what has none raises, and no loss needs one."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from asyncrl.core.variants import losses
from learner.algorithms.losses.clipped import keep_second_moment
from learner.batching.batch import build_batch
from learner.megatron.model.kernels import CompiledOnGpu
from tests.learner.parts.samples import make_groups
from tests.learner.parts.training import open_objective
from tests.pretended_gpu.device.tensors import GPU, PretendedGpu, to_gpu


@pytest.fixture
def deterministic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: None)
    torch.use_deterministic_algorithms(True)
    with PretendedGpu():
        yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    "use",
    [
        lambda x: x.cumsum(0),
        lambda x: x.kthvalue(2),
        lambda x: torch.bincount(x.long(), x),
        lambda x: x[:, None] @ x[None],
    ],
)
def test_an_operation_without_a_deterministic_kernel_raises(
    deterministic: None, use: Callable[[torch.Tensor], object]
) -> None:
    x = to_gpu(torch.arange(4.0))
    with pytest.raises(RuntimeError, match="deterministic"):
        use(x)
    x.long().cumsum(0)
    torch.use_deterministic_algorithms(False)
    use(x)


@pytest.mark.parametrize("loss", sorted(losses()))
def test_every_loss_and_its_gradient_are_computed_by_operations_that_repeat(
    deterministic: None, loss: str
) -> None:
    objective = open_objective(loss=loss)
    batch = build_batch(make_groups(2), 2, {1: 0})
    noise_N = torch.randn(batch.num_tokens, generator=torch.Generator().manual_seed(1))
    prox_N = batch.behaviour_N + 0.5 * noise_N if objective.needs_prox else None
    prepared, _ = objective.prepare(batch, prox_N)
    found = []
    for device in (torch.device("cpu"), GPU):
        leaf_N = (batch.behaviour_N + 0.3 * noise_N.flip(0)).to(device).detach().requires_grad_()
        value, _ = objective.loss(leaf_N, leaf_N.square(), prepared.to(device))
        value.backward()
        assert leaf_N.grad is not None and leaf_N.grad.device == device
        found.append((value.detach().cpu(), leaf_N.grad.cpu()))
    assert found[0][1].abs().sum() > 0
    torch.testing.assert_close(found[1], found[0], rtol=0.0, atol=0.0)


def test_the_running_sum_of_m2po_is_the_one_of_the_cpu(deterministic: None) -> None:
    ratio_N = torch.linspace(-2.0, 3.0, 50)
    mask_N = (torch.arange(50) % 3 != 0).float()
    kept_N = keep_second_moment(to_gpu(ratio_N), to_gpu(mask_N), 0.5)
    assert kept_N.device == GPU
    assert torch.equal(kept_N.cpu(), keep_second_moment(ratio_N, mask_N, 0.5)) and 0 < kept_N.sum() < 33


def test_a_kernel_is_compiled_on_a_gpu_alone_and_not_where_results_must_repeat(
    deterministic: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []

    def formula(x: torch.Tensor) -> torch.Tensor:
        ran.append("formula")
        return x + x

    def eager(x: torch.Tensor) -> torch.Tensor:
        ran.append("eager")
        return x * 2

    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    double = CompiledOnGpu(formula, eager)
    for is_deterministic in (True, False):
        torch.use_deterministic_algorithms(is_deterministic)
        for x in (torch.ones(2), to_gpu(torch.ones(2))):
            assert double(x).cpu().tolist() == [2.0, 2.0]
    assert ran == ["eager", "eager", "eager", "formula"]
