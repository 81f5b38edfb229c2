"""Packing, lag, minibatches and microbatches."""

import dataclasses

import numpy as np
import pytest
import torch

from asyncrl.core.errors import DataError, LedgerError
from asyncrl.core.experience import Group, Trajectory
from asyncrl.core.staleness import Span
from learner.batching.batch import assign_shards, build_batch, plan_minibatches, restore_order
from tests.learner.parts.samples import make_groups


def make_small_group(ticket=7, versions=((1, 0, 2), (2, 2, 3))):
    trajectory = Trajectory(
        response_ids=np.array([21, 22, 23], np.int32),
        loss_mask=np.array([1, 0, 1], np.uint8),
        logprobs=np.array([-0.1, -0.2, -0.3], np.float32),
        spans=tuple(Span(*span) for span in versions),
        reward=1.0,
        finish_reason="stop",
    )
    return Group(
        ticket=ticket, attempt=0, prompt_ids=np.array([11, 12], np.int32), trajectories=(trajectory,) * 2
    )


def test_what_belongs_to_a_token_sits_where_it_is_predicted():
    batch = build_batch([make_small_group()], step=5, step_of_version={1: 3, 2: 4})
    assert batch.tokens_N.tolist() == [11, 12, 21, 22, 23] * 2
    assert batch.labels_N.tolist() == [12, 21, 22, 23, 0] * 2
    assert batch.loss_mask_N.tolist() == [0, 1, 0, 1, 0] * 2
    assert batch.behaviour_N.tolist() == pytest.approx([0, -0.1, -0.2, -0.3, 0] * 2)
    assert batch.version_N.tolist() == [0, 1, 1, 2, 0] * 2
    assert batch.lag_N.tolist() == [0, 2, 2, 1, 0] * 2
    assert batch.cu_seqlens == (0, 5, 10)
    assert batch.row_N.tolist() == [0] * 5 + [1] * 5
    assert dataclasses.astuple(batch.totals) == (4.0, 2.0, 4.0, 10.0, 2.0)


def test_over_age_tokens_lose_their_mask_and_keep_their_place_in_the_denominator():
    batch = build_batch([make_small_group()], step=5, step_of_version={1: 3, 2: 4})
    masked = batch.mask_over_age(1)
    assert masked.loss_mask_N.tolist() == [0, 0, 0, 1, 0] * 2
    assert (masked.totals.num_tokens, masked.totals.num_trained) == (4.0, 2.0)
    masked.check_lag(1)
    with pytest.raises(LedgerError, match="2 tokens over max_lag 1"):
        batch.check_lag(1)
    assert masked.trainable_tokens_G() == [2]
    assert batch.mask_over_age(0).trainable_tokens_G() == [0]


@pytest.mark.parametrize(
    ("versions", "known", "said"),
    [
        (((9, 0, 3),), {1: 0}, "version 9"),
        (((0, 0, 3),), {1: 0}, "version 0"),
        (((1, 0, 3),), {1: 6}, "of step 6"),
    ],
)
def test_a_version_that_is_unknown_or_from_the_future_is_an_error(versions, known, said):
    with pytest.raises(LedgerError, match=said):
        build_batch([make_small_group(versions=versions)], 5, known)


def test_groups_that_cannot_be_packed_are_refused():
    good = make_small_group()
    for bad, said in (
        ([], "at least one"),
        ([good, good], "twice"),
        ([dataclasses.replace(good, prompt_ids=np.zeros(0, np.int32))], "no tokens"),
        (
            [
                dataclasses.replace(
                    good,
                    trajectories=(
                        dataclasses.replace(good.trajectories[0], logprobs=np.zeros(2, np.float32)),
                    ),
                )
            ],
            "length",
        ),
    ):
        with pytest.raises(DataError, match=said):
            build_batch(bad, 5, {1: 0, 2: 0})


def test_an_empty_answer_is_a_row_without_a_trained_token():
    empty = Trajectory(np.zeros(0, np.int32), np.zeros(0, np.uint8), np.zeros(0, np.float32), (), 0.0, "stop")
    group = dataclasses.replace(make_small_group(), trajectories=(make_small_group().trajectories[0], empty))
    batch = build_batch([group], 5, {1: 5, 2: 5})
    assert batch.num_rows == 2
    assert dataclasses.astuple(batch.totals) == (2.0, 1.0, 2.0, 7.0, 2.0)


def test_the_order_of_arrival_does_not_matter():
    groups = make_groups(5)
    ours, other = build_batch(groups, 0, {1: 0}), build_batch(groups[::-1], 0, {1: 0})
    assert ours.tickets_G == other.tickets_G == (10, 11, 12, 13, 14)
    assert torch.equal(ours.tokens_N, other.tokens_N)


