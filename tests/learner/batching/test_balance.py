"""Karmarkar-Karp partitions, microbatch plans and their measures."""

import itertools
import json
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.core.errors import DataError
from learner.batching import balance
from learner.batching.balance import (
    estimate_workload,
    karmarkar_karp,
    measure_balance,
    plan_microbatches,
)

ROOT = Path(__file__).resolve().parents[3]
VECTORS = Path(os.environ.get("ASYNCRL_ORACLE", ROOT.parent / "shared/oracle")) / "verl091.json"
LENGTHS = st.lists(st.integers(1, 200), min_size=1, max_size=40)


def sums(parts, values):
    return [sum(values[index] for index in part) for part in parts]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 1000), min_size=1, max_size=30), st.data())
def test_every_item_is_in_exactly_one_part_and_no_part_is_empty(workloads, data):
    num_parts = data.draw(st.integers(1, len(workloads)))
    parts = karmarkar_karp(workloads, num_parts, equal_size=False)
    assert len(parts) == num_parts and all(parts)
    assert sorted(itertools.chain.from_iterable(parts)) == list(range(len(workloads)))
    assert all(part == sorted(part) for part in parts)
    found = sums(parts, workloads)
    assert found == sorted(found, reverse=True)
    assert found[0] - found[-1] <= max(workloads)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 6), st.integers(1, 6), st.data())
def test_parts_of_equal_size_have_it(num_parts, size, data):
    count = num_parts * size
    workloads = data.draw(st.lists(st.integers(0, 1000), min_size=count, max_size=count))
    parts = karmarkar_karp(workloads, num_parts, equal_size=True)
    assert [len(part) for part in parts] == [size] * num_parts
    assert sorted(itertools.chain.from_iterable(parts)) == list(range(count))


def test_items_that_cannot_be_shared_out_are_refused():
    with pytest.raises(DataError, match="2 items cannot be shared out to 3"):
        karmarkar_karp([1, 2], 3, equal_size=False)
    with pytest.raises(DataError, match="to 0 parts"):
        karmarkar_karp([1, 2], 0, equal_size=False)
    with pytest.raises(DataError, match="evenly"):
        karmarkar_karp([1, 2, 3], 2, equal_size=True)


def test_differencing_beats_filling_the_lightest_part():
    # Largest first into the lighter part gives 17 and 13.
    assert sorted(sums(karmarkar_karp([8, 7, 6, 5, 4], 2, equal_size=False), [8, 7, 6, 5, 4])) == [14, 16]


def test_work_grows_faster_than_length():
    assert estimate_workload(1) == 24_577
    assert estimate_workload(24_576) == 2 * 24_576 * 24_576


@settings(max_examples=60, deadline=None)
@given(LENGTHS, st.integers(200, 600), st.integers(0, 50), st.integers(1, 4))
def test_a_plan_holds_every_row_once_within_the_budget(num_tokens, max_tokens, min_parts, multiple_of):
    plan = plan_microbatches(num_tokens, max_tokens, min_parts=min_parts, multiple_of=multiple_of)
    assert sorted(itertools.chain.from_iterable(plan)) == list(range(len(num_tokens)))
    assert max(sums(plan, num_tokens)) <= max_tokens
    assert len(plan) % multiple_of == 0 and len(plan) >= max(min_parts, 1)
    assert sum(bool(part) for part in plan) == min(len(plan), len(num_tokens))
    filled = [part for part in plan if part]
    assert plan[: len(filled)] == filled
    assert plan == plan_microbatches(num_tokens, max_tokens, min_parts=min_parts, multiple_of=multiple_of)


@settings(max_examples=60, deadline=None)
@given(st.lists(LENGTHS, min_size=2, max_size=4), st.integers(1, 3))
def test_ranks_agree_on_the_number_in_two_rounds(ranks, multiple_of):
    needed = max(len(plan_microbatches(lengths, 250)) for lengths in ranks)
    counts = {
        len(plan_microbatches(lengths, 250, min_parts=needed, multiple_of=multiple_of)) for lengths in ranks
    }
    assert counts == {-(-needed // multiple_of) * multiple_of}


def test_more_parts_that_do_not_fit_by_differencing_are_halves_of_parts_that_do():
    # Four parts fit; five parts of even work would put the last four rows together: 120 tokens.
    workloads = [1000, 999, 998, 997, 1, 1, 1, 1]
    parts = [[0, 1], [2, 3], [4, 5], [6, 7]]
    divided = balance._divide_further(parts, [30] * 8, workloads, max_tokens=60, num_parts=5)
    assert sorted(divided) == [[0], [1], [2, 3], [4, 5], [6, 7]]


def test_no_rows_make_as_many_empty_parts_as_are_wanted():
    assert plan_microbatches([], 10, min_parts=0) == []
    assert plan_microbatches([], 10) == [[]]
    assert plan_microbatches([], 10, min_parts=3, multiple_of=2) == [[]] * 4


def test_rows_that_do_not_fit_the_fewest_parts_get_one_more():
    assert sorted(plan_microbatches([101] * 3, 200)) == [[0], [1], [2]]


def test_a_row_over_the_budget_is_refused():
    with pytest.raises(DataError, match="row 1 has 11 tokens and does not fit a microbatch of 10"):
        plan_microbatches([3, 11], 10)


def test_little_work_comes_first_and_last():
    plan = plan_microbatches([50, 40, 30, 20, 10], 50, min_parts=5)
    assert plan == [[4], [2], [0], [1], [3]]


def test_the_share_out_is_measured_before_and_after():
    assert measure_balance([5, 1, 4, 2], [[0], [1, 2, 3]]) == {
        "global_seqlen/min": 6.0,
        "global_seqlen/max": 6.0,
        "global_seqlen/minmax_diff": 0.0,
        "global_seqlen/balanced_min": 5.0,
        "global_seqlen/balanced_max": 7.0,
        "global_seqlen/mean": 6.0,
    }
    assert measure_balance([7], [[0], []])["global_seqlen/balanced_min"] == 0.0


@pytest.mark.skipif(not VECTORS.is_file(), reason="verl's vectors are not here (set ASYNCRL_ORACLE)")
def test_partitions_and_plans_are_those_of_verl():
    num_checked = 0
    for name, case in json.loads(VECTORS.read_text())["cases"].items():
        given_, wanted = case["in"], case["out"]
        if case["fn"] == "kk":
            parts = karmarkar_karp(given_["seqlens"], given_["k"], equal_size=given_["equal_size"])
            assert parts == wanted["partitions"], name
            assert measure_balance(given_["seqlens"], parts) == wanted.get(
                "stats", measure_balance(given_["seqlens"], parts)
            )
        elif case["fn"] == "rearrange_micro_batches":
            plan = plan_microbatches(given_["seqlens"], given_["max_token_len"])
            assert plan == wanted["micro_batches"], name
        else:
            continue
        num_checked += 1
    assert num_checked
