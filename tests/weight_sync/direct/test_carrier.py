"""Direct transfers between learner ranks and sinks of any regions: what arrives, and how a transfer ends."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
import torch
import xxhash
from msgspec.structs import replace

from asyncrl.core.errors import DeadlineExceeded, SyncError
from asyncrl.core.files.private import make_secret
from asyncrl.core.runtime.faults import set_hook
from tests.weight_sync.direct.members import (
    FIRST_ROUND,
    MAX_BYTES,
    RUNTIME,
    WAIT_S,
    Members,
    ScriptedSink,
    make_checkpoint,
    make_source,
    random_regions,
    take,
)
from weight_sync.backends.contract import DigestMismatch
from weight_sync.backends.sealed import SealedStore
from weight_sync.direct import carrier as carrier_module
from weight_sync.direct.carrier import Carrier, _tell
from weight_sync.direct.orders import SeatOrder
from weight_sync.direct.party import UNDER_WAY, Party, Superseded
from weight_sync.direct.transports.seals import Seals
from weight_sync.direct.waves import make_steps
from weight_sync.rectangles.packs import Pack
from weight_sync.rectangles.parcels import NobodyHolds, Parcel
from weight_sync.rectangles.rectangle import Rectangle


@pytest.fixture
def meet() -> Iterator[Callable[..., Members]]:
    met: list[Members] = []

    def make(*args: object, **kwargs: object) -> Members:
        met.append(Members(*args, **kwargs))
        return met[-1]

    yield make
    set_hook(None)
    for members in met:
        members.close()


def make_parties(seeds: list[int], dtype: str = "float32"):
    sinks = [ScriptedSink(random_regions(seed)) for seed in seeds]
    return [*(make_source(rank, dtype) for rank in range(4)), *sinks], sinks


def take_all(parties: list[Party], number: int) -> None:
    assert all(take(parties[rank], number, rank) for rank in range(4))


@pytest.mark.parametrize("seeds", [[1], [2, 3], [4, 4, 5], [6, 6, 6, 7]], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("is_tagged", [False, True])
def test_every_sink_gets_what_it_wants_right_to_the_bit(meet, seeds, dtype, is_tagged):
    parties, sinks = make_parties(seeds, dtype=dtype)
    members = meet(parties, 4, is_tagged=is_tagged)
    assert members.run(1) == [None] * len(parties)
    for sink in sinks:
        assert sink.has_all(1, make_checkpoint(1, getattr(torch, dtype)))
        assert sink.stages[1].is_whole
    assert len(sinks[0].stages[1].packs) > 2 * UNDER_WAY


@pytest.mark.parametrize("window", [1, 2])
def test_no_window_is_too_small_for_chains_through_all_members(meet, monkeypatch, window):
    monkeypatch.setattr(carrier_module, "UNDER_WAY", window)
    parties, sinks = make_parties([4, 4, 5, 6])
    members = meet(parties, 4)
    assert members.run(1) == [None] * 8
    assert all(sink.has_all(1, make_checkpoint(1)) for sink in sinks)


def test_a_second_version_reuses_the_group_and_the_plan_of_the_first(meet):
    parties, sinks = make_parties([4, 4])
    members = meet(parties, 4)
    assert members.run(1) == [None] * 6
    formed = [(carrier._group._process_group, carrier._steps) for carrier in members.carriers]
    take_all(parties, 2)
    assert members.run(2) == [None] * 6
    assert not torch.equal(sinks[0].stages[1].data[0], sinks[0].stages[2].data[0])
    assert all(sink.has_all(number, make_checkpoint(number)) for sink in sinks for number in (1, 2))
    for carrier, (group, steps) in zip(members.carriers, formed, strict=True):
        assert carrier._group._process_group is group
        assert carrier._steps is steps


def test_who_has_no_part_in_any_pack_is_in_step_with_the_others_in_each_version(meet):
    parties, sinks = make_parties([4])
    members = meet([*parties, ScriptedSink([])], 4)
    for number in (1, 2):
        take_all(parties, number)
        assert members.run(number, deadline_s=5.0) == [None] * 6
        assert sinks[0].has_all(number, make_checkpoint(number))
    assert members.carriers[5]._steps == []


def test_a_chain_begins_at_each_of_its_sinks_in_turn_and_sources_take_turns():
    packs = [pack_of(source, (0, 1, 2), row) for source in (0, 1) for row in range(6)]
    of_sources = [make_steps(packs, 2, rank) for rank in (0, 1)]
    assert [[step.index for step in steps] for steps in of_sources] == [
        [*range(0, 12, 2)],
        [*range(1, 12, 2)],
    ]
    of_sinks = [make_steps(packs, 2, rank) for rank in (2, 3, 4)]
    heads = [[step.index for step in steps if step.source in (0, 1)] for steps in of_sinks]
    assert heads == [[0, 3, 6, 9], [1, 4, 7, 10], [2, 5, 8, 11]]
    for steps in zip(*of_sinks, strict=True):
        assert sorted(step.target or 0 for step in steps) == sorted({0, 2, 3, 4} - {2 + steps[0].index % 3})


def pack_of(source: int, sinks: tuple[int, ...], row: int) -> Pack:
    parcel = Parcel("w", Rectangle((row, 0), (row + 1, 4)), 16, source, sinks)
    return Pack(source, sinks, (parcel,), (0,), 16)


def strike(point: str, number: int, member: int, nth: int, act: Callable[[], None]) -> None:
    """Have `act` called when a member is at its `nth` pack of a version."""
    seen = [0]

    def hook(name: str, place: tuple[int | None, ...]) -> None:
        if name == point and place[0] == number and threading.current_thread().name == f"member-{member}":
            seen[0] += 1
            if seen[0] == nth + 1:
                act()

    set_hook(hook)


def test_a_pack_that_was_changed_on_its_way_harms_its_sink_alone(meet):
    parties, sinks = make_parties([1, 8])
    members = meet(parties, 4)

    def change() -> None:
        sinks[0].stages[1].data[3][5] += 1

    strike("direct.sink.pack", 1, 4, 3, change)
    ends = members.run(1)
    assert [type(end) for end in ends[4:]] == [DigestMismatch, type(None)]
    assert "1 of " in str(ends[4])
    assert ends[:4] == [None] * 4
    assert (sinks[0].stages[1].is_whole, sinks[1].stages[1].is_whole) == (False, True)
    assert sinks[1].has_all(1, make_checkpoint(1))
    set_hook(None)
    take_all(parties, 2)
    assert members.run(2) == [None] * 6, "the group is in step"
    assert sinks[0].has_all(2, make_checkpoint(2))


@pytest.mark.parametrize("is_tagged", [False, True])
def test_what_a_sink_sends_on_is_verified_again_behind_it(meet, is_tagged):
    parties, sinks = make_parties([4, 4])
    members = meet(parties, 4, is_tagged=is_tagged)

    def change() -> None:
        sinks[0].stages[1].data[2][5] += 1

    strike("direct.sink.pack", 1, 4, 2, change)
    assert [type(end) for end in members.run(1)] == [type(None)] * 4 + [DigestMismatch] * 2
    assert members.carriers[4]._steps[2].target == 5
    assert not sinks[1].stages[1].is_whole


def test_a_source_whose_pack_changes_after_its_digest_was_taken_is_found_out(meet):
    parties, _ = make_parties([1])
    members = meet(parties, 4)

    def change() -> None:
        for values in parties[2]._slots[0].holders.values():
            values += 1

    strike("direct.source.pack", 1, 2, 1, change)
    assert [type(end) for end in members.run(1)] == [type(None)] * 4 + [DigestMismatch]


def test_a_pack_of_an_earlier_round_is_not_taken_for_one_of_this(meet):
    """Each trailer is of its round: what was sent before, with its own digest or tag, fits no more."""
    for is_tagged in (False, True):
        order = SeatOrder(round=FIRST_ROUND, membership=1, secret="00" * 16, is_tagged=is_tagged)
        data_B = torch.arange(100, dtype=torch.uint8)
        trailer_B = Seals(order).make(7, data_B)
        assert Seals(order).fits(7, data_B, trailer_B)
        assert not Seals(order).fits(8, data_B, trailer_B)
        assert not Seals(replace(order, round=FIRST_ROUND + 1)).fits(7, data_B, trailer_B)


def note_closes(members: Members, sinks: list[ScriptedSink]) -> list[bool]:
    """Return a list that gets, for each stage that closes, whether the connections were closed before."""
    closed: list[bool] = []
    for carrier, sink in zip(members.carriers[4:], sinks, strict=True):
        group = carrier._group
        sink.on_close = lambda group=group: closed.append(group._is_aborted)
    return closed


@pytest.mark.parametrize("member", [1, 4], ids=["source", "sink"])
def test_an_abort_in_the_middle_ends_every_member_long_before_the_deadline(meet, member):
    parties, sinks = make_parties([4, 4, 5])
    members = meet(parties, 4)
    point = "direct.source.pack" if member < 4 else "direct.sink.pack"
    closed = note_closes(members, sinks)
    strike(point, 1, member, 5, members.carriers[member].abort)
    ends = members.run(1, deadline_s=10 * WAIT_S)
    assert all(isinstance(end, SyncError) for end in ends), ends
    assert not any(isinstance(end, DeadlineExceeded) for end in ends)
    assert not any(stage.is_whole for sink in sinks for stage in sink.stages.values())
    assert closed == [True] * 3, "nothing arrives any more when a stage is dropped"
    assert all(len(source._slots) == 1 and not source._slots[0].num_readers for source in parties[:4])


def test_an_abort_wakes_a_member_that_waits_for_packs(meet):
    parties, _ = make_parties([4, 4])
    members = meet(parties, 4)
    waits, goes_on = threading.Event(), threading.Event()

    def hold() -> None:
        waits.set()
        goes_on.wait(WAIT_S)

    strike("direct.source.pack", 1, 2, 1, hold)
    futures = members.start(1, deadline_s=10 * WAIT_S)
    assert waits.wait(WAIT_S)
    members.carriers[5].abort()
    others = [future.exception(WAIT_S) for rank, future in enumerate(futures) if rank != 2]
    assert all(isinstance(end, SyncError) for end in others), others
    goes_on.set()
    assert isinstance(futures[2].exception(WAIT_S), SyncError)


def test_who_was_aborted_before_the_group_formed_takes_no_part(meet):
    parties, _ = make_parties([4, 4])
    members = meet(parties, 4)
    members.carriers[5].abort()
    ends = members.run(1, deadline_s=10 * WAIT_S)
    assert all(isinstance(end, SyncError) for end in ends), ends
    assert not parties[5].stages


def test_a_transfer_that_is_not_done_by_its_deadline_ends_there(meet):
    parties, _ = make_parties([4, 4])
    members = meet(parties, 4)
    goes_on = threading.Event()
    strike("direct.source.pack", 1, 2, 1, lambda: goes_on.wait(WAIT_S))
    futures = members.start(1, deadline_s=3.0)
    others = [future.exception(WAIT_S) for rank, future in enumerate(futures) if rank != 2]
    assert any(isinstance(end, DeadlineExceeded) for end in others), others
    assert all(isinstance(end, DeadlineExceeded | SyncError) for end in others), others
    goes_on.set()
    assert futures[2].exception(WAIT_S) is not None


def test_a_version_that_a_source_no_longer_has_ends_the_transfer_once_that_was_told(meet):
    parties, _ = make_parties([1, 2])
    members = meet(parties, 4)
    assert take(parties[3], 2, 3)
    futures = members.start(1, deadline_s=10 * WAIT_S)
    assert isinstance(futures[3].exception(WAIT_S), Superseded)
    assert not members.carriers[3]._group._is_aborted, "the others would tell of it before"
    for carrier in members.carriers:  # as the desk does: gloo does not always wake who waits for it
        carrier.abort()
    ends = [future.exception(WAIT_S) for future in futures]
    assert all(isinstance(end, SyncError) for end in ends), ends


def test_what_nobody_holds_is_told_by_every_member(meet):
    sink = ScriptedSink(
        [("model.norm.weight", Rectangle((0,), (64,))), ("model.other", Rectangle((0,), (1,)))]
    )
    ends = meet([make_source(0), sink], 1).run(1)
    assert [type(end) for end in ends] == [NobodyHolds] * 2
    assert "model.other" in str(ends[1])


def test_who_has_another_secret_is_in_no_group(meet):
    parties, sinks = make_parties([1])
    members = meet(parties, 4)
    stranger = Carrier(RUNTIME, ScriptedSink(sinks[0].regions), make_secret(), MAX_BYTES)
    members.carriers[4] = stranger
    ends = members.run(1, deadline_s=2.0)
    assert all(isinstance(end, DeadlineExceeded | SyncError) for end in ends), ends
    assert not stranger._party.stages


def test_the_words_of_the_members_are_removed_once_all_have_read_them(meet):
    parties, _ = make_parties([4, 4, 5])
    members = meet(parties, 4)
    assert members.run(1) == [None] * 7
    sealed = SealedStore(members.store, members.order.secret, "direct/1")
    assert sealed.check(["read"])
    assert not any(sealed.check([xxhash.xxh3_128_hexdigest(_tell(party))]) for party in parties)
