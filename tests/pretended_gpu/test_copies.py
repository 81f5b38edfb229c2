"""Copies through pinned buffers on a pretended GPU, whose copies happen as late as a GPU may make them."""

from __future__ import annotations

import pytest
import torch

from learner.checkpoint.snapshot import HostCopies
from tests.pretended_gpu.device import cuda, tensors
from tests.pretended_gpu.device.streams import ReusedTooEarly
from tests.pretended_gpu.device.tensors import GPU, WAITS, to_gpu
from weight_sync.copies.pinned import Copy, PinnedPipeline
from weight_sync.copies.to_gpu import PinnedCopies, pieces

pytestmark = pytest.mark.usefixtures("gpu")
BUFFER_BYTES = 64


def values(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def test_what_the_host_copies_from_is_not_to_be_written_until_the_copy_was_waited_for() -> None:
    pinned = torch.zeros(8).pin_memory()
    copied = torch.zeros(4, device=GPU)
    copied.copy_(pinned[:4], non_blocking=True)
    pinned[4:].fill_(1.0)
    with pytest.raises(ReusedTooEarly, match=r"copy \d+ may still read the \(4,\) here"):
        pinned[:4].fill_(1.0)
    event = torch.cuda.Event()
    event.synchronize()  # it was not recorded: nothing is waited for
    with pytest.raises(ReusedTooEarly):
        pinned.add_(1.0)
    event.record()
    event.synchronize()
    pinned.fill_(1.0)
    assert copied.tolist() == [0.0] * 4


def test_a_stream_sees_what_another_has_copied_once_it_waits_for_that() -> None:
    pinned, copied, event = torch.ones(2).pin_memory(), torch.zeros(2, device=GPU), torch.cuda.Event()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        copied.copy_(pinned, non_blocking=True)
        event.record(stream)
    assert torch.isnan(copied).cpu().all()
    torch.cuda.current_stream().wait_event(event)
    with pytest.raises(ReusedTooEarly):
        pinned.zero_()
    assert copied.tolist() == [1.0, 1.0]
    pinned.zero_()  # who reads a value waits for all that came before it on the stream


def test_copies_to_the_gpu_are_whole_and_each_is_under_way_before_the_one_before_it_is_used() -> None:
    pipeline, wanted = PinnedPipeline(BUFFER_BYTES), values(7, 16)
    found = torch.zeros(7, 16, device=GPU)
    asked: list[int] = []

    def copies():
        for row in range(7):
            asked.append(row)
            yield Copy(wanted[row], found[row], row)

    for _ in range(2):  # the second time buffers are used that the first has left
        asked.clear()
        found.zero_()
        for row in pipeline.run(copies()):
            assert asked[-1] == min(row + 1, 6)
            assert torch.equal(found[row].cpu(), wanted[row])


def test_copies_from_the_gpu_are_whole_when_they_are_named() -> None:
    pipeline, wanted = PinnedPipeline(BUFFER_BYTES), values(7, 16)
    found, source = torch.zeros(7, 32), to_gpu(wanted)
    copies = (Copy(source[row], found[row, ::2], row) for row in range(7))
    for row in pipeline.run(copies):
        assert torch.equal(found[row, ::2], wanted[row])
    back = torch.zeros(16, device=GPU)  # the buffers serve the other way too
    assert list(pipeline.run(Copy(wanted[0, :8], back[:8], index) for index in range(3))) == [0, 1, 2]


@pytest.mark.parametrize("shape", [(), (0, 3), (3,), (50,), (40, 2), (2, 40), (3, 5, 7), (2, 2, 33)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_copy_of_any_shape_and_dtype_is_what_a_plain_one_is(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    source = values(*shape).transpose(0, -1) if shape else values()
    target = torch.zeros(source.shape, dtype=dtype, device=GPU)
    with PinnedCopies(PinnedPipeline(BUFFER_BYTES)) as copies:
        target.copy_(source)
    assert torch.equal(target.cpu(), source.to(dtype))
    parts = list(pieces(source, target, BUFFER_BYTES))
    assert all(part.target.numel() * dtype.itemsize <= BUFFER_BYTES for part in parts)
    assert copies.num_copies == (len(parts) if source.numel() else 0)


def test_what_a_loader_cuts_out_is_all_that_goes_to_the_gpu_and_nothing_waits_for_it() -> None:
    whole, part = values(8, 8), torch.zeros(8, 4, device=GPU)
    pipeline = PinnedPipeline(BUFFER_BYTES)
    sent: list[int] = []
    issue = pipeline._issue
    pipeline._issue = lambda copy: sent.append(copy.target.numel()) or issue(copy)  # type: ignore[method-assign]
    with PinnedCopies(pipeline):
        part.copy_(whole.narrow(1, 4, 4))
        part[:2].fill_(2.0)
        whole.zero_()  # it has been read
    assert sum(sent) == 32
    assert part[:2].tolist() == [[2.0] * 4] * 2
    assert torch.equal(part[2:].cpu(), values(8, 8)[2:, 4:])


def test_a_source_that_is_broadcast_fills_the_target() -> None:
    target = torch.zeros(5, 4, device=GPU)  # more than a buffer: it goes in pieces
    with PinnedCopies(PinnedPipeline(BUFFER_BYTES)):
        target.copy_(torch.arange(4.0))
        target[0].copy_(torch.tensor(7.0))
    assert target.tolist() == [[7.0] * 4, *[[0.0, 1.0, 2.0, 3.0]] * 4]
    assert WAITS.total()


def test_the_copies_for_a_checkpoint_lie_in_one_pinned_buffer_and_are_whole_when_they_are_taken() -> None:
    copies, live = HostCopies(), to_gpu(values(5, 3))
    whole, half = copies.take([live, live[1:3].to(torch.bfloat16)])
    WAITS.clear()
    for _ in range(2):
        copies.take([live, live[1:3].to(torch.bfloat16)])
        assert torch.equal(whole.view(5, 3), live.cpu())
        assert torch.equal(half, live[1:3].to(torch.bfloat16).float().flatten().cpu())
        live.mul_(2.0)
    assert WAITS.total() == 2 + 2 * 2, "once for all copies, and twice for each comparison"
    assert whole.is_pinned() and whole.untyped_storage().nbytes() == 21 * 4
    address = whole.data_ptr()
    del copies
    assert address not in tensors._pinned, "memory is let go of before it is freed"


def test_memory_that_cannot_be_pinned_is_told_and_the_copies_are_right(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cuda.Runtime, "cudaHostRegister", lambda *_: 2)
    let_go: list[int] = []
    monkeypatch.setattr(cuda.Runtime, "cudaHostUnregister", let_go.append)
    launches: list[object] = []

    def launch(*sizes: object, **_: object) -> None:
        launches.append(sizes)
        raise RuntimeError("CUDA error: out of memory")  # as CUDA keeps it for the next kernel

    monkeypatch.setattr(torch, "zeros", launch)
    copies, live = HostCopies(), to_gpu(values(4))
    (copy,) = copies.take([live])
    assert torch.equal(copy, values(4)) and launches == [(1,)], "the error was taken by a kernel of our own"
    del copies, copy
    assert not let_go, "nothing was pinned"
    assert "16 bytes cannot be pinned (2)" in caplog.text
