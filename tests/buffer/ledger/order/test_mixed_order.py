"""The order of prompts from several sources: shares, passes, curricula, and crashes in between."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.buffer.journals.file_journal import FileJournal
from asyncrl.buffer.ledger.ledger import Ledger
from asyncrl.buffer.ledger.orders import BLOCK, NUM_STAGES, PromptOrder, Source, shares_of
from asyncrl.buffer.ledger.state import LedgerState
from asyncrl.core.errors import DataError
from tests.buffer.ledger.parts.ledger_model import Shadow
from tests.buffer.ledger.parts.ledger_runs import SETTINGS, Run
from tests.buffer.parts import make_store

MIX = ((60, 3.0), (7, 1.0), (33, 1.0))
SOURCES = st.lists(
    st.builds(Source, st.integers(1, 40), st.sampled_from([0.01, 0.5, 1.0, 3.0, 100.0])),
    min_size=1,
    max_size=5,
).map(tuple)


def test_a_single_source_is_drawn_as_every_run_so_far_has_drawn_it():
    order = PromptOrder(7, (Source(100),), is_shuffled=True)
    assert [order.at(place).row for place in range(8)] == [8, 33, 97, 62, 12, 14, 31, 77]
    assert [order.at(place)[1:] for place in (100, 205)] == [(1, 62), (2, 39)]


@given(sources=SOURCES, seed=st.integers(0, 99), is_shuffled=st.booleans(), is_ascending=st.booleans())
@settings(max_examples=25, deadline=None)
def test_every_pass_of_every_source_visits_each_of_its_prompts_once(
    sources: tuple[Source, ...], seed: int, is_shuffled: bool, is_ascending: bool
):
    order = PromptOrder(seed, sources, is_shuffled, is_ascending)
    drawn = [order.at(place) for place in range(BLOCK + 100)]
    for number, source in enumerate(sources):
        mine = [draw for draw in drawn if draw.source == number]
        first = sum(one.num_prompts for one in sources[:number])
        for rank, draw in enumerate(mine):
            assert draw.pass_number == rank // source.num_prompts
            assert first <= draw.row < first + source.num_prompts
        assert len(set(mine)) == len(mine), "a prompt came twice in a pass"


@given(sources=SOURCES.filter(lambda found: len(found) > 1), block=st.integers(0, 5))
@settings(max_examples=40, deadline=None)
def test_each_block_holds_each_source_by_its_weight_and_at_least_once(
    sources: tuple[Source, ...], block: int
):
    order = PromptOrder(3, sources, is_shuffled=True)
    counts = Counter(order.at(place).source for place in range(block * BLOCK, (block + 1) * BLOCK))
    shares = shares_of(tuple(source.weight for source in sources))
    assert tuple(counts[number] for number in range(len(sources))) == shares
    assert sum(shares) == BLOCK and min(shares) >= 1
    for (one, left), (other, right) in pairwise(zip(sources, shares, strict=True)):
        if min(left, right) > 1:
            assert left / right == pytest.approx(one.weight / other.weight, rel=2 / min(left, right))


def test_sources_are_spread_and_not_one_after_the_other():
    order = PromptOrder(3, (Source(500), Source(500)), is_shuffled=True)
    first = Counter(order.at(place).source for place in range(100))
    assert 30 <= first[0] <= 70


def test_blocks_are_arranged_each_in_its_own_way():
    order = PromptOrder(3, (Source(500), Source(500)), is_shuffled=True)
    first, second = ([order.at(begin + place).source for place in range(BLOCK)] for begin in (0, BLOCK))
    assert first != second


def test_the_rarest_sources_get_one_place_of_a_block():
    assert shares_of((0.01, 0.01, 100.0)) == (1, 1, 998)
    assert shares_of((2.0, 1.0)) == (667, 333)


def test_without_shuffling_each_source_keeps_its_order():
    order = PromptOrder(3, (Source(300), Source(500, 2.0)), is_shuffled=False)
    for number, first in ((0, 0), (1, 300)):
        drawn = [draw for place in range(BLOCK) if (draw := order.at(place)).source == number]
        size = order.sources[number].num_prompts
        assert [draw.row for draw in drawn] == [first + rank % size for rank in range(len(drawn))]


@pytest.mark.parametrize("size", [100, 95, 7])
def test_the_first_pass_of_a_curriculum_goes_from_easy_to_hard_in_shuffled_stages(size: int):
    order = PromptOrder(3, (Source(size),), is_shuffled=True, is_ascending=True)
    first, second = ([order.at(place + offset).row for place in range(size)] for offset in (0, size))
    stage = -(-size // NUM_STAGES)
    assert [index // stage for index in first] == sorted(index // stage for index in first)
    assert sorted(first) == list(range(size))
    if size > 10:
        assert first != sorted(first), "shuffled inside a stage"
        assert [index // stage for index in second] != sorted(index // stage for index in second)


def describe(ledger: Ledger, sources: tuple[tuple[int, float], ...] = MIX) -> None:
    ledger.describe_data(sum(count for count, _ in sources), "digest", sources)


def drawn(state: LedgerState) -> list[tuple[int, int, int]]:
    tickets = sorted(state.tickets.values(), key=lambda ticket: ticket.id)
    return [(one.source, one.pass_number, one.index) for one in tickets if not one.parent]


class MixedRun(Run):
    """A run whose data is `MIX`."""

    def __init__(self, **changes: object) -> None:
        super().__init__(**changes)
        self.ledger.state.num_prompts = 0  # `Run` has described a single source
        self.ledger.drain_events()
        describe(self.ledger)


def test_leases_hand_out_the_mix_whoever_asks():
    run = MixedRun()
    for step in range(6):
        for replica in ("a", "b", "c")[: 1 + step % 3]:
            for grant in run.lease(want=1, replica=replica):
                run.store(grant)
        run.train()
    order = PromptOrder(SETTINGS.run_seed, tuple(Source(*one) for one in MIX), is_shuffled=True)
    found = drawn(run.state)
    assert found == [tuple(order.at(place)) for place in range(len(found))]
    assert len({source for source, _, _ in found}) > 1


@given(kills=st.lists(st.integers(0, 3), min_size=1, max_size=12), data=st.data())
@settings(max_examples=25, deadline=None)
def test_a_crash_anywhere_goes_on_with_the_same_mix(kills: list[int], data: st.DataObject):
    run = Run()
    shadow = Shadow(run.ledger.settings, LedgerState(run.ledger.settings))
    run.ledger = Ledger(run.ledger.settings)
    run.state = run.ledger.state
    describe(run.ledger)
    run.token = run.ledger.open("learner")
    run.version = run.ledger.register_version(run.token, 0)
    for kill in kills:
        for grant in run.lease(want=kill, replica=data.draw(st.sampled_from("abc"))):
            run.store(grant)
        run.train()
        shadow.follow(run.ledger)
        if data.draw(st.booleans()):
            shadow.take_snapshot(run.ledger)
        run.ledger = shadow.recover(kill)
        run.state = run.ledger.state
        describe(run.ledger)  # each replica says again what its data is
    order = PromptOrder(SETTINGS.run_seed, tuple(Source(*one) for one in MIX), is_shuffled=True)
    found = drawn(run.state)
    assert found == [tuple(order.at(place)) for place in range(run.state.num_drawn)]


def test_a_store_that_is_opened_again_goes_on_with_the_mix(tmp_path: Path):
    indexes = []
    for life in range(3):
        store = make_store(tmp_path)
        describe(store.ledger)
        number = store.ledger.register_version(store.ledger.open("learner"), 0)
        grants = store.ledger.lease(f"r{life}", number, 1, 0.0)
        indexes += [(grant.source, grant.pass_number, grant.index) for grant in grants]
        store.commit(0.0)
        assert isinstance(store.journal, FileJournal)
        store.journal.close()
    order = PromptOrder(SETTINGS.run_seed, tuple(Source(*one) for one in MIX), is_shuffled=True)
    assert indexes == [tuple(order.at(place)) for place in range(3)]


@pytest.mark.parametrize(
    "sources",
    [
        (),
        ((60, 3.0), (7, 1.0), (33, 2.0)),
        ((60, 3.0), (8, 1.0), (32, 1.0)),
        ((7, 1.0), (60, 3.0), (33, 1.0)),
    ],
)
def test_another_mix_than_the_run_began_with_is_refused(sources: tuple[tuple[int, float], ...]):
    run = MixedRun()
    with pytest.raises(DataError, match="but the run began with 100 prompts"):
        run.ledger.describe_data(100, "digest", sources)
    describe(run.ledger)


@pytest.mark.parametrize(
    "sources",
    [
        ((60, 1.0), (39, 1.0)),
        ((100, 1.0), (0, 1.0)),
        ((60, 0.0), (40, 1.0)),
        ((60, float("inf")), (40, 1.0)),
        ((60, 1e308), (40, 1e308)),
        ((60, 1e306), (40, 1.0)),
        ((101, 1.0), (-1, 1.0)),
        tuple((1, 1.0) for _ in range(100)),
    ],
)
def test_sources_that_cannot_be_are_refused(sources: tuple[tuple[int, float], ...]):
    with pytest.raises(DataError, match="do not make 100"):
        Ledger(SETTINGS).describe_data(100, "digest", sources)


def test_data_without_a_prompt_is_refused():
    with pytest.raises(DataError, match="holds no prompt"):
        Run().ledger.describe_data(0, "digest")
