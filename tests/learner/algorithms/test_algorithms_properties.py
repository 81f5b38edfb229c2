"""Laws of the algorithms, over batches drawn at random."""

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.algorithms.advantage import ADVANTAGES, AdvantageInput
from learner.algorithms.advantage.returns import raw_gae, vtrace
from learner.algorithms.aggregation import MODES, aggregate
from learner.algorithms.correction import (
    Correction,
    importance_weights,
    interpolate_prox,
    parse_rejections,
    reject,
    rejection_metrics,
)
from learner.algorithms.diagnostics.divergence import importance_metrics, off_policy_metrics
from learner.algorithms.kl import KINDS, AdaptiveKl, FixedKl, kl_penalty, measure_penalty
from learner.algorithms.losses import POLICY_LOSSES, LossInput
from learner.algorithms.losses.clipped import keep_second_moment
from learner.algorithms.losses.terms import value_loss
from learner.algorithms.presets import OPTIONS
from learner.algorithms.rows import Rows, padded_rows, whiten

SEEDS = st.integers(0, 2**31 - 1)


def draw_rows(seed, num_rows=5):
    """Return packed rows of random length and a mask with holes."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 9, (num_rows,), generator=generator)
    rows = Rows(torch.repeat_interleave(torch.arange(num_rows), lengths), num_rows)
    mask_N = (torch.rand(int(lengths.sum()), generator=generator) < 0.7).float()
    return rows, mask_N, generator


def draw_input(seed, **changes):
    rows, mask_N, generator = draw_rows(seed, 6)
    columns = [torch.randn(len(mask_N), generator=generator) for _ in range(4)]
    rewards_N = columns[0]
    given = AdvantageInput(
        rewards_N,
        rows.sum(rewards_N, mask_N),
        mask_N,
        rows,
        torch.tensor([0, 0, 0, 1, 1, 2]),
        gamma=0.97,
        lam=0.9,
        values_N=columns[1],
        prox_N=-columns[2].abs(),
        behaviour_N=-columns[3].abs(),
        sum_pi_squared_N=torch.rand(len(mask_N), generator=generator),
        greedy_R=torch.randn(6, generator=generator),
    )
    return dataclasses.replace(given, **changes)


@given(SEEDS)
@settings(max_examples=30, deadline=None)
def test_vtrace_on_policy_is_gae(seed):
    x = draw_input(seed)
    x = dataclasses.replace(x, behaviour_N=x.prox_N)
    inside = x.mask_N > 0
    found, (_, returns_N) = vtrace(x), raw_gae(x)
    torch.testing.assert_close(found.returns_N[inside], returns_N[inside], rtol=1e-4, atol=1e-4)
    x = dataclasses.replace(x, lam=1.0)
    torch.testing.assert_close(vtrace(x).advantages_N[inside], raw_gae(x)[0][inside], rtol=1e-4, atol=1e-4)


def test_vtrace_without_weight_trusts_the_critic():
    x = draw_input(3, rho_max=0.0)
    inside, found = x.mask_N > 0, vtrace(draw_input(3, rho_max=0.0))
    assert not found.advantages_N[inside].any()
    x = draw_input(3, rho_max=0.0, c_max=0.0)
    torch.testing.assert_close(vtrace(x).returns_N[inside], x.values_N[inside])


def test_vtrace_cuts_the_weight_of_a_likely_token():
    x = draw_input(3)
    far = dataclasses.replace(x, behaviour_N=x.prox_N - 5.0)
    near = dataclasses.replace(x, behaviour_N=x.prox_N)
    torch.testing.assert_close(vtrace(far).advantages_N, vtrace(near).advantages_N)


@pytest.mark.parametrize("name", ADVANTAGES)
@given(seed=SEEDS)
@settings(max_examples=10, deadline=None)
def test_an_advantage_does_not_depend_on_what_the_mask_hides(name, seed):
    x = draw_input(seed)
    hidden = x.mask_N == 0
    poisoned = {
        field: torch.where(hidden, math.nan, getattr(x, field))
        for field in ("rewards_N", "values_N", "prox_N", "behaviour_N", "sum_pi_squared_N")
    }
    clean, found = ADVANTAGES[name](x), ADVANTAGES[name](dataclasses.replace(x, **poisoned))
    torch.testing.assert_close(found.advantages_N[~hidden], clean.advantages_N[~hidden])


@pytest.mark.parametrize("name", ADVANTAGES)
def test_an_advantage_of_a_batch_without_a_token_is_finite(name):
    x = draw_input(1)
    x = dataclasses.replace(x, mask_N=x.mask_N * 0)
    found = ADVANTAGES[name](x)
    assert found.advantages_N.isfinite().all()
    assert found.returns_N.isfinite().all()


@pytest.mark.parametrize("mode", MODES)
@given(seed=SEEDS, cut=st.integers(0, 5))
@settings(max_examples=20, deadline=None)
def test_any_cut_into_microbatches_sums_to_the_whole(mode, seed, cut):
    rows, mask_N, generator = draw_rows(seed)
    loss_N = torch.randn(len(mask_N), generator=generator)
    totals = {
        "num_tokens": float(mask_N.sum()),
        "num_rows": float((rows.count(mask_N) > 0).sum()),
        "loss_scale": 7.0,
    }
    parts = 0.0
    for chosen_N in (rows.row_N < cut, rows.row_N >= cut):
        numbers = rows.row_N[chosen_N] - (0 if bool(chosen_N.any()) and cut and chosen_N[0] else cut)
        part = Rows(numbers.clamp(min=0), rows.num_rows)
        parts += float(aggregate(loss_N[chosen_N], mask_N[chosen_N], part, mode, **totals))
    whole = float(aggregate(loss_N, mask_N, rows, mode, **totals))
    assert parts == pytest.approx(whole, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_a_loss_without_a_token_has_no_gradient_and_no_nan(name):
    rows = padded_rows(2, 3)
    logprobs_N = torch.randn(6).requires_grad_()
    x = LossInput(logprobs_N, torch.randn(6), torch.randn(6), torch.zeros(6), rows)
    tokens = POLICY_LOSSES[name](x)
    loss = aggregate(tokens.loss_N, x.mask_N, rows, "token-mean", num_tokens=0, num_rows=0)
    loss.backward()
    assert float(loss.detach()) == 0.0
    assert not logprobs_N.grad.any()
    assert all(value.isfinite().all() for value in tokens.metrics.values())


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("is_normalized", [False, True])
def test_a_correction_of_a_batch_without_a_token_is_finite(level, is_normalized):
    rows, nothing_N = padded_rows(2, 3), torch.zeros(6)
    correction = Correction(level=level, is_batch_normalized=is_normalized)
    assert importance_weights(torch.randn(6), nothing_N, rows, correction).isfinite().all()
    assert not reject(torch.randn(6), nothing_N, rows, parse_rejections("seq_max_k2", 0.1)).any()


def test_the_geometric_weight_is_the_mean_log_ratio_of_the_row():
    delta, rows = torch.tensor([0.2, 0.4, -0.3]), Rows(torch.tensor([0, 0, 1]), 2)
    found = importance_weights(delta, torch.ones(3), rows, Correction(level="geometric"))
    assert found.tolist() == pytest.approx([math.exp(0.3), math.exp(0.3), math.exp(-0.3)])


def test_normalized_weights_have_mean_one():
    rows, mask_N, generator = draw_rows(5)
    correction = Correction(level="token", is_batch_normalized=True)
    weights_N = importance_weights(torch.randn(len(mask_N), generator=generator), mask_N, rows, correction)
    assert float((weights_N * mask_N).sum() / mask_N.sum()) == pytest.approx(1.0)


@pytest.mark.parametrize("option", OPTIONS)
def test_an_option_keeps_equal_policies_and_rejects_distant_ones(option):
    threshold = "0.5_2.0" if option.endswith("k1") else "0.1"
    rejections, rows, mask_N = parse_rejections(option, threshold), padded_rows(2, 2), torch.ones(4)
    assert reject(torch.zeros(4), mask_N, rows, rejections).all()
    far = torch.tensor([3.0, 3.0, 0.0, 0.0])
    assert reject(far, mask_N, rows, rejections).tolist() == [0, 0, 1, 1]
    found = rejection_metrics(far, mask_N, rows, rejections)
    assert found[f"rollout_rs_{option}_masked_fraction"] == pytest.approx(0.5)


def test_the_bound_of_k1_is_on_the_reciprocal_ratio_as_in_verl():
    delta, rows, mask_N = torch.tensor([math.log(1.5)]), padded_rows(1, 1), torch.ones(1)
    assert not reject(delta, mask_N, rows, parse_rejections("token_k1", "0.9_2.0")).any()
    assert reject(delta, mask_N, rows, parse_rejections("token_k1", "0.4_1.2")).all()


@pytest.mark.parametrize(
    ("options", "thresholds"),
    [
        ("token_k4", "1"),
        ("token_k1", "2.0_0.5"),
        ("token_k2", "0.5_2.0"),
        ("token_k1,token_k2", "1,2,3"),
        ("token_k1", "x"),
        ("token_k1", ""),
        ("token_k2", "-1"),
    ],
)
def test_a_rejection_that_means_nothing_is_refused(options, thresholds):
    with pytest.raises(ValueError, match=r"token_k|threshold"):
        parse_rejections(options, thresholds)


def test_loglinear_prox_stands_between_behaviour_and_current_by_age():
    current, behaviour = torch.full((4,), -1.0, requires_grad=True), torch.full((4,), -2.0)
    found = interpolate_prox(current, behaviour, torch.tensor([0, 1, 3, 99]))
    assert found.tolist() == pytest.approx([-2.0, -1.5, -1.25, -1.01])
    assert not found.requires_grad


def test_m2po_leaves_out_the_largest_until_the_moment_fits_and_keeps_one():
    delta, mask_N = torch.tensor([0.1, -0.1, 3.0, 0.2, 9.0]), torch.tensor([1.0, 1, 1, 1, 0])
    assert keep_second_moment(delta, mask_N, 0.04).tolist() == [1, 1, 0, 1, 0]
    assert keep_second_moment(delta * 100, mask_N, 0.04).sum() == 1


@pytest.mark.parametrize("kind", [*KINDS, "k1+", "k3+"])
def test_kl_is_zero_between_equal_policies(kind):
    logprobs = torch.randn(5)
    assert not kl_penalty(logprobs, logprobs, kind).any()


def test_the_reward_penalty_ignores_what_is_masked_and_empty_rows_count_as_zero():
    rows = Rows(torch.tensor([0, 0, 1]), 2)
    reference = torch.tensor([0.0, math.nan, 0.0])
    found = measure_penalty(torch.ones(3), reference, torch.tensor([1.0, 0, 0]), rows, "k1")
    assert found.kl_N.tolist() == [1.0, 0.0, 0.0]
    assert found.mean == pytest.approx(0.5)


def test_the_adaptive_controller_moves_towards_its_target_and_by_a_fifth_at_most():
    controller = AdaptiveKl(0.001, target=0.015, horizon=100)
    controller.update(10.0, 50)
    assert controller.value == pytest.approx(0.001 * 1.1)
    controller.update(0.0, 50)
    assert controller.value == pytest.approx(0.001 * 1.1 * 0.9)
    controller.turn_off()
    controller.update(10.0, 50)
    assert controller.value == 0.0
    fixed = FixedKl(0.3)
    fixed.update(10.0, 50)
    assert fixed.value == 0.3


def test_the_value_clip_holds_back_an_improvement_beyond_it():
    tokens = value_loss(torch.tensor([1.0, 0.1]), torch.zeros(2), torch.tensor([1.0, 1.0]), 0.5)
    assert tokens.loss_N.tolist() == pytest.approx([0.5 * 0.25, 0.5 * 0.81])
    assert tokens.metrics["critic/vf_clipfrac"].tolist() == [1.0, 0.0]


def test_whitening_of_one_token_only_shifts_and_of_none_is_finite():
    one = whiten(torch.tensor([3.0, 5.0]), torch.tensor([1.0, 0.0]))
    assert float(one[0]) == pytest.approx(0.0, abs=1e-6)
    assert whiten(torch.tensor([3.0, 5.0]), torch.zeros(2)).isfinite().all()


def test_whitening_over_two_ranks_is_that_of_their_batches_together():
    x, ones = torch.randn(12, generator=torch.Generator().manual_seed(0)), torch.ones(6)
    wanted = whiten(x, torch.ones(12))
    mean = x.mean()
    sums = iter([torch.stack([x.sum(), torch.tensor(12.0)]), (x - mean).square().sum()])
    torch.testing.assert_close(whiten(x[:6], ones, over_ranks=lambda _: next(sums)), wanted[:6])


def test_metrics_of_an_empty_row_are_those_of_equal_policies():
    rows, mask_N = Rows(torch.tensor([0, 0, 1]), 2), torch.tensor([1.0, 1, 0])
    found = off_policy_metrics(torch.zeros(3), torch.full((3,), 0.0), mask_N, rows)
    assert found["training_ppl"] == pytest.approx(1.0)
    weights = importance_metrics(torch.zeros(3), mask_N, rows, Correction(level="sequence"))
    assert weights["rollout_is_min"] == weights["rollout_is_max"] == 1.0
