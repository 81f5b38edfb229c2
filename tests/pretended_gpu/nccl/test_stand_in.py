"""Rules of the stand-in for NCCL, each with a caller that breaks it and is refused."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch

from asyncrl.core.errors import SyncError
from asyncrl.core.files.private import make_secret
from tests.pretended_gpu.device.nccl import NONSENSE, PretendedNccl, RuleBroken, take_gpu
from tests.pretended_gpu.device.tensors import GPU, to_gpu
from tests.weight_sync.direct.members import RUNTIME, TIMEOUT, WAIT_S
from weight_sync.backends.contract import Group
from weight_sync.backends.rendezvous import connect_store, open_store
from weight_sync.backends.sealed import SealedStore
from weight_sync.direct.transports import nccl
from weight_sync.direct.transports.nccl import Message, NcclGroup, make_process_group

pytestmark = pytest.mark.usefixtures("nccl")


def make_ranks(gpus: list[str]) -> list[PretendedNccl]:
    """Return the ranks of a group, one on each of these GPUs, connected."""
    store, secret, kept = open_store("127.0.0.1", 0, TIMEOUT), make_secret(), []

    def make(rank: int) -> PretendedNccl:
        take_gpu(gpus[rank])
        own = SealedStore(connect_store(None, "127.0.0.1", store.port, TIMEOUT), secret, "direct/1")
        kept.append(own)
        made = make_process_group(own, Group(1, rank, len(gpus), "127.0.0.1", store.port))
        made.eager_connect_single_device(GPU)
        return made

    with ThreadPoolExecutor(len(gpus)) as pool:
        return list(pool.map(make, range(len(gpus))))


def bytes_of(*values: int) -> torch.Tensor:
    return to_gpu(torch.tensor(values, dtype=torch.uint8))


def test_the_nth_send_of_a_pair_meets_its_nth_receive_and_bytes_are_read_late():
    first, second = make_ranks(["a", "b"])
    sent, taken = [bytes_of(1), bytes_of(2)], [bytes_of(0), bytes_of(0)]
    work = [first.send([one], 1, tag) for one, tag in zip(sent, (7, 8), strict=True)]
    assert not work[0].is_completed()
    sent[0].fill_(3)
    second.recv([taken[0]], 0, 8)
    assert taken[0].tolist() == [NONSENSE]
    second.recv([taken[1]], 0, 7)
    assert all(one.is_completed() for one in work)
    assert [one.tolist() for one in taken] == [[3], [2]], "no tag is looked at"


def test_a_group_is_done_in_any_order_and_holds_up_what_comes_after_it():
    ranks = make_ranks(["a", "b"])
    lone = ranks[0].send([bytes_of(1)], 1, 0)
    ranks[1].send([bytes_of(2)], 0, 0)
    crossed = ranks[0].recv([bytes_of(0)], 1, 0)
    ranks[1].recv([bytes_of(0)], 0, 0)
    assert not lone.is_completed() and not crossed.is_completed(), "each waits for the other's second call"
    ranks = make_ranks(["a", "b"])
    works = []
    for rank, other in ((0, 1), (1, 0)):
        ranks[rank]._start_coalescing()
        ranks[rank].send([bytes_of(rank)], other, 0)
        ranks[rank].recv([bytes_of(0)], other, 0)
        works.append(ranks[rank]._end_coalescing())
    assert all(work.is_completed() for work in works)


def test_a_wait_ends_nothing_and_waits_for_nothing():
    first, _ = make_ranks(["a", "b"])
    work = first.send([bytes_of(1)], 1, 0)
    assert work.wait(timedelta(microseconds=1))
    assert not work.is_completed()


def test_after_an_abort_what_was_under_way_looks_done_calls_fail_and_nobody_is_told():
    first, second = make_ranks(["a", "b"])
    taken = bytes_of(0)
    works = [first.recv([taken], 1, 0), second.recv([bytes_of(0)], 0, 0)]
    first.abort()
    assert [work.is_completed() for work in works] == [True, False]
    assert taken.tolist() == [NONSENSE]
    with pytest.raises(RuntimeError, match="was aborted"):
        first.send([bytes_of(1)], 1, 0)


def test_a_wave_that_an_abort_ended_does_not_count_as_done():
    store, secret, kept = open_store("127.0.0.1", 0, TIMEOUT), make_secret(), []

    def form(rank: int) -> NcclGroup:
        take_gpu(f"gpu-{rank}")
        kept.append(SealedStore(connect_store(None, "127.0.0.1", store.port, TIMEOUT), secret, "direct/1"))
        made = NcclGroup(RUNTIME, GPU)
        made.form(kept[-1], Group(1, rank, 2, "127.0.0.1", store.port), RUNTIME.now() + WAIT_S)
        return made

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(form, range(2))
    wave = first.start([Message(bytes_of(0), 1, False)], RUNTIME.now() + WAIT_S)
    first.abort()
    second.close()
    for thread in threading.enumerate():
        if thread.name == "direct-watcher":
            thread.join(WAIT_S)
    assert wave._work.is_completed()
    with pytest.raises(SyncError, match="aborted"):
        wave.wait()


def test_a_deadline_that_is_set_while_the_watcher_reads_the_one_before_wakes_it(monkeypatch):
    waits: list[float] = []

    class News(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            if not self.is_set():
                waits.append(timeout or 0.0)
                times.append(1.0)
            return True

    class Scripted:
        def event(self) -> News:
            return News()

        def now(self) -> float:
            if len(times) == 1:
                times.append(0.0)
                group._watch_until(1.0)
            return times[-1]

    times = [0.0]
    group = NcclGroup(Scripted(), GPU)
    monkeypatch.setattr(nccl, "_has_aborted", lambda _store: False)
    (alone,) = make_ranks(["a"])
    store = SealedStore(open_store("127.0.0.1", 0, TIMEOUT), make_secret(), "direct/1")
    group._watch(store, alone)
    assert waits == [nccl.WATCH_S]


def test_two_ranks_on_one_gpu_are_refused():
    with pytest.raises(RuntimeError, match="Duplicate GPU"):
        make_ranks(["a", "a"])


def test_a_tensor_in_host_memory_is_refused():
    with pytest.raises(RuntimeError, match="must be CUDA"):
        make_ranks(["a", "b"])[0].send([torch.zeros(1)], 1, 0)
    with pytest.raises(RuntimeError, match="dense"):
        make_ranks(["a", "b"])[0].send([bytes_of(1, 2, 3)[::2]], 1, 0)


def test_another_number_of_bytes_than_is_sent_is_refused():
    first, second = make_ranks(["a", "b"])
    work = first.send([bytes_of(1, 2)], 1, 0)
    second.recv([bytes_of(0)], 0, 0)
    with pytest.raises(RuleBroken, match="as many bytes"):
        work.is_completed()


def test_a_watchdog_that_would_end_the_process_is_refused(monkeypatch):
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3")
    with pytest.raises(RuleBroken, match="watchdog"):
        PretendedNccl(None, 0, 2, PretendedNccl.Options())
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    with pytest.raises(RuleBroken, match="MONITORING"):
        PretendedNccl(None, 0, 2, PretendedNccl.Options())


def test_a_timeout_of_torch_and_calls_that_block_are_refused(monkeypatch):
    for name in ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_ENABLE_MONITORING"):
        monkeypatch.setenv(name, "0")
    for timeout, blocking in ((timedelta(minutes=10), 0), (timedelta(days=1), 1)):
        options = PretendedNccl.Options()
        options._timeout, options.config.blocking = timeout, blocking
        with pytest.raises(RuleBroken, match="no abort ends"):
            PretendedNccl(None, 0, 2, options)


def test_calls_before_the_communicator_is_there_or_from_another_thread_within_a_group_are_refused():
    first, _ = make_ranks(["a", "b"])
    first._start_coalescing()
    with pytest.raises(RuleBroken, match="within a group"):
        first._start_coalescing()
    broken: list[BaseException] = []

    def call() -> None:
        try:
            first.send([bytes_of(1)], 1, 0)
        except RuleBroken as error:
            broken.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert len(broken) == 1
    with pytest.raises(RuleBroken, match="has no work"):
        first._end_coalescing()
    first._communicator = None
    with pytest.raises(RuleBroken, match="each pair"):
        first.send([bytes_of(1)], 1, 0)