def test_minibatches_are_whole_groups_in_ticket_order_and_their_totals_sum():
    batch = build_batch(make_groups(5), 0, {1: 0})
    minibatches = [batch.select_groups(tickets) for tickets in plan_minibatches(batch.tickets_G, 2)]
    assert [part.tickets_G for part in minibatches] == [(10, 11), (12, 13, 14)]
    assert torch.equal(torch.cat([part.tokens_N for part in minibatches]), batch.tokens_N)
    assert torch.equal(torch.cat([part.rewards_R for part in minibatches]), batch.rewards_R)
    assert sum(part.totals.num_tokens for part in minibatches) == batch.totals.num_tokens
    assert minibatches[1].group_R.tolist() == [0] * 4 + [1] * 4 + [2] * 4


@pytest.mark.parametrize("max_tokens", [31, 40, 100, 10_000])
def test_balanced_microbatches_hold_every_row_once_and_give_their_order_back(max_tokens):
    batch = build_batch(make_groups(5), 0, {1: 0})
    parts = batch.balance_microbatches(max_tokens)
    assert len(parts) <= 2 * -(-batch.num_tokens // max_tokens)
    assert all(part.num_tokens <= max_tokens and part.totals == batch.totals for part in parts)
    for name in ("tokens_N", "labels_N", "loss_mask_N", "lag_N", "behaviour_N"):
        values = [getattr(part, name) for part in parts]
        assert torch.equal(restore_order(parts, values), getattr(batch, name))
    columns = [torch.stack([part.rewards_R[part.row_N], part.behaviour_N]) for part in parts]
    expected = torch.stack([batch.rewards_R[batch.row_N], batch.behaviour_N])
    assert torch.equal(restore_order(parts, columns), expected)
    assert all(torch.equal(part.row_N.unique(), torch.arange(part.num_rows)) for part in parts)


def test_a_rank_with_too_few_rows_fills_up_with_positions_that_train_nothing():
    batch = build_batch(make_groups(1, group_size=2), 0, {1: 0})
    batch = dataclasses.replace(batch, prox_N=batch.behaviour_N)
    parts = batch.balance_microbatches(100, min_parts=3, multiple_of=4)
    assert [part.num_rows for part in parts] == [1, 1, 1, 1]
    assert [part.num_tokens for part in parts[2:]] == [1, 1]
    for filler in parts[2:]:
        assert (filler.totals, filler.loss_mask_N.tolist()) == (batch.totals, [0.0])
        assert filler.prox_N is not None and filler.weights_N is None
    assert torch.equal(restore_order(parts, [part.tokens_N for part in parts]), batch.tokens_N)
    empty = batch.select_groups([])
    assert empty.balance_microbatches(100) == []
    parts = empty.balance_microbatches(100, min_parts=2)
    assert [part.num_tokens for part in parts] == [1, 1]
    assert restore_order(parts, [part.tokens_N for part in parts]).shape == (0,)


def test_a_row_over_the_budget_is_named_by_its_ticket():
    batch = build_batch([make_small_group(ticket=9)], 5, {1: 3, 2: 4})
    with pytest.raises(DataError, match="ticket 9: a row of 5 tokens"):
        batch.balance_microbatches(4)


def test_groups_that_are_not_here_select_to_an_empty_batch():
    empty = build_batch(make_groups(2), 0, {1: 0}).select_groups([99])
    assert (empty.num_rows, empty.num_tokens, empty.tickets_G) == (0, 0, ())
    assert empty.balance_microbatches(10) == []


def test_shards_hold_every_ticket_once_and_are_balanced_within_each_minibatch():
    num_tokens_of = {ticket: 10 + 7 * (ticket % 5) for ticket in range(16)}
    plan = plan_minibatches(list(num_tokens_of), 2)
    shards = assign_shards(num_tokens_of, plan, 3)
    assert sorted(ticket for shard in shards for ticket in shard) == list(range(16))
    for tickets in plan:
        loads = [sum(num_tokens_of[t] for t in shard if t in tickets) for shard in shards]
        assert max(loads) - min(loads) <= max(num_tokens_of.values())


def test_a_minibatch_of_fewer_groups_than_shards_leaves_some_without():
    assert assign_shards({1: 9, 2: 4}, [(1,), (2,)], 3) == [[1], [2], []]
    assert assign_shards({1: 9}, [(), (1,)], 2) == [[1], []]


def test_the_heaviest_part_of_a_minibatch_goes_to_the_shard_with_the_fewest_tokens():
    num_tokens_of = {1: 90, 2: 10, 3: 90, 4: 10}
    assert assign_shards(num_tokens_of, [(1, 2), (3, 4)], 2) == [[1, 4], [2, 3]]
