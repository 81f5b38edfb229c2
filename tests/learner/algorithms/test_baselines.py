"""ReMax and the optimal token baselines in a learner's real step, on both backends."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from transformers import AutoModelForCausalLM

from asyncrl.core.errors import DataError
from asyncrl.core.metrics import unknown_names
from learner.algorithms.advantage import ADVANTAGES, AdvantageInput
from learner.algorithms.centre import rows_of
from learner.backend import Models
from learner.batching.batch import build_batch
from tests.learner.parts.contract import weights_of
from tests.learner.parts.samples import make_groups, save_model
from tests.learner.parts.training import open_backend, open_fsdp2, open_objective, take_step

BASELINE = 0.25
GROUPS = make_groups(4, versions=(1, 2), baseline_reward=BASELINE)
VERSIONS = {1: 0, 2: 1}
OPTIMAL = ("optimal_token_baseline", "tir_optimal_token_baseline")
PLAIN = {"correction": "disabled", "veto": 0}


@pytest.fixture(params=[open_backend, open_fsdp2], ids=["megatron", "fsdp2"])
def policy(request, tmp_path):
    backend = request.param(save_model(tmp_path))
    yield backend
    backend.close()


def run_step(policy, objective, groups=GROUPS):
    return take_step(Models(policy), objective, groups)


def assert_trains(policy, objective):
    """Train one step; return its metrics."""
    before = weights_of(policy)
    row = run_step(policy, objective)
    assert unknown_names(row) == {}
    assert all(math.isfinite(value) for value in row.values())
    assert row["actor/grad_norm"] > 0
    assert any(not torch.equal(tensor, before[name]) for name, tensor in policy.named_tensors())
    return row


def mean_over_tokens(batch, advantages_N):
    return float(advantages_N[batch.loss_mask_N > 0].mean())


def test_remax_trains_on_reward_less_the_greedy_answers(policy):
    row = assert_trains(policy, open_objective(advantage="remax", **PLAIN))
    batch = build_batch(GROUPS, 2, VERSIONS)
    wanted = mean_over_tokens(batch, (batch.rewards_R - BASELINE)[batch.row_N])
    assert row["critic/advantages/mean"] == pytest.approx(wanted, rel=1e-5)
    assert row["critic/greedy_score/mean"] == pytest.approx(BASELINE)
    assert row["critic/advantages/max"] == pytest.approx(1 - BASELINE)


@pytest.mark.parametrize("lacking", [[2], [0, 1, 2, 3]], ids=["one", "all"])
def test_remax_refuses_a_batch_with_a_group_that_brought_no_greedy_answer(lacking, tmp_path):
    backend = open_backend(save_model(tmp_path))
    groups = [
        dataclasses.replace(group, baseline_reward=None) if index in lacking else group
        for index, group in enumerate(GROUPS)
    ]
    before = weights_of(backend)
    with pytest.raises(DataError, match=f"{len(lacking)} groups, the first of them ticket {10 + lacking[0]}"):
        run_step(backend, open_objective(advantage="remax", **PLAIN), groups)
    assert all(torch.equal(tensor, before[name]) for name, tensor in backend.named_tensors())
    backend.close()


@pytest.mark.parametrize("num_stale", [1, 4], ids=["one", "all"])
def test_the_greedy_score_is_that_of_the_whole_batch_also_of_groups_over_age(num_stale, tmp_path):
    backend = open_backend(save_model(tmp_path))
    old, fresh = (make_groups(4, versions=(version,), seed=version) for version in (1, 2))
    groups = [
        dataclasses.replace(group, baseline_reward=float(group.ticket))
        for group in (*old[:num_stale], *fresh[num_stale:])
    ]
    row = run_step(backend, open_objective(max_lag=1, advantage="remax", **PLAIN), groups)
    assert ("critic/advantages/mean" in row) == (num_stale < 4), "nothing of a batch over age is trained"
    assert row["critic/greedy_score/mean"] == pytest.approx((10 + 11 + 12 + 13) / 4)
    backend.close()


def test_other_advantages_do_not_mind_greedy_answers(tmp_path):
    backend = open_backend(save_model(tmp_path))
    row = run_step(backend, open_objective(**PLAIN))
    assert "critic/greedy_score/mean" not in row
    backend.close()


def describe_by_hugging_face(folder, batch):
    """Return log-probs and sums of squared probabilities, from a plain softmax."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        parts = zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:], strict=True)
        logits_NV = torch.cat([model(batch.tokens_N[None, start:end]).logits[0] for start, end in parts])
    table_NV = logits_NV.log_softmax(-1)
    return table_NV.gather(1, batch.labels_N[:, None])[:, 0], table_NV.exp().square().sum(-1)


