"""The order of prompts, seeds and the age of versions."""

from __future__ import annotations

import pytest

from asyncrl.buffer.ledger.facts import VersionBook
from asyncrl.buffer.ledger.orders import PromptOrder, Source, permute, sample_seed, ticket_seed


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 1000])
def test_a_pass_visits_every_prompt_once(size: int) -> None:
    assert sorted(permute(place, size, key=12345) for place in range(size)) == list(range(size))


def test_passes_differ_and_the_same_seed_gives_the_same_order() -> None:
    order = PromptOrder(run_seed=3, sources=(Source(50),), is_shuffled=True)
    passes = [[order.at(place).row for place in range(50 * number, 50 * number + 50)] for number in range(2)]
    again = PromptOrder(run_seed=3, sources=(Source(50),), is_shuffled=True)
    other = PromptOrder(run_seed=4, sources=(Source(50),), is_shuffled=True)
    assert passes[0] != passes[1]
    assert [again.at(place).row for place in range(50)] == passes[0]
    assert [other.at(place).row for place in range(50)] != passes[0]


def test_an_unshuffled_order_is_the_files() -> None:
    order = PromptOrder(run_seed=3, sources=(Source(3),), is_shuffled=False)
    assert [order.at(place)[1:] for place in range(4)] == [(0, 0), (0, 1), (0, 2), (1, 0)]


def test_seeds_are_fixed_for_ever_and_differ_by_ticket_and_sample() -> None:
    assert sample_seed(0, 1, 0) == sample_seed(0, 1, 0)
    seeds = {
        sample_seed(run, ticket, sample) for run in range(3) for ticket in range(20) for sample in range(8)
    }
    assert len(seeds) == 3 * 20 * 8
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert ticket_seed(0, 1) not in seeds


def test_an_exact_replay_makes_abandoned_versions_count_as_their_own_step() -> None:
    book = VersionBook()
    for number, step in enumerate(range(4), start=1):
        book.register(number, step)
    book.begin_lineage()
    assert [book.counted_step(number) for number in range(1, 5)] == [0, 1, 2, 3]


def test_beyond_a_fork_a_token_is_as_old_as_the_way_back_and_forth() -> None:
    book = VersionBook()
    for number, step in enumerate(range(5), start=1):
        book.register(number, step)
    book.begin_lineage()
    book.fork(2)
    book.fork(3)  # the first one counts
    assert [book.counted_step(number) for number in range(1, 6)] == [0, 1, 2, 1, 0]


def test_ways_back_over_several_forks_add_up() -> None:
    book = VersionBook()
    for number, step in enumerate(range(5), start=1):
        book.register(number, step)
    book.begin_lineage()
    book.fork(3)
    book.begin_lineage()
    book.fork(1)
    assert book.counted_step(5) == -2  # 4 -> 3 -> 1 is three steps back
    assert book.counted_step(3) == 0  # 2 -> 1
