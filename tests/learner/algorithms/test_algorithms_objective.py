"""The objective: KL, entropy, critic, prox and rejection in one loss, and what configuration it refuses."""

import dataclasses
import math
from pathlib import Path

import pytest
import torch

from asyncrl.core import metrics as names
from asyncrl.core.config.load import load_config
from asyncrl.core.config.tree import AlgorithmSection
from asyncrl.core.errors import ConfigError
from learner.algorithms.centre import rows_of
from learner.algorithms.objective import describe, make_objective
from learner.batching.batch import build_batch
from learner.guard.hooks import KlFallback
from tests.learner.parts.samples import make_groups

CONFIGS = Path(__file__).resolve().parents[3] / "configs"


def make(**changes):
    return make_objective(AlgorithmSection(**changes), max_lag=3, max_response_tokens=24)


def open_batch(noise=0.2, *, versions=None, step=0):
    batch = build_batch(make_groups(4), step, versions or {1: 0})
    generator = torch.Generator().manual_seed(1)
    columns = [torch.randn(batch.num_tokens, generator=generator) for _ in range(3)]
    batch = dataclasses.replace(
        batch, reference_N=batch.behaviour_N + 0.1 * columns[0], values_N=0.1 * columns[1]
    )
    return batch, batch.behaviour_N + noise * columns[2]


def train(objective, batch, logprobs_N, prox_N=None):
    prepared, metrics = objective.prepare(batch, prox_N)
    leaf_N = logprobs_N.clone().requires_grad_()
    entropy_N = leaf_N.square()
    loss, found = objective.loss(leaf_N, entropy_N, prepared)
    loss.backward()
    return float(loss.detach()), leaf_N.grad, metrics | {name: float(v) for name, v in found.items()}


def test_kl_in_the_loss_adds_its_coefficient_times_the_estimate():
    batch, logprobs_N = open_batch()
    plain, _, _ = train(make(), batch, logprobs_N, logprobs_N)
    loss, _, metrics = train(make(kl={"coef": 0.3, "estimator": "k2"}), batch, logprobs_N, logprobs_N)
    wanted = (0.5 * (logprobs_N - batch.reference_N).square() * batch.loss_mask_N).sum()
    assert metrics["actor/kl_loss"] == pytest.approx(float(wanted / batch.totals.num_tokens), rel=1e-5)
    assert loss == pytest.approx(plain + 0.3 * metrics["actor/kl_loss"], rel=1e-5)
    assert metrics["actor/kl_coef"] == pytest.approx(0.3)


def test_the_entropy_bonus_lowers_the_loss_and_carries_a_gradient():
    batch, logprobs_N = open_batch()
    plain, grad, _ = train(make(), batch, logprobs_N, logprobs_N)
    loss, other, metrics = train(make(entropy_coeff=0.5), batch, logprobs_N, logprobs_N)
    assert loss == pytest.approx(plain - 0.5 * metrics["actor/entropy_loss"], rel=1e-5)
    wanted = -0.5 * 2 * logprobs_N * batch.loss_mask_N / batch.totals.num_tokens
    torch.testing.assert_close(other - grad, wanted, rtol=1e-4, atol=1e-6)


def test_kl_off_the_reward_changes_the_advantage_and_the_controller_follows():
    kl = {"coef": 0.1, "where": "reward", "estimator": "k1", "adaptive": {"horizon": 100}}
    objective = make(advantage="gae", kl=kl, drop_constant_groups=False)
    batch, logprobs_N = open_batch()
    plain, _ = make(advantage="gae").prepare(batch, logprobs_N)
    prepared, metrics = objective.prepare(batch, logprobs_N)
    assert not torch.allclose(prepared.returns_N, plain.returns_N)
    assert metrics["actor/reward_kl_penalty_coeff"] == pytest.approx(0.1)
    objective.update_controllers({"actor/reward_kl_penalty": 5.0}, 50)
    assert objective.read_controllers() == {"kl_coef": pytest.approx(0.1 * 1.1)}
    objective.restore_controllers({"kl_coef": 0.7})
    assert objective.read_controllers() == {"kl_coef": 0.7}
    assert isinstance(objective, KlFallback)
    assert objective.fall_back_kl()
    objective.update_controllers({"actor/reward_kl_penalty": 5.0}, 50)
    assert objective.read_controllers() == {"kl_coef": 0.0}
    assert not make().fall_back_kl()