@pytest.mark.parametrize("advantage", OPTIMAL)
@pytest.mark.parametrize("correction", ["disabled", "decoupled_token_is"])
def test_optimal_baselines_train_on_what_a_plain_softmax_says(policy, tmp_path, advantage, correction):
    objective = open_objective(advantage=advantage, correction=correction, veto=0)
    batch = build_batch(GROUPS, 2, VERSIONS)
    prox_N, squares_N = describe_by_hugging_face(tmp_path, batch)
    weights_N = (prox_N - batch.behaviour_N).exp().clamp(max=2) * batch.loss_mask_N
    rows = rows_of(batch)
    is_last_N = (rows.remaining(batch.counted_N) == 1) & (batch.counted_N != 0)
    found = ADVANTAGES[advantage](
        AdvantageInput(
            rewards_N=torch.where(is_last_N, rows.spread(batch.rewards_R), 0.0),
            scores_R=batch.rewards_R,
            mask_N=batch.counted_N,
            rows=rows,
            group_R=batch.group_R,
            prox_N=prox_N,
            weights_N=None if correction == "disabled" else weights_N,
            sum_pi_squared_N=squares_N,
        )
    )
    row = assert_trains(policy, objective)
    assert row["critic/advantages/mean"] == pytest.approx(
        mean_over_tokens(batch, found.advantages_N), abs=1e-5
    )
    assert row["critic/advantages/min"] == pytest.approx(
        float(found.advantages_N[batch.loss_mask_N > 0].min()), abs=1e-5
    )


def test_a_step_that_needs_no_squares_computes_none(tmp_path):
    backend = open_backend(save_model(tmp_path))
    asked = []
    plain_forward = backend._schedule.forward

    def forward(parts, *, has_squares=False):
        asked.append(has_squares)
        return plain_forward(parts, has_squares=has_squares)

    backend._schedule.forward = forward
    run_step(backend, open_objective(**PLAIN))
    run_step(backend, open_objective(advantage=OPTIMAL[0], **PLAIN))
    assert asked == [False, False, True, False], "before each step and, for the check of it, after"
    backend.close()


def test_an_empty_share_has_no_squares(policy):
    nothing = build_batch(GROUPS, 2, VERSIONS).select_groups([])
    assert [column.shape for column in policy.logprobs_and_squares(nothing)] == [(0,)] * 3


def test_greedy_rewards_follow_their_rows_through_every_cut():
    groups = [dataclasses.replace(group, baseline_reward=float(group.ticket)) for group in GROUPS]
    groups[1] = dataclasses.replace(groups[1], baseline_reward=None)
    batch = build_batch(groups, 2, VERSIONS)
    assert batch.baseline_R.tolist()[:4] == [10.0] * 4
    assert batch.baseline_R[4:8].isnan().all()
    assert batch.select_groups([12]).baseline_R.tolist() == [12.0] * 4
    parts = batch.select_groups([10, 12, 13]).balance_microbatches(batch.num_tokens // 4)
    assert len(parts) > 2
    for part in parts:
        assert part.baseline_R.tolist() == [float(part.tickets_G[group]) for group in part.group_R.tolist()]
    assert build_batch(make_groups(2), 0, {1: 0}).baseline_R is None
