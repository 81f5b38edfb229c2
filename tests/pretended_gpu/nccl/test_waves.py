"""Direct transfers between GPUs that are pretended, over a stand-in with the rules of NCCL."""

from __future__ import annotations

import os
import threading

import pytest
import torch

from asyncrl.core.errors import DeadlineExceeded, SyncError
from asyncrl.core.runtime.faults import set_hook
from tests.pretended_gpu.device.tensors import GPU, GpuTensor
from tests.pretended_gpu.nccl.members import NUM_SOURCES, make_gpu_parties, take_on_gpu
from tests.weight_sync.direct.members import WAIT_S, ScriptedSink, make_checkpoint, random_regions
from tests.weight_sync.direct.test_carrier import strike
from weight_sync.backends.contract import DigestMismatch
from weight_sync.direct.party import Superseded
from weight_sync.direct.transports.gloo import GlooGroup
from weight_sync.direct.transports.nccl import ENVIRONMENT, NcclGroup
from weight_sync.direct.waves import WAVE_PACKS


@pytest.mark.parametrize(
    ("seeds", "dtype", "is_tagged"),
    [
        ([4, 4, 5], "bfloat16", False),
        *(
            pytest.param(seeds, dtype, is_tagged, marks=pytest.mark.long)
            for seeds in ([1], [2, 3], [6, 6, 6, 7])
            for dtype, is_tagged in (("float32", False), ("bfloat16", False), ("float32", True))
        ),
    ],
    ids=str,
)
def test_every_sink_gets_what_it_wants_on_its_gpu(meet, nccl, seeds, dtype, is_tagged):
    parties, sinks = make_gpu_parties(seeds, dtype)
    members = meet(parties, is_tagged=is_tagged)
    assert members.run(1) == [None] * len(parties)
    assert len(nccl) == len(parties)
    for sink in sinks:
        assert all(isinstance(data_B, GpuTensor) for data_B in sink.stages[1].data)
        assert sink.has_all(1, make_checkpoint(1, getattr(torch, dtype)))
        assert sink.stages[1].is_whole
    assert len(sinks[0].stages[1].packs) > 2 * WAVE_PACKS
    assert all(carrier.num_steps == len(carrier._steps) for carrier in members.carriers)


@pytest.mark.long
def test_a_second_version_goes_through_the_same_communicator(meet, nccl):
    parties, sinks = make_gpu_parties([4, 4])
    members = meet(parties)
    assert members.run(1) == [None] * 6
    assert all(take_on_gpu(parties[rank], 2, rank) for rank in range(NUM_SOURCES))
    assert members.run(2) == [None] * 6
    assert len(nccl) == 6
    assert all(sink.has_all(number, make_checkpoint(number)) for sink in sinks for number in (1, 2))
    assert not torch.equal(sinks[0].stages[1].data[0].cpu(), sinks[0].stages[2].data[0].cpu())


@pytest.mark.long
def test_the_environment_is_as_before_once_a_group_was_made(meet, monkeypatch):
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3")
    monkeypatch.delenv("TORCH_NCCL_ENABLE_MONITORING", raising=False)
    before = {name: os.environ.get(name) for name in ENVIRONMENT}
    parties, _ = make_gpu_parties([1])
    assert meet(parties).run(1) == [None] * 5
    assert {name: os.environ.get(name) for name in ENVIRONMENT} == before


@pytest.mark.parametrize(
    ("host", "shared", "why"),
    [
        (5, (), "member 5 has its packs in memory of the cpu"),
        (None, (2, 5), "members 2 and 5 share a GPU, and NCCL takes one rank on each"),
    ],
)
def test_members_that_cannot_meet_over_nccl_meet_over_gloo_and_say_why(meet, nccl, caplog, host, shared, why):
    caplog.set_level("INFO")
    parties, sinks = make_gpu_parties([4, 5])
    if host is not None:
        sinks[1] = parties[host] = ScriptedSink(random_regions(5))
    members = meet(parties, shared=shared)
    assert members.run(1) == [None] * 6
    assert not nccl
    assert all(isinstance(carrier._group, GlooGroup) for carrier in members.carriers)
    assert all(sink.has_all(1, make_checkpoint(1)) for sink in sinks)
    assert all(not isinstance(data_B, GpuTensor) for sink in sinks for data_B in sink.stages[1].data)
    assert f"6 members of membership 1 meet over gloo, as {why}" in caplog.text


@pytest.mark.long
def test_a_pack_that_was_changed_where_it_landed_harms_its_sink_alone(meet):
    parties, sinks = make_gpu_parties([1, 8])
    members = meet(parties)

    def change(name: str, place: tuple[int | None, ...]) -> None:
        is_there = threading.current_thread().name == "member-4" and name == "direct.sink.pack"
        if is_there and place == (1, members.carriers[4]._steps[3].index):
            sinks[0].stages[1].data[3][5:6].add_(1)

    set_hook(change)
    ends = members.run(1)
    assert [type(end) for end in ends] == [type(None)] * 4 + [DigestMismatch, type(None)]
    assert (sinks[0].stages[1].is_whole, sinks[1].stages[1].is_whole) == (False, True)
    set_hook(None)
    assert all(take_on_gpu(parties[rank], 2, rank) for rank in range(NUM_SOURCES))
    assert members.run(2) == [None] * 6, "the group is in step"
    assert sinks[0].has_all(2, make_checkpoint(2))


