"""The pretended GPU itself: it says and refuses what a GPU does, and counts where the host waits."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.pretended_gpu.device import tensors
from tests.pretended_gpu.device.tensors import GPU, WAITS, GpuTensor, MixedDevices, to_gpu

pytestmark = pytest.mark.usefixtures("gpu")


def test_a_tensor_is_on_the_gpu_and_so_is_what_is_made_of_it() -> None:
    x = to_gpu(torch.arange(6.0).view(2, 3))
    assert x.device == GPU and x.is_cuda and x.type() == "torch.cuda.FloatTensor"
    for made in (x + 1, x.T, x[0], torch.zeros_like(x), torch.zeros(2, device=GPU), x.new_ones(2)):
        assert made.device == GPU
    assert x.cpu().device.type == "cpu" and torch.equal(x.cpu(), torch.arange(6.0).view(2, 3))


def test_views_share_their_values() -> None:
    x = to_gpu(torch.zeros(4))
    x[1:3].fill_(2.0)
    torch.add(x, 1.0, out=x)
    assert x.cpu().tolist() == [1.0, 3.0, 3.0, 1.0]


def test_gradients_are_those_of_the_cpu_and_on_the_gpu() -> None:
    x = to_gpu(torch.arange(3.0)).requires_grad_()
    (x * x).sum().backward()
    assert isinstance(x.grad, GpuTensor) and x.grad.cpu().tolist() == [0.0, 2.0, 4.0]


def test_an_operation_on_both_devices_is_refused_and_a_number_is_none() -> None:
    x = to_gpu(torch.ones(3))
    with pytest.raises(MixedDevices, match=r"aten::add .* \[\(3,\)\]"):
        x + torch.ones(3)
    assert (x + torch.tensor(2.0)).device == GPU
    with pytest.raises(MixedDevices):
        torch._foreach_add_([x], [torch.tensor(2.0)])
    with pytest.raises(MixedDevices):
        x.numpy()


@pytest.mark.parametrize(
    ("use", "num_waits"),
    [
        (lambda x: x.sum().item(), 1),
        (lambda x: float(x.sum()), 1),
        (lambda x: x.tolist(), 1),
        (lambda x: bool((x > 0).any()), 1),
        (lambda x: x.cpu(), 1),
        (lambda x: x.sum().cpu(), 1),
        (lambda x: torch.tensor(2.0).to(GPU), 1),
        (lambda x: x[x > 0], 1),
        (lambda x: x[torch.tensor([0])], 1),
        (lambda x: torch.equal(x, x), 1),
        (lambda x: x.nonzero(), 1),
        (lambda x: torch.ones(2).to(GPU), 1),
        (lambda x: torch.ones(2).to(GPU, non_blocking=True), 1),  # from pageable memory
        (lambda x: torch.ones(2).pin_memory().to(GPU, non_blocking=True), 0),
        (lambda x: torch.ones(4).pin_memory()[2:].to(GPU, non_blocking=True), 0),
        (lambda x: x.index_select(0, to_gpu(torch.tensor([0]))), 0),
        (lambda x: torch.where(x > 0, x, 0.0).sum(), 0),
        (lambda x: x.to(torch.float64), 0),
        (lambda x: x.to("cpu", non_blocking=True), 0),  # PyTorch pins what it copies to
    ],
)
def test_the_host_waits_where_it_needs_a_value_or_a_shape(use: object, num_waits: int) -> None:
    assert callable(use)
    use(to_gpu(torch.ones(3)))
    assert WAITS.total() == num_waits


def test_a_copy_to_the_host_that_nobody_waits_for_is_there_once_the_host_has_waited() -> None:
    x = to_gpu(torch.ones(3))
    copy = x.to("cpu", non_blocking=True)
    assert copy.isnan().all()
    x.sum().item()  # of the same stream
    assert copy.tolist() == [1.0] * 3


def test_a_kernel_s_own_reads_let_the_host_wait_for_nothing() -> None:
    x = to_gpu(torch.ones(3))
    with tensors.within_kernel():
        assert float(x.sum()) == 3.0
    assert not WAITS.total()


def test_a_collective_of_nccl_takes_tensors_of_the_gpu_alone_and_gives_them_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tensors, "NCCL", [True])
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        x, parts = to_gpu(torch.ones(3)), to_gpu(torch.zeros(3))
        dist.all_reduce(x)
        dist.all_gather_single(parts, x)
        assert isinstance(parts, GpuTensor) and parts.tolist() == [1.0] * 3
        with pytest.raises(RuntimeError, match=r"device type cpu: c10d::allreduce_ of shapes \[\(2,\)\]"):
            dist.all_reduce(torch.ones(2))
        with pytest.raises(RuntimeError, match="device type cpu"):
            dist.all_gather_single(torch.zeros(3), x)
    finally:
        dist.destroy_process_group()
