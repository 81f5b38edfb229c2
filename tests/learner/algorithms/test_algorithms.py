"""Rules of the algorithms that hold whatever anyone else computes."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.core.config.tree import AlgorithmSection
from asyncrl.core.errors import ConfigError
from learner.algorithms import advantage
from learner.algorithms.advantage import by_group, groups
from learner.algorithms.aggregation import MODES, aggregate
from learner.algorithms.centre import rows_of
from learner.algorithms.correction import Correction, importance_weights, make_corrections, veto_rows
from learner.algorithms.diagnostics import divergence as diagnostics
from learner.algorithms.losses import POLICY_LOSSES, Clip, LossInput
from learner.algorithms.losses.clipped import vanilla
from learner.algorithms.objective import make_objective
from learner.algorithms.registry import resolve
from learner.algorithms.rows import Rows, masked_mean, padded_rows
from learner.batching.batch import build_batch
from tests.learner.parts.samples import make_groups

COMPARING = {
    "grpo": groups.grpo,
    "dr_grpo": groups.dr_grpo,
    "rloo": groups.rloo,
    "grpo_passk": groups.grpo_passk,
    "opo": lambda scores_R, group_R: groups.opo(scores_R, group_R, torch.ones(len(scores_R))),
}


def make_padded(num_rows=6, num_columns=9, seed=0):
    """Return log-probs, old, advantages and a mask with holes, empty tails and one empty row [B, T]."""
    generator = torch.Generator().manual_seed(seed)
    old, noise, advantages = (torch.randn(num_rows, num_columns, generator=generator) for _ in range(3))
    mask = (torch.rand(num_rows, num_columns, generator=generator) < 0.7).float()
    mask[:, -2:], mask[2] = 0.0, 0.0
    return old + 0.3 * noise, old, advantages, mask


def drop_columns(x, lengths):
    return torch.cat([row[:length] for row, length in zip(x, lengths, strict=True)])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("loss", sorted(POLICY_LOSSES))
def test_packed_and_padded_give_the_same_loss(loss, mode):
    lengths = [7, 5, 3, 7, 6, 7]
    x = make_padded()
    mask = x[3] * (torch.arange(9) < torch.tensor(lengths)[:, None])
    padded = [part.reshape(-1) for part in (*x[:3], mask)]
    packed = [drop_columns(part, lengths) for part in (*x[:3], mask)]
    packed_rows = Rows(torch.repeat_interleave(torch.arange(6), torch.tensor(lengths)), 6)
    found = []
    for (logprobs_N, old_N, advantages_N, mask_N), rows in (
        (padded, padded_rows(6, 9)),
        (packed, packed_rows),
    ):
        tokens = POLICY_LOSSES[loss](LossInput(logprobs_N, old_N, advantages_N, mask_N, rows))
        found.append(
            aggregate(tokens.loss_N, mask_N, rows, mode, num_tokens=float(mask_N.sum()), num_rows=5.0)
        )
    assert float(found[0]) == pytest.approx(float(found[1]), rel=1e-5)


@pytest.mark.parametrize("mode", MODES)
def test_parts_of_any_cut_between_rows_sum_to_the_whole(mode):
    loss, _, _, mask = make_padded(seed=3)
    denominators = {"num_tokens": float(mask.sum()), "num_rows": 5.0, "loss_scale": 9.0}

    def share(start, end):
        rows = padded_rows(end - start, 9)
        return aggregate(loss[start:end].reshape(-1), mask[start:end].reshape(-1), rows, mode, **denominators)

    for cut in range(1, 6):
        assert float(share(0, cut) + share(cut, 6)) == pytest.approx(float(share(0, 6)), rel=1e-5, abs=1e-7)


def test_values_outside_the_mask_never_leak():
    mask = torch.tensor([1.0, 0.0, 1.0])
    assert float(masked_mean(torch.tensor([2.0, math.nan, 4.0]), mask)) == pytest.approx(3.0)
    rows = padded_rows(1, 3)
    loss = aggregate(torch.tensor([2.0, math.inf, 4.0]), mask, rows, "token-mean", num_tokens=2, num_rows=1)
    assert float(loss) == 3.0


@pytest.mark.parametrize("mode", MODES)
def test_a_batch_without_a_token_has_loss_zero(mode):
    assert (
        float(aggregate(torch.ones(4), torch.zeros(4), padded_rows(2, 2), mode, num_tokens=0, num_rows=0))
        == 0.0
    )


@given(st.floats(-100, 100, width=32), st.integers(2, 9))
@settings(max_examples=50, deadline=None)
def test_a_group_of_equal_rewards_has_advantage_exactly_zero(reward, size):
    for estimate in COMPARING.values():
        assert not estimate(torch.full((size,), reward), torch.zeros(size, dtype=torch.long)).any()


def test_advantages_do_not_depend_on_the_order_of_rows():
    rewards, labels = torch.tensor([1.0, 0, 0, 3, 1, 2]), torch.tensor([5, 5, 5, 2, 2, 2])
    order = torch.tensor([4, 0, 3, 5, 2, 1])
    for estimate in COMPARING.values():
        torch.testing.assert_close(estimate(rewards[order], labels[order]), estimate(rewards, labels)[order])


def test_dual_clip_bounds_the_loss_of_a_bad_token_that_became_likely():
    x = LossInput(
        torch.tensor([3.0]),
        torch.zeros(1),
        -torch.ones(1),
        torch.ones(1),
        padded_rows(1, 1),
        Clip(0.2, 0.28, 3.0),
    )
    assert float(vanilla(x).loss_N) == 3.0


def test_the_upper_clip_is_its_own_bound():
    def make(ratio):
        log_ratio = torch.tensor([math.log(ratio)])
        return LossInput(log_ratio, torch.zeros(1), torch.ones(1), torch.ones(1), padded_rows(1, 1))

    assert float(vanilla(make(1.27)).loss_N) == pytest.approx(-1.27)
    assert float(vanilla(make(1.5)).loss_N) == pytest.approx(-1.28)


def test_weights_truncate_or_mask_and_never_carry_a_gradient():
    delta = torch.tensor([math.log(0.4), 0.0, math.log(3.0), math.log(9.0)], requires_grad=True)
    mask, rows = torch.ones(4), padded_rows(1, 4)
    truncated = importance_weights(delta, mask, rows, Correction(level="token", upper=2.0))
    assert truncated.tolist() == pytest.approx([0.4, 1.0, 2.0, 2.0])
    assert not truncated.requires_grad
    icepop = importance_weights(delta, mask, rows, make_corrections(2.0)["decoupled_token_icepop"])
    assert icepop.tolist() == pytest.approx([0.0, 1.0, 3.0, 0.0])


def test_one_absurd_token_vetoes_its_row_and_no_other():
    delta = torch.tensor([[0.0, -12.0, 0.0], [0.0, 0.0, 0.0], [-12.0, 0.0, 0.0]]).reshape(-1)
    mask = torch.tensor([[1.0, 1, 1], [1, 1, 0], [0, 1, 1]]).reshape(-1)
    kept = veto_rows(delta, mask, padded_rows(3, 3), 1e-4)
    assert kept.tolist() == [0, 0, 0, 1, 1, 0, 0, 1, 1]
    assert torch.equal(veto_rows(delta, mask, padded_rows(3, 3), 0.0), mask)


def test_equal_policies_have_no_divergence_and_full_sample_size():
    logprobs, _, _, mask = (part.reshape(-1) for part in make_padded())
    rows = padded_rows(6, 9)
    found = diagnostics.off_policy_metrics(logprobs, logprobs, mask, rows)
    assert (found["kl"], found["k3_kl"], found["chi2_token"]) == pytest.approx((0.0, 0.0, 0.0), abs=1e-6)
    weights = diagnostics.importance_metrics(logprobs * 0, mask, rows, Correction(level="token"))
    assert weights["rollout_is_eff_sample_size"] == pytest.approx(1.0)


def test_names_resolve_to_built_ins_or_imports_and_nothing_else():
    assert resolve("grpo", advantage.ADVANTAGES, "algorithm.advantage") is advantage.ADVANTAGES["grpo"]
    assert resolve("learner.algorithms.advantage.by_group:rloo", {}, "algorithm.advantage") is by_group.rloo
    for name in ("gpro", "no_such_module:f", "math:no_such_function"):
        with pytest.raises(ConfigError, match=r"algorithm\.advantage"):
            resolve(name, advantage.ADVANTAGES, "algorithm.advantage")


def prepared(correction, noise=0.4, **changes):
    batch = build_batch(make_groups(4), 0, {1: 0})
    objective = make_objective(
        AlgorithmSection(correction=correction, **changes), max_lag=0, max_response_tokens=24
    )
    generator = torch.Generator().manual_seed(1)
    logprobs_N = batch.behaviour_N + noise * torch.randn(batch.num_tokens, generator=generator)
    batch, metrics = objective.prepare(batch, logprobs_N if objective.needs_prox else None)
    return objective, batch, logprobs_N.clone().requires_grad_(), metrics


@pytest.mark.parametrize("correction", make_corrections(2.0))
def test_every_correction_trains(correction):
    # A rejection of rows keeps only those next to the sampler.
    objective, batch, logprobs_N, metrics = prepared(correction, 1e-4 if "_rs" in correction else 0.4)
    loss, found = objective.loss(logprobs_N, torch.zeros_like(logprobs_N), batch)
    loss.backward()
    assert logprobs_N.grad.abs().sum() > 0
    assert not logprobs_N.grad[batch.loss_mask_N == 0].any()
    assert all(math.isfinite(value) for value in [*metrics.values(), *map(float, found.values())])


def test_the_decoupled_loss_weights_the_clipped_one_by_prox_over_behaviour():
    objective, batch, logprobs_N, _ = prepared("decoupled_token_is", veto=0)
    loss, _ = objective.loss(logprobs_N, logprobs_N, batch)
    weights_N = (batch.prox_N - batch.behaviour_N).exp().clamp(max=2.0)
    wanted = -(weights_N * batch.advantages_N * batch.loss_mask_N).sum() / batch.totals.num_tokens
    assert float(loss) == pytest.approx(float(wanted), rel=1e-5)


def test_bypass_clips_around_the_behaviour_policy_without_weights():
    objective, batch, logprobs_N, _ = prepared("bypass_ppo_clip", veto=0)
    loss, _ = objective.loss(logprobs_N, logprobs_N, batch)
    tokens = vanilla(
        LossInput(
            logprobs_N, batch.behaviour_N, batch.advantages_N, batch.loss_mask_N, rows_of(batch), Clip()
        )
    )
    assert float(loss) == pytest.approx(
        float((tokens.loss_N * batch.loss_mask_N).sum() / batch.totals.num_tokens), rel=1e-5
    )


def test_vetoed_rows_stay_in_the_denominator():
    _, batch, _, metrics = prepared("decoupled_token_is", veto=0.5)
    assert metrics["rollout_corr/vetoed_share"] > 0
    assert batch.totals.num_trained < batch.totals.num_tokens == float(batch.counted_N.sum())
