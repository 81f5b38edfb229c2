"""Shared prompts: rows of a group stay in one microbatch, whose cost is that of the tokens computed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from asyncrl.core.experience import Group
from learner.batching.balance import estimate_workload
from learner.batching.batch import PackedBatch, build_batch, restore_order
from learner.batching.shared_prompts import find_units, measure_work, plan_shared, share_prompts
from learner.report import describe_batch
from tests.learner.parts.samples import make_forked_group, make_groups, make_trajectory


def make_long(num_groups: int, num_prompt: int = 100, num_answer: int = 25, size: int = 4) -> list[Group]:
    """Groups whose rows have `num_prompt` and `num_answer` tokens."""
    generator = np.random.default_rng(0)
    groups = []
    for ticket in range(num_groups):
        prompt_ids = generator.integers(0, 99, num_prompt).astype(np.int32)
        answers = tuple(make_trajectory(generator, num_answer, 99) for _ in range(size))
        groups.append(Group(ticket, 0, prompt_ids, answers))
    return groups


def make_batch(num_groups: int = 3, **sizes: int) -> PackedBatch:
    return build_batch(make_long(num_groups, **sizes), 0, {1: 0})


def test_outputs_find_their_way_from_the_tree_to_each_packed_position() -> None:
    batch = build_batch([*make_groups(2, prompt_tokens=(20, 30)), make_forked_group(20)], 0, {1: 0})
    shared = share_prompts(batch, multiple_of=8)
    assert shared is not None and len(shared.tokens_M) % 8 == 0 and len(shared.tokens_M) < batch.num_tokens
    hidden_M = torch.stack([shared.tree.positions_M, shared.tokens_M], 1)
    found_E3 = torch.cat([shared.take(hidden_M), shared.labels_E[:, None]], 1)
    starts = torch.tensor(batch.cu_seqlens[:-1])[batch.row_N]
    wanted_3N = torch.stack([torch.arange(batch.num_tokens) - starts, batch.tokens_N, batch.labels_N])
    assert torch.equal(shared.spread(found_E3.T), wanted_3N)
    assert len(found_E3) < batch.num_tokens, "a label that rows share at one position is computed once"


def test_each_answer_s_first_token_has_a_gradient_into_the_last_of_the_prompt() -> None:
    batch = make_batch(num_groups=1)
    shared = share_prompts(batch)
    assert shared is not None
    hidden_M = torch.zeros(len(shared.tokens_M), requires_grad=True)
    shared.spread(shared.take(hidden_M)).sum().backward()
    assert hidden_M.grad is not None
    assert hidden_M.grad.tolist() == [4.0] * 100 + [1.0] * 100, "a sum over the rows that share"


@pytest.mark.parametrize(("num_prompt", "is_shared"), [(21, False), (22, True)])
def test_a_prompt_is_shared_where_that_saves_64_tokens(num_prompt: int, is_shared: bool) -> None:
    assert (share_prompts(make_batch(num_prompt=num_prompt)) is not None) == is_shared


def test_rows_of_other_groups_are_left_as_they_are() -> None:
    assert share_prompts(make_batch(num_groups=4, size=1)) is None
    assert share_prompts(make_batch()._make_filler()) is None


def test_a_group_is_one_unit_whose_work_is_that_of_its_tree() -> None:
    batch = make_batch()
    units = find_units(batch, max_tokens=1000, min_units=0)
    assert [unit.rows for unit in units] == [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11)]
    assert {unit.num_tokens for unit in units} == {100 + 4 * 25}
    alone = estimate_workload(100) + 4 * estimate_workload(25)
    assert {unit.workload for unit in units} == {alone + 2 * 100 * 4 * 25}


def test_rows_that_do_not_share_are_units_of_their_own_work() -> None:
    batch = make_batch(num_groups=1, num_prompt=3)
    units = find_units(batch, max_tokens=1000, min_units=0)
    assert [(unit.rows, unit.workload) for unit in units] == [
        ((row,), estimate_workload(28)) for row in range(4)
    ]


def test_a_group_over_the_budget_is_cut_and_so_is_one_where_more_units_are_wanted() -> None:
    batch = make_batch()
    units = find_units(batch, max_tokens=150, min_units=0)
    assert [(unit.rows, unit.num_tokens) for unit in units[:2]] == [((0, 1), 150), ((2, 3), 150)]
    assert all(unit.num_tokens == 125 for unit in find_units(batch, max_tokens=149, min_units=0))
    assert sorted(len(unit.rows) for unit in find_units(batch, 1000, min_units=5)) == [2, 2, 2, 2, 4]
    assert len(find_units(batch, 1000, min_units=99)) == batch.num_rows


@pytest.mark.parametrize("shares", [True, False])
def test_a_budget_counts_the_tokens_that_are_computed(shares: bool) -> None:
    batch = make_batch()
    parts = batch.balance_microbatches(400, plan_rows=plan_shared if shares else None)
    assert sorted(part.num_rows for part in parts) == ([4, 8] if shares else [3, 3, 3, 3])
    if shares:
        assert all(
            len(part.group_R) % 4 == 0 and len(part.group_R.unique()) == part.num_rows // 4 for part in parts
        )
    restored = restore_order(parts, [part.tokens_N for part in parts])
    assert torch.equal(restored, batch.tokens_N)


def test_an_empty_share_has_no_microbatch_or_fillers() -> None:
    empty = make_batch().select_groups([])
    assert empty.balance_microbatches(10, plan_rows=plan_shared) == []
    fillers = empty.balance_microbatches(10, min_parts=2, plan_rows=plan_shared)
    assert [part.num_tokens for part in fillers] == [1, 1]


def test_work_is_counted_once_per_token_that_is_computed() -> None:
    batch = make_batch(num_groups=2)
    pairs_of_rows = 8 * (125 * 126 / 2)
    assert measure_work(batch, is_shared=False) == (1000, pairs_of_rows)
    pairs_of_tree = 2 * (100 * 101 / 2 + 4 * (25 * 26 / 2) + 4 * 25 * 100)
    assert measure_work(batch, is_shared=True) == (400, pairs_of_tree)
    metrics = describe_batch(make_long(2), batch, 200, shares_prompts=True)
    assert (metrics["perf/computed_tokens"], metrics["perf/attention_pairs"]) == (400, pairs_of_tree)
    forked = replace(build_batch([make_forked_group(1)], 0, {1: 0}))
    assert measure_work(forked, is_shared=True).num_tokens == 80 * 6