def test_a_resume_keeps_what_adaptation_made_of_the_coefficient_and_takes_a_changed_fixed_one():
    kept = {"kl_coef": 0.7}
    adaptive, fixed = (make(kl={"coef": 0.3, **more}) for more in ({"adaptive": {}}, {}))
    for objective in (adaptive, fixed):
        objective.restore_controllers(kept)
    assert adaptive.read_controllers() == kept and adaptive.kl.controller.value == 0.7
    assert fixed.read_controllers() == {} and fixed.kl.controller.value == 0.3
    adaptive.restore_controllers(fixed.read_controllers())
    assert adaptive.kl.controller.value == 0.7, "a fixed one has kept nothing"
    for objective in (adaptive, fixed):
        assert objective.fall_back_kl()
        assert objective.kl.controller.value == 0.0


def test_gae_gives_the_critic_its_targets_and_the_value_loss_splits_over_microbatches():
    objective = make(advantage="gae", gamma=0.99, lam=0.95, value_clip=0.2)
    batch, logprobs_N = open_batch()
    batch, _ = objective.prepare(batch, logprobs_N)
    values_N = (batch.values_N + 0.4).requires_grad_()
    loss, metrics = objective.value_loss(values_N, batch)
    loss.backward()
    assert values_N.grad[batch.loss_mask_N > 0].abs().sum() > 0
    assert not values_N.grad[batch.loss_mask_N == 0].any()
    assert set(metrics) == {"critic/loss", "critic/vf_loss", "critic/vf_clipfrac", "critic/vpred_mean"}
    microbatches = batch.balance_microbatches(batch.num_tokens // 2)
    assert len(microbatches) > 1
    new_N = values_N.detach()
    parts = sum(float(objective.value_loss(new_N[part.origin_N], part)[0]) for part in microbatches)
    assert parts == pytest.approx(float(loss.detach()), rel=1e-5)


def test_returns_run_through_tokens_that_are_masked_for_their_age():
    objective = make(advantage="gae", correction="disabled", veto=0)
    batch, logprobs_N = open_batch()
    whole, _ = objective.prepare(batch, logprobs_N)
    is_first_N = rows_of(batch).remaining(batch.loss_mask_N) > 2
    aged, _ = objective.prepare(batch.with_mask(batch.loss_mask_N * ~is_first_N), logprobs_N)
    torch.testing.assert_close(aged.returns_N, whole.returns_N)


@pytest.mark.parametrize(
    ("changes", "match"), [({"advantage": "gae"}, "critic"), ({"kl": {"coef": 0.1}}, "reference")]
)
def test_what_the_batch_lacks_is_a_configuration_error(changes, match):
    batch, logprobs_N = open_batch()
    bare = dataclasses.replace(batch, values_N=None, reference_N=None)
    with pytest.raises(ConfigError, match=match):
        make(**changes).prepare(bare, logprobs_N)


def test_loglinear_prox_needs_no_pass_and_weighs_by_age():
    objective = make(prox="loglinear", veto=0)
    assert not objective.needs_prox
    batch, logprobs_N = open_batch(versions={1: 0}, step=2)
    loss, _, _ = train(objective, batch, logprobs_N)
    prox_N = batch.behaviour_N + 2 / 3 * (logprobs_N - batch.behaviour_N)
    same, _, _ = train(make(veto=0), batch, logprobs_N, prox_N)
    assert loss == pytest.approx(same, rel=1e-4)


def test_behaviour_prox_is_the_bypass():
    batch, logprobs_N = open_batch()
    one = train(make(prox="behaviour", correction="disabled", veto=0), batch, logprobs_N)
    other = train(make(correction="bypass_ppo_clip", veto=0), batch, logprobs_N)
    assert one[0] == pytest.approx(other[0], rel=1e-6)
    torch.testing.assert_close(one[1], other[1])


@pytest.mark.parametrize("is_compat", [False, True])
def test_rejected_tokens_stay_in_the_denominator_unless_verl_is_followed(is_compat):
    objective = make(
        correction="disabled",
        rejection={"token_k2": 0.02},
        veto=0,
        verl_compat=is_compat,
    )
    batch, logprobs_N = open_batch()
    prepared, metrics = objective.prepare(batch, logprobs_N)
    kept = float(prepared.loss_mask_N.sum())
    assert 0 < kept < float(batch.loss_mask_N.sum())
    assert metrics["rollout_corr/rollout_rs_token_k2_masked_fraction"] > 0
    loss, _ = objective.loss(logprobs_N, logprobs_N, prepared)
    wanted = -(prepared.advantages_N * prepared.loss_mask_N).sum()
    denominator = kept if is_compat else prepared.totals.num_tokens
    assert float(loss) == pytest.approx(float(wanted) / denominator, rel=1e-5)


def test_a_rejection_leaves_the_tokens_it_rejects_without_gradient():
    batch, logprobs_N = open_batch()
    objective = make(correction="bypass_ppo_clip", rejection={"token_k2": 0.02}, veto=0)
    _, grad, _ = train(objective, batch, logprobs_N)
    far_N = 0.5 * (logprobs_N - batch.behaviour_N).square() > 0.02
    assert far_N.any()
    assert not grad[far_N].any()
    assert grad.any()


REFUSED = [
    ({"advantage": "grpo", "gamma": 0.9}, "gamma does nothing"),
    ({"advantage": "reinforce_plus_plus", "lam": 0.9}, "lam does nothing"),
    ({"value_clip": 0.2}, "value_clip does nothing"),
    ({"advantage": "optimal_token_baseline", "correction": "bypass_ppo_clip"}, "recomputed prox"),
    ({"advantage": "tir_optimal_token_baseline", "prox": "loglinear"}, "recomputed prox"),
    ({"correction": "bypass_pg_is", "loss": "gspo"}, "gspo does nothing"),
    ({"correction": "bypass_pg_geo_rs", "loss": "gspo"}, "gspo does nothing"),
    ({"loss": "sapo", "aggregation": "token-sum"}, "aggregation does nothing"),
    ({"loss": "gspo", "dual_clip": 4.0}, "dual_clip does nothing"),
    ({"loss": "m2po", "correction": "bypass_ppo_clip"}, "m2po"),
    ({"correction": "disabled", "is_threshold": 3.0}, "is_threshold does nothing"),
    ({"correction": "decoupled_token_icepop", "is_threshold": 3.0}, "is_threshold does nothing"),
    ({"correction": "disabled", "normalize_weights": True}, "normalize_weights does nothing"),
    ({"correction": "bypass_pg_is", "normalize_weights": True}, "whole batch"),
    ({"prox": "loglinear", "normalize_weights": True}, "whole batch"),
    ({"advantage": "vtrace"}, "count them twice"),
    ({"advantage": "vtrace", "correction": "disabled", "prox": "loglinear"}, "recomputed prox"),
    ({"correction": "decoupled_geo_rs", "rejection": {"token_k2": 1}}, "count twice"),
    ({"rejection": {"token_k9": 1}}, "not known"),
    ({"prox": "loglinear", "correction": "bypass_ppo_clip"}, "prox: loglinear does nothing"),
    ({"prox": "behaviour"}, "which are the same"),
    ({"kl": {"adaptive": {}}}, "kl does nothing"),
    ({"correction": "math:pi"}, "no Correction"),
]


@pytest.mark.parametrize(("changes", "match"), REFUSED)
def test_what_counts_twice_or_does_nothing_is_refused(changes, match):
    with pytest.raises(ConfigError, match=match):
        make(**changes)


def test_all_problems_are_told_at_once():
    with pytest.raises(ConfigError, match=r"gamma does nothing.*normalize_weights does nothing"):
        make(gamma=0.9, correction="disabled", normalize_weights=True)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "importance weights prox / behaviour per token, cut at 2"),
        ({"correction": "bypass_ppo_clip"}, "centred on the sampler's log-probs"),
        ({"correction": "bypass_pg_token_icepop"}, "current / behaviour per token, 0 outside [0.5, 5]"),
        ({"correction": "decoupled_geo_rs"}, "rejected by seq_mean_k1"),
        ({"prox": "loglinear"}, "interpolated by age"),
        ({"correction": "disabled"}, "no importance weights"),
        ({"kl": {"coef": 0.001, "adaptive": {"target": 0.015}}}, "adaptive towards 0.015"),
    ],
)
def test_what_is_active_is_said_in_words(changes, words):
    assert words in describe(AlgorithmSection(**changes))


