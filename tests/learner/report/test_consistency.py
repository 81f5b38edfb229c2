"""Consistency metrics of a step: the engine's weights and the step's own updates, on real backends."""

from __future__ import annotations

import contextlib
import math
from dataclasses import replace

import pytest
import torch

from learner.backend import Models
from learner.batching.batch import PackedBatch, build_batch
from learner.batching.parts import make_empty
from learner.report import check_update, describe_engine_gap
from tests.learner.parts.samples import make_groups
from tests.learner.parts.training import (
    open_backend,
    open_fsdp2,
    open_objective,
    prepare_step,
    take_step,
    take_streamed_step,
)

OLDER, CURRENT = 1, 2


def make_batch(*, num_older: int = 2, gap: float = 0.0) -> PackedBatch:
    """Four groups; the older version has sampled `num_older` and half of one more."""
    older = make_groups(num_older, versions=(OLDER,))
    current = make_groups(3 - num_older, versions=(CURRENT,), seed=1)
    mixed = make_groups(1, versions=(OLDER, CURRENT), seed=2)
    groups = [replace(group, ticket=ticket) for ticket, group in enumerate([*older, *current, *mixed], 10)]
    batch = build_batch(groups, 1, {OLDER: 0, CURRENT: 1})
    return replace(batch, prox_N=batch.behaviour_N + gap)


CURRENT_GROUP, MIXED_GROUP = 2, 3


@pytest.mark.parametrize("keeps_cache", [False, True])
def test_the_gap_is_over_tokens_that_the_weights_being_trained_have_sampled(keeps_cache):
    """Where the cache is kept, over rows that they have sampled whole."""
    batch = make_batch(gap=0.25)
    assert batch.prox_N is not None
    group_N = batch.group_R[batch.row_N]
    is_current_N = group_N == CURRENT_GROUP
    if not keeps_cache:
        is_current_N |= (group_N == MIXED_GROUP) & (batch.lag_N == 0)
    strange = replace(batch, prox_N=torch.where(is_current_N, batch.prox_N, batch.prox_N + 5.0))
    found = describe_engine_gap(strange, strange.loss_mask_N, keeps_cache=keeps_cache)
    assert found["weights/engine_gap_mean"] == found["weights/engine_gap_max"] == pytest.approx(0.25)
    wanted = float((batch.loss_mask_N * is_current_N).sum())
    assert found["weight/current tokens"] == found["weights/engine_gap_tokens"] == wanted > 0


def test_without_such_a_row_there_is_no_gap_and_without_prox_it_is_not_measured():
    batch = make_batch(num_older=3)
    found = describe_engine_gap(batch, batch.loss_mask_N, keeps_cache=True)
    assert found["weight/current tokens"] == 0.0 and math.isnan(found["weights/engine_gap_mean"])
    without = replace(batch, prox_N=None)
    assert describe_engine_gap(without, batch.loss_mask_N, keeps_cache=False) == {}


@pytest.mark.parametrize("opener", [open_backend, open_fsdp2])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_step_tells_how_far_it_moved_the_policy_and_whether_towards_the_advantages(model, opener, sign):
    objective = open_objective()
    with contextlib.closing(opener(model)) as policy:
        minibatch, _ = prepare_step(policy, objective, 0, num_groups=32)
        assert check_update(minibatch, policy)["actor/step_kl"] == pytest.approx(0.0, abs=1e-9)
        policy.update(minibatch, lambda *args: flip(objective.loss(*args), sign))
        found = check_update(minibatch, policy)
    assert found["actor/step_gain"] * sign > 0.2
    assert 1e-6 < found["actor/step_kl"] < 1.0
    assert 0 < found["weight/checked tokens"] < float(minibatch.loss_mask_N.sum())


def flip(found, sign: float):
    loss, metrics = found
    return sign * loss, metrics


def test_a_share_without_an_advantage_has_nothing_to_tell_and_takes_part(model):
    objective = open_objective()
    with contextlib.closing(open_backend(model)) as policy:
        minibatch, _ = prepare_step(policy, objective, 0)
        assert minibatch.advantages_N is not None
        even = replace(minibatch, advantages_N=torch.zeros_like(minibatch.advantages_N))
        empty = replace(make_empty(0), prox_N=torch.zeros(0), advantages_N=torch.zeros(0))
        for batch in (even, empty):
            found = check_update(batch, policy)
            assert math.isnan(found["actor/step_kl"]) and math.isnan(found["actor/step_gain"])
            assert found["weight/checked tokens"] == 0.0


@pytest.mark.parametrize("take", [take_step, take_streamed_step])
def test_every_way_to_take_a_step_measures_it(model, take):
    with contextlib.closing(open_backend(model)) as policy:
        models, objective = Models(policy), open_objective()
        found = take(models, objective, make_groups(12, versions=(1, 2)))
        again = take(models, objective, make_groups(12, versions=(2, 3)))
    assert found["actor/step_kl"] > 0 and -1.0 <= found["actor/step_gain"] <= 1.0
    assert found["actor/unsampled_share"] == 0.0
    assert "weights/engine_gap_mean" not in found and found["weights/engine_gap_tokens"] == 0, "all are older"
    assert again["weights/engine_gap_mean"] > 0 and again["weights/engine_gap_tokens"] > 0


@pytest.mark.parametrize("shift", [1, -1])
def test_tokens_that_nobody_sampled_are_counted_where_they_are_trained(model, shift):
    objective = open_objective()
    with contextlib.closing(open_backend(model)) as policy:
        minibatch, _ = prepare_step(policy, objective, 0)
        shifted = replace(minibatch, loss_mask_N=minibatch.loss_mask_N.roll(shift))
        unsampled_N = (minibatch.version_N == 0) * shifted.loss_mask_N
        metrics = policy.update(shifted, objective.loss)
    wanted = float(unsampled_N.sum() / minibatch.totals.num_trained)
    assert metrics["actor/unsampled_share"] == pytest.approx(wanted) and wanted > 0.01