@pytest.mark.long
def test_a_source_whose_pack_changes_after_its_digest_was_taken_is_found_out(meet):
    parties, _ = make_gpu_parties([1])
    members = meet(parties)
    opened, open_store = [], parties[2].open
    parties[2].open = lambda *args: opened.append(open_store(*args)) or opened[-1]

    def change() -> None:
        opened[0]._buffers[1][:1].add_(1)

    strike("direct.source.pack", 1, 2, 1, change)
    assert [type(end) for end in members.run(1)] == [type(None)] * 4 + [DigestMismatch]


@pytest.mark.parametrize("member", [1, pytest.param(4, marks=pytest.mark.long)], ids=["source", "sink"])
def test_an_abort_in_the_middle_ends_every_member_long_before_the_deadline(meet, nccl, member):
    parties, sinks = make_gpu_parties([4, 4, 5])
    members = meet(parties)
    point = "direct.source.pack" if member < NUM_SOURCES else "direct.sink.pack"
    strike(point, 1, member, 5, members.carriers[member].abort)
    ends = members.run(1, deadline_s=10 * WAIT_S)
    assert all(isinstance(end, SyncError) for end in ends), ends
    assert not any(isinstance(end, DeadlineExceeded) for end in ends)
    assert isinstance(members.carriers[member]._group, NcclGroup)
    assert not any(stage.is_whole for sink in sinks for stage in sink.stages.values())
    assert all(not slot.num_readers for source in parties[:NUM_SOURCES] for slot in source._slots)
    await_aborts(nccl, 7)


def await_aborts(nccl, number: int) -> None:
    """Wait until the watchers of all ranks have aborted."""
    for thread in threading.enumerate():
        if thread.name == "direct-watcher":
            thread.join(WAIT_S)
    assert [rank.has_aborted for rank in nccl] == [True] * number


@pytest.mark.long
def test_an_abort_wakes_a_member_that_waits_for_a_wave(meet, nccl):
    parties, _ = make_gpu_parties([4, 4])
    members = meet(parties)
    waits, goes_on = threading.Event(), threading.Event()
    strike("direct.source.pack", 1, 2, 1, lambda: (waits.set(), goes_on.wait(WAIT_S)))
    futures = members.start(1, deadline_s=10 * WAIT_S)
    assert waits.wait(WAIT_S)
    members.carriers[5].abort()
    others = [future.exception(WAIT_S) for rank, future in enumerate(futures) if rank != 2]
    assert all(isinstance(end, SyncError) for end in others), others
    goes_on.set()
    assert isinstance(futures[2].exception(WAIT_S), SyncError)
    await_aborts(nccl, 6)


@pytest.mark.long
@pytest.mark.parametrize(("member", "point"), [(1, "direct.source.pack"), (4, "direct.sink.pack")])
def test_a_member_that_is_gone_ends_the_transfer_at_the_deadline(meet, nccl, member, point):
    """NCCL may see no death of a peer on the same host: it is as one that stands still."""
    parties, sinks = make_gpu_parties([4, 4])
    members = meet(parties)
    goes_on = threading.Event()
    strike(point, 1, member, 1, lambda: goes_on.wait(WAIT_S))
    futures = members.start(1, deadline_s=3.0)
    others = [future.exception(WAIT_S) for rank, future in enumerate(futures) if rank != member]
    assert any(isinstance(end, DeadlineExceeded) for end in others), others
    sources_that_were_done = [end for end in others[: NUM_SOURCES - (member < NUM_SOURCES)] if end is None]
    failed = [end for end in others if end is not None]
    assert all(isinstance(end, DeadlineExceeded | SyncError) for end in failed), others
    assert len(failed) + len(sources_that_were_done) == len(others), "no sink is done"
    assert not any(stage.is_whole for sink in sinks for stage in sink.stages.values())
    goes_on.set()
    assert futures[member].exception(WAIT_S) is not None
    await_aborts(nccl, 6)


def test_who_was_aborted_before_the_group_formed_takes_no_part(meet):
    parties, _ = make_gpu_parties([4, 4])
    members = meet(parties)
    members.carriers[5].abort()
    ends = members.run(1, deadline_s=10 * WAIT_S)
    assert all(isinstance(end, SyncError) for end in ends), ends
    assert not parties[5].stages


@pytest.mark.long
def test_a_version_that_a_source_no_longer_has_ends_the_transfer_once_that_was_told(meet):
    parties, _ = make_gpu_parties([1, 2])
    members = meet(parties)
    assert take_on_gpu(parties[3], 2, 3)
    futures = members.start(1, deadline_s=10 * WAIT_S)
    assert isinstance(futures[3].exception(WAIT_S), Superseded)
    assert not members.carriers[3]._group._is_aborted, "the others would tell of it before"
    members.carriers[3].abort()
    ends = [future.exception(WAIT_S) for future in futures]
    assert all(isinstance(end, SyncError) for end in ends), ends


def test_the_stage_is_where_the_packs_are(meet):
    parties, sinks = make_gpu_parties([1])
    assert sinks[0].device == GPU == parties[0].device