@pytest.mark.parametrize("name", ["ppo", "grpo", "dapo"])
def test_a_shipped_algorithm_is_valid(name):
    section = load_config(CONFIGS / f"{name}.yaml").algorithm
    objective = make_objective(section, max_lag=4, max_response_tokens=64)
    assert objective.needs_values is objective.needs_reference is (name == "ppo")
    assert section.dual_clip == 3.0
    if name == "ppo":
        assert (section.gamma, section.lam, section.value_clip) == (0.99, 0.95, 0.2)
        assert (section.kl.coef, section.kl.adaptive.target, section.kl.adaptive.horizon) == (
            0.001,
            0.015,
            10000,
        )


@pytest.mark.parametrize(
    "changes", [{}, {"advantage": "gae"}, {"rejection": {"seq_mean_k1": "0.5_2.0", "token_k3": 0.1}}]
)
def test_every_metric_is_in_the_registry(changes):
    batch, logprobs_N = open_batch(0.01)
    _, _, metrics = train(make(**changes, kl={"coef": 0.1}), batch, logprobs_N, logprobs_N)
    assert not names.unknown_names(metrics)
    assert all(math.isfinite(value) for value in metrics.values())


@pytest.mark.parametrize("advantage", ["grpo", "rloo", "reinforce_plus_plus", "opo", "gae"])
def test_an_answer_that_is_masked_whole_trains_nothing_and_its_reward_still_counts_in_its_group(advantage):
    groups = make_groups(4)
    *others, last = groups[0].trajectories
    cut = dataclasses.replace(last, loss_mask=last.loss_mask * 0, finish_reason="length")
    masked = dataclasses.replace(groups[0], trajectories=(*others, cut))
    objective = make(advantage=advantage, drop_constant_groups=False)
    plain, batch = (build_batch([one, *groups[1:]], 0, {1: 0}) for one in (groups[0], masked))
    assert batch.totals.num_rows == plain.totals.num_rows - 1
    plain, batch = (dataclasses.replace(one, values_N=torch.zeros(one.num_tokens)) for one in (plain, batch))
    loss, gradient_N, _ = train(objective, batch, batch.behaviour_N + 0.1, batch.behaviour_N)
    assert math.isfinite(loss)
    row = len(others)
    assert not gradient_N[batch.row_N == row].any() and gradient_N.isfinite().all()
    if advantage in ("grpo", "rloo"):
        found, wanted = (objective.prepare(one, one.behaviour_N)[0].advantages_N for one in (batch, plain))
        torch.testing.assert_close(found[batch.row_N != row], wanted[batch.row_N != row])
