"""Whole simulated runs against what must hold, and against what can be worked out by hand."""

from dataclasses import replace

import pytest

from asyncrl.core.errors import ConfigError
from asyncrl.planner.rates import Rates
from asyncrl.planner.setting import MAX_MEMBERS
from asyncrl.planner.simulation import Simulation
from tests.planner.planner.runs import RATES, make_setting, run

FAST = ((1.0, 1e6), (1000.0, 1e9))


def test_the_same_seed_makes_the_same_history():
    first, second, other = (run(make_setting(run_seed=seed)) for seed in (0, 0, 1))
    assert first.outcome() == second.outcome() != other.outcome()


def test_a_learner_with_fast_replicas_takes_its_own_seconds_per_step():
    rates = replace(RATES, decode=FAST, transfer_s=0.0, swap_s=0.0)
    found = run(make_setting("staleness.max_lag=2"), rates).outcome()
    expected = rates.learner_part_s(found.tokens_per_step, is_last=True) + rates.publish_s
    assert found.step_s == pytest.approx(expected, rel=0.03)
    assert found.learner_idle < 0.03


def test_a_synchronous_run_takes_generation_and_training_one_after_the_other():
    alike = ((1.0, 100.0), (1000.0, 100_000.0))
    rates = Rates(alike, step_s=1.0, step_s_per_token=0.0, publish_s=0.0, transfer_s=0.5, swap_s=0.25)
    same_lengths = "rollout.response_tokens=lognormal:0:100"
    setting = make_setting("staleness.max_lag=0", same_lengths, "rollout.max_sequences=32")
    found = run(setting, rates, steps=20).outcome()
    assert found.step_s == pytest.approx(1.0 + 1.0 + 0.5 + 0.25, rel=0.02)  # train, sample, transfer, swap
    assert found.lag_mean == 0.0
    assert found.learner_idle == pytest.approx(1.75 / 2.75, abs=0.02)


def test_a_lone_replica_gets_the_rest_of_a_step_as_its_groups_end():
    setting = make_setting("staleness.max_lag=0", "rollout.replicas=1", "rollout.max_sequences=8")
    found = run(setting, steps=12).outcome()
    assert max(found.step_times_s) < 12.0, "no call lies for as long as it may"


@pytest.mark.parametrize("policy", ["mask", "drop", "wait"])
def test_no_policy_trains_a_token_over_the_bound_and_the_account_adds_up(policy):
    simulation = run(make_setting("staleness.max_lag=1", f"staleness.policy={policy}"))
    found, records = simulation.outcome(), simulation.watch.records
    assert found.residue == 0
    for one in records:
        over = sum(count for lag, count in one.sampled_lags.items() if lag > 1)
        assert (one.num_masked, max(one.lags) <= 1) == (over, True)
    if policy == "mask":
        assert found.masked_share > 0.0
    elif policy == "drop":
        assert found.masked_share < 0.05  # the last attempt at a prompt is masked
    else:
        assert max(max(one.sampled_lags) for one in records) <= 1, "what was sampled was within the bound"


def test_a_run_that_would_stand_still_is_refused():
    with pytest.raises(ConfigError, match=r"nothing generates: rollout\.replicas is 0"):
        Simulation(make_setting(replicas=0), RATES, seed=0, steps=4).run_to_end()
    slow = replace(RATES, transfer_s=1e9)
    with pytest.raises(ConfigError, match="stands still after 0 of 4 steps"):
        Simulation(make_setting(), slow, seed=0, steps=4).run_to_end()
    with pytest.raises(ConfigError, match="stands still after 1 of 1 steps"):
        Simulation(make_setting(), RATES, seed=0, steps=1).run_to_end()


def test_a_tightened_bound_admits_fewer_groups_than_the_configured_one():
    loose = run(make_setting("staleness.max_lag=4")).outcome()
    tight = run(make_setting("staleness.max_lag=4", tightened_to=0)).outcome()
    assert loose.lag_mean > 1.0 > tight.lag_mean
    assert tight.step_s > 1.5 * loose.step_s


def test_groups_of_zero_variance_are_replaced_by_new_prompts():
    plain, uniform = (run(make_setting(zero_variance_share=share)).outcome() for share in (0.0, 0.5))
    assert uniform.residue == 0
    assert uniform.step_s > 1.3 * plain.step_s


def test_replicas_of_a_large_fleet_share_members_and_swap_one_after_another():
    setting = make_setting("rollout.replicas=40", "learner.groups_per_step=64")
    assert setting.cohort == -(-40 // MAX_MEMBERS)
    found = run(setting, replace(RATES, swap_s=0.05), steps=6).outcome()
    assert found.spread_s == pytest.approx(0.05 + 40 * 0.05, rel=0.1)  # a transfer, then 40 swaps


def test_swaps_side_by_side_shorten_the_sync_of_a_large_fleet():
    setting = make_setting("rollout.replicas=40", "learner.groups_per_step=64", "weight_sync.parallelism=40")
    found = run(setting, replace(RATES, swap_s=0.05), steps=6).outcome()
    assert found.spread_s < 0.3
