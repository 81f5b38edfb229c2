"""Batches in parts, checkpoints and evaluations against what can be worked out by hand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from asyncrl.planner.actors.replica import PINNED
from asyncrl.planner.rates import Rates
from asyncrl.planner.simulation import Simulation
from asyncrl.planner.sweep import count_steps, recommend
from tests.planner.planner.runs import RATES, make_setting, run

FAST = replace(RATES, decode=((1.0, 1e6), (1000.0, 1e9)), transfer_s=0.0, swap_s=0.0)
ALIKE = Rates(
    ((1.0, 100.0), (1000.0, 100_000.0)), step_s=1.0, step_s_per_token=0.0, transfer_s=0.5, swap_s=0.25
)
"""Each request at 100 tokens/s, however many run."""
SECOND_LONG = ("rollout.response_tokens=lognormal:0:100", "rollout.engine=scripted")
IN_PARTS = ("learner.minibatches=1", "learner.stream=true")


def run_streamed(*settings: str, rates: Rates = RATES) -> Simulation:
    return run(make_setting("learner.minibatches=1", "staleness.max_lag=0", *settings), rates)


def test_streaming_shortens_the_step_of_skewed_answers_and_trains_the_same_tokens():
    slow = replace(RATES, step_s_per_token=1e-3)
    whole, parts = run_streamed(rates=slow), run_streamed(*IN_PARTS, rates=slow)
    before, after = whole.outcome(), parts.outcome()
    assert after.step_s < before.step_s - 0.5
    assert after.parts_per_step > 3.0 > before.parts_per_step == 1.0
    assert after.overlapped_s > 0.5 > before.overlapped_s == 0.0
    told = [[(one.num_tokens, one.lags) for one in found.watch.records] for found in (whole, parts)]
    assert told[0] == told[1]


def test_answers_that_end_together_leave_nothing_to_stream():
    settings = (*SECOND_LONG, "rollout.max_sequences=32")
    whole, parts = (run_streamed(*settings, *more, rates=ALIKE).outcome() for more in ((), IN_PARTS))
    assert parts.step_s == pytest.approx(whole.step_s, rel=0.02)


def test_every_part_but_the_last_costs_more_than_its_tokens():
    rates = replace(RATES, part_s=0.05)
    for one in run_streamed(*IN_PARTS, rates=rates).watch.records:
        expected = (
            rates.learner_part_s(one.num_tokens, is_last=True)
            + (one.num_parts - 1) * rates.part_s
            + rates.publish_s
        )
        assert one.step_s - one.wait_s == pytest.approx(expected, abs=0.01)


@pytest.mark.parametrize("policy", ["mask", "drop", "wait"])
def test_no_policy_trains_a_token_over_the_bound_in_a_part(policy):
    found = run(make_setting(*IN_PARTS, "staleness.max_lag=1", f"staleness.policy={policy}"))
    assert found.outcome().residue == 0
    assert all(max(one.lags) <= 1 for one in found.watch.records)


def test_the_copy_of_a_checkpoint_holds_the_learner_up_and_its_writing_does_not():
    setting = make_setting("checkpoint.every_steps=4", "staleness.max_lag=2")
    plain = run(setting, FAST).outcome()
    stalled = run(setting, replace(FAST, checkpoint_s=0.8, checkpoint_write_s=0.5), steps=26).outcome()
    stalls = [one.stall_s for one in run(setting, replace(FAST, checkpoint_s=0.8)).watch.records]
    assert stalled.step_s == pytest.approx(plain.step_s + 0.8 / 4, rel=0.03)
    assert stalls[:9] == pytest.approx([0, 0, 0, 0, 0.8, 0, 0, 0, 0.8])


def test_a_checkpoint_waits_for_the_one_before_or_is_left_out():
    rates = replace(FAST, checkpoint_s=0.1, checkpoint_write_s=10.0)
    patient, hasty = (
        run(make_setting("checkpoint.every_steps=2", f"checkpoint.max_stall_s={wait_s}"), rates).outcome()
        for wait_s in (30, 0)
    )
    assert (patient.num_skipped, hasty.num_skipped > 3) == (0, True)
    assert patient.step_s == pytest.approx((10.0 + 0.1) / 2, rel=0.1)  # one is written per two steps
    assert hasty.step_s < 1.0
    assert "checkpoints are left out" in "\n".join(recommend(hasty, [], make_setting()))


def test_a_checkpoint_is_none_before_it_is_written():
    commits: list[tuple[int, int]] = []
    setting = make_setting("checkpoint.every_steps=4", "staleness.max_lag=2")
    simulation = Simulation(setting, replace(FAST, checkpoint_write_s=0.9), seed=0, steps=12)
    simulation.world.observers.append(
        lambda _, what, told: (
            commits.append((told["step"], len(simulation.watch.records))) if what == "checkpointed" else None
        )
    )
    simulation.run_to_end()
    assert [step for step, _ in commits] == [4, 8]
    assert all(at > step for step, at in commits)


def evaluated(*settings: str) -> Simulation:
    several = ("eval.every_steps=10", "eval.prompts=64", "staleness.max_lag=0", "rollout.max_sequences=32")
    return run(make_setting(*SECOND_LONG, *several, *settings), ALIKE, steps=34)


def test_an_evaluation_takes_its_answers_in_turns_on_one_version():
    found = evaluated()
    outcome = found.outcome()
    assert (sorted(found.watch.ordered), outcome.num_evaluations) == ([1, 2, 3, 4], 3)  # of steps 0 to 30
    assert outcome.evaluation_s == pytest.approx(0.5 + 0.25 + 2.0, abs=0.1)  # transfer, swap, two turns


def test_replicas_share_the_parts_of_an_evaluation():
    outcome = evaluated("eval.replicas=2").outcome()
    assert outcome.evaluation_s == pytest.approx(0.5 + 2 * 0.25 + 1.0, abs=0.1)  # they swap in turn


def test_a_pinned_replica_samples_fewer_groups_meanwhile():
    plain = run(make_setting("staleness.max_lag=1")).outcome()
    held = run(make_setting("staleness.max_lag=1", "eval.every_steps=6", "eval.prompts=128")).outcome()
    assert held.step_s > 1.15 * plain.step_s
    assert held.residue == 0
    assert held.sampled_per_s < plain.sampled_per_s, "evaluations are no samples of the run"


def pinned(simulation: Simulation) -> list[str]:
    return [one.name for one in simulation.replicas if one.state == PINNED]


@pytest.mark.parametrize("replicas", [2, 40])
def test_a_pinned_replica_keeps_its_version_and_follows_afterwards(replicas):
    several = ("eval.every_steps=4", "eval.prompts=256", "eval.replicas=2", f"rollout.replicas={replicas}")
    setting = make_setting(*several, "learner.groups_per_step=32")
    simulation = Simulation(setting, RATES, seed=0, steps=12)
    swapped: list[str] = []

    def look(_: float, what: str, told: Mapping[str, Any]) -> None:
        if what == "serving" and told["name"] in pinned(simulation):
            swapped.append(told["name"])

    simulation.world.observers.append(look)
    simulation.run_to_end()
    assert not swapped
    assert len(simulation.watch.evaluated) >= 2
    assert_all_follow(simulation)


def assert_all_follow(simulation: Simulation) -> None:
    simulation.world.run(lambda: False, simulation.world.now + 60.0)
    assert {one.serving for one in simulation.replicas} == {max(simulation.watch.published)}


def test_a_swap_that_is_on_its_way_as_a_pin_begins_is_handed_over_anew():
    settings = ("eval.every_steps=1", "eval.prompts=16", "eval.replicas=2", "staleness.max_lag=4")
    slow_mail = replace(RATES, rpc_s=0.05, step_s=0.01, step_s_per_token=1e-6, publish_s=0.0)
    simulation = Simulation(make_setting(*settings), slow_mail, seed=0, steps=30)
    simulation.run_to_end()
    assert_all_follow(simulation)


def test_evaluations_that_overtake_one_another_are_said_to():
    found = evaluated("eval.prompts=640", "eval.every_steps=2")
    words = "\n".join(recommend(found.outcome(), [], found.setting))
    assert "An evaluation takes" in words
    assert "raise eval.replicas" in words


def test_the_steps_that_count_hold_whole_periods_of_what_is_rare():
    setting = make_setting("checkpoint.every_steps=100", "eval.every_steps=30")
    assert count_steps(setting, RATES, 80) == 80  # 20 to warm up, two evaluations; checkpoints take no time
    assert count_steps(setting, replace(RATES, checkpoint_s=1.0), 80) == 120
    assert (
        count_steps(make_setting("checkpoint.every_steps=1000"), replace(RATES, checkpoint_s=1.0), 60) == 60
    )
