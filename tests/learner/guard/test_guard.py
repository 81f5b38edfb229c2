"""The guard's detectors and decisions, each finding injected into a calm history."""

from __future__ import annotations

import math
import re

import pytest
from pydantic import ValidationError

from asyncrl.config.tree import GuardSection
from learner.guard.explanations import EXPLANATIONS, explain
from learner.guard.guard import MAX_ROLLBACKS, Action, Guard
from learner.guard.signals import Finding, make_signals
from learner.guard.watch import Watch

NUM_CALM = 20
CALM = {
    "actor/ppo_kl": 0.002,
    "rollout_corr/kl": 0.004,
    "actor/grad_norm": 0.8,
    "critic/grad_norm": 0.5,
    "actor/pg_clipfrac": 0.02,
    "critic/vf_clipfrac": 0.01,
    "actor/entropy": 1.2,
    "rollout_corr/rollout_is_eff_sample_size": 0.95,
    "perf/throughput": 900.0,
    "actor/pg_loss": -0.01,
}


def calm_metrics(step: int) -> dict[str, float]:
    """A healthy step; values differ a little from step to step."""
    return {name: value * (1 + 0.05 * math.sin(7.0 * step)) for name, value in CALM.items()}


def calm_guard(num_steps: int = NUM_CALM, **changes) -> Guard:
    guard = Guard(GuardSection(**changes))
    for step in range(num_steps):
        assert guard.judge(step, calm_metrics(step)).action is Action.NONE
    return guard


def judge(guard: Guard, step: int = NUM_CALM, num_skipped: int = 0, **values: float) -> list[Finding]:
    changes = {name.replace("__", "/"): value for name, value in values.items()}
    return list(guard.judge(step, calm_metrics(step) | changes, num_skipped).findings)


SPIKES = [
    ("kl_spike", {"actor__ppo_kl": 0.2}),
    ("kl_spike", {"actor__ppo_kl": -0.2}),
    ("kl_spike", {"rollout_corr__kl": 0.2}),
    ("grad_norm_spike", {"actor__grad_norm": 9.0}),
    ("grad_norm_spike", {"critic__grad_norm": 9.0}),
    ("clip_fraction", {"actor__pg_clipfrac": 0.6}),
    ("value_clip_fraction", {"critic__vf_clipfrac": 0.3}),
    ("entropy_collapse", {"actor__entropy": 0.01}),
    ("low_ess", {"rollout_corr__rollout_is_eff_sample_size": 0.1}),
    ("not_finite", {"actor__pg_loss": math.nan}),
    ("not_finite", {"actor__grad_norm": math.inf}),
]


@pytest.mark.parametrize(("kind", "values"), SPIKES)
def test_each_injected_fault_is_found_is_severe_and_is_counted(kind, values):
    guard = calm_guard()
    (finding,) = judge(guard, **values)
    assert finding.kind == kind and finding.is_severe
    assert guard.counters()[f"guard/{kind}"] == 1.0


def test_a_slow_step_is_reported_and_never_acted_upon():
    guard = calm_guard(action="stop")
    verdict = guard.judge(NUM_CALM, calm_metrics(NUM_CALM) | {"perf/throughput": 20.0})
    assert [finding.kind for finding in verdict.findings] == ["low_throughput"]
    assert verdict.action is Action.WARN


def test_far_beyond_the_limit_is_severe_also_during_the_warm_up():
    (finding,) = judge(calm_guard(2), step=2, actor__grad_norm=25.0)
    assert finding.is_severe and finding.z is None


def test_a_little_beyond_the_limit_is_reported_but_not_severe_during_the_warm_up():
    (finding,) = judge(calm_guard(2), step=2, actor__grad_norm=3.0)
    assert not finding.is_severe


def test_a_run_whose_gradients_are_always_large_is_left_alone_once_that_is_known():
    guard = Guard(GuardSection(action="stop"))
    for step in range(NUM_CALM):
        guard.judge(step, {"actor/grad_norm": 15.0 + math.sin(step)})
    assert guard.judge(NUM_CALM, {"actor/grad_norm": 15.5}).action is Action.NONE
    assert guard.judge(NUM_CALM + 1, {"actor/grad_norm": 90.0}).action is Action.STOP


def test_where_gradients_are_large_and_noisy_ten_times_the_limit_is_not_severe():
    guard = Guard(GuardSection(action="stop"))
    for step in range(NUM_CALM):
        guard.judge(step, {"actor/grad_norm": 15.0 + 5.0 * (step % 3 - 1)})
    assert guard.judge(NUM_CALM, {"actor/grad_norm": 45.0}).action is Action.WARN


def test_a_value_far_from_the_usual_but_within_the_limit_is_no_finding():
    assert judge(calm_guard(), actor__grad_norm=1.9) == []


def test_severe_values_do_not_become_the_usual_ones():
    guard = calm_guard()
    for step in range(NUM_CALM, 4 * NUM_CALM):
        (finding,) = judge(guard, step, actor__grad_norm=9.0)
        assert finding.is_severe


def test_rewards_of_an_empty_batch_may_be_not_a_number():
    assert judge(calm_guard(), **{"critic__score/mean": math.nan, "critic__rewards/mean": math.nan}) == []


def test_every_kind_of_finding_is_explained_in_all_four_parts():
    kinds = {signal.kind for signal in make_signals(GuardSection())}
    kinds |= {"not_finite", "out_of_memory", "limit"}
    assert kinds == set(EXPLANATIONS)
    for kind in kinds:
        text = explain(Finding(kind, "actor/x", 3.0, 2.0, 9.5))
        for part in ("what happened:", "in order:\n    1. ", "what to change:", "may still look fine:"):
            assert part in text
        assert "actor/x is 3, limit 2, +9.5 robust deviations" in text


@pytest.mark.parametrize(("way", "metric", "value"), [
    ("max", "actor/ppo_kl", 0.02),
    ("max", "rollout_corr/kl", 0.02),
    ("max", "actor/grad_norm", 1.5),
    ("max", "critic/grad_norm", 1.5),
    ("max", "actor/pg_clipfrac", 0.2),
    ("max", "critic/vf_clipfrac", 0.04),
    ("min_share", "actor/entropy", 0.3),
    ("min", "rollout_corr/rollout_is_eff_sample_size", 0.6),
    ("min_share", "perf/throughput", 400.0),
])  # fmt: skip
def test_every_limit_can_be_set_and_taken_away(way, metric, value):
    metrics = calm_metrics(NUM_CALM) | {metric: value}
    assert calm_guard().judge(NUM_CALM, metrics).findings == ()
    first = CALM[metric] if way == "min_share" else 1.0
    bound = (value / 1.1 if way == "max" else value * 1.1) / first
    (finding,) = calm_guard(limits={metric: {way: bound}}).judge(NUM_CALM, metrics).findings
    assert finding.metric == metric and finding.kind != "limit"
    worst = calm_metrics(NUM_CALM) | {metric: 1e6 if way == "max" else 0.0}
    assert calm_guard().judge(NUM_CALM, worst).findings
    assert calm_guard(limits={metric: None}).judge(NUM_CALM, worst).findings == ()


def test_any_metric_of_the_learner_can_have_a_limit_that_acts_unless_it_is_of_speed():
    calm = {"response_length/mean": 100.0, "timing_s/update_actor": 1.0}
    limits = {"response_length/mean": {"max": 150.0}, "timing_s/update_actor": {"max": 2.0}}
    guard = Guard(GuardSection(action="stop", limits=limits))
    for step in range(NUM_CALM):
        assert guard.judge(step, calm).action is Action.NONE
    verdict = guard.judge(NUM_CALM, calm | {"timing_s/update_actor": 90.0})
    assert verdict.action is Action.WARN and verdict.findings[0].kind == "limit"
    assert guard.judge(NUM_CALM + 1, calm | {"response_length/mean": 2000.0}).action is Action.STOP
    assert guard.counters()["guard/limit"] == 2.0


@pytest.mark.parametrize(
    ("limit", "beyond", "far"),
    [
        ({"min": -1.0}, -1.01, -10.1),
        ({"max": -1.0}, -0.9, 8.1),
        ({"min": 0.0}, -0.01, None),
        ({"max": 0.0}, 0.01, None),
        ({"min": 0.5}, 0.4, 0.04),
    ],
)
def test_a_limit_that_is_not_positive_is_crossed_a_little_before_it_is_crossed_far(limit, beyond, far):
    for value, action in ((beyond, Action.WARN), (far, Action.STOP)):
        guard = Guard(GuardSection(action="stop", limits={"critic/rewards/mean": limit}))
        if value is not None:
            assert guard.judge(0, {"critic/rewards/mean": value}).action is action
    guard = Guard(GuardSection(action="stop", limits={"critic/rewards/mean": limit}))
    (way, bound), usual = next(iter(limit.items())), 1.0
    inside = bound - usual if way == "max" else bound + usual
    for step in range(NUM_CALM):
        assert guard.judge(step, {"critic/rewards/mean": inside}).action is Action.NONE
    outside = bound + 50.0 if way == "max" else bound - 50.0
    assert guard.judge(NUM_CALM, {"critic/rewards/mean": outside}).action is Action.STOP, "by its z-score"


def test_before_the_warm_up_no_update_is_refused_for_a_limit_of_zero():
    limits = {metric: {"max": 0.0} for metric in ("actor/grad_norm", "actor/pg_clipfrac")}
    bounds = dict(Guard(GuardSection(action="skip_update", limits=limits)).limits())
    assert not bounds.keys() & limits.keys() and bounds["actor/ppo_kl"] == pytest.approx(0.3)


def test_a_usual_value_below_zero_is_not_far_from_itself():
    guard = Guard(GuardSection(action="stop", limits={"critic/rewards/mean": {"min": -0.1}}))
    for step in range(NUM_CALM):
        value = -0.3 + 0.05 * math.sin(7.0 * step)
        assert guard.judge(step, {"critic/rewards/mean": value}).action is Action.WARN
    assert guard.judge(NUM_CALM, {"critic/rewards/mean": -0.35}).action is Action.WARN
    assert guard.judge(NUM_CALM, {"critic/rewards/mean": -9.0}).action is Action.STOP


def test_a_lower_limit_never_refuses_an_update_beforehand():
    guard = Guard(GuardSection(action="skip_update", limits={"actor/grad_norm": {"min": 0.1}}))
    assert "actor/grad_norm" not in dict(guard.limits())


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        ({"actor/grad_nrm": {"max": 1.0}}, "there is no 'actor/grad_nrm'"),
        ({"buffer/depth": {"max": 1.0}}, "is made elsewhere"),
        ({"actor/grad_norm": {}}, "one of {max: x}"),
        ({"actor/grad_norm": {"max": 1.0, "min": 0.0}}, "one of {max: x}"),
        ({"actor/grad_norm": {"maximum": 1.0}}, "Extra inputs"),
    ],
)
def test_a_limit_that_would_never_be_looked_at_is_refused(limits, said):
    with pytest.raises(ValidationError, match=re.escape(said)):
        GuardSection(limits=limits)


def test_the_z_score_and_the_warm_up_can_be_set():
    (finding,) = judge(calm_guard(z_score=100.0), actor__grad_norm=3.0)
    assert not finding.is_severe
    (finding,) = judge(calm_guard(5, warmup_steps=5), step=5, actor__grad_norm=3.0)
    assert finding.z is not None
    (finding,) = judge(calm_guard(5), step=5, actor__grad_norm=3.0)
    assert finding.z is None


# Actions


SPIKE = {"actor/grad_norm": 50.0}


@pytest.mark.parametrize("action", ["warn", "reduce_lr", "kl_fallback", "rollback", "stop"])
def test_the_configured_action_is_taken_on_a_severe_finding_only(action):
    guard = calm_guard(3, action=action)
    assert guard.judge(3, calm_metrics(3) | {"actor/grad_norm": 2.4}).action is Action.WARN
    assert guard.judge(4, calm_metrics(4) | SPIKE).action is Action(action)


def test_reduce_lr_halves_it_and_waits_for_the_effect():
    guard = calm_guard(action="reduce_lr")
    actions = [guard.judge(step, SPIKE).action for step in range(20, 26)]
    assert actions == [Action.REDUCE_LR, *[Action.WARN] * 4, Action.REDUCE_LR]
    assert guard.lr_scale == guard.counters()["guard/lr_scale"] == 0.25


def test_reduce_lr_ends_with_a_stop():
    guard = calm_guard(action="reduce_lr")
    actions = [guard.judge(20 + 10 * number, SPIKE).action for number in range(11)]
    assert actions == [*[Action.REDUCE_LR] * 10, Action.STOP]


def test_kl_fallback_happens_once():
    guard = calm_guard(action="kl_fallback")
    assert [guard.judge(step, SPIKE).action for step in (20, 30)] == [Action.KL_FALLBACK, Action.WARN]
    assert guard.is_kl_off


def test_a_rollback_halves_the_learning_rate_forgets_what_it_abandons_and_happens_twice():
    guard = calm_guard(action="rollback")
    for number in range(MAX_ROLLBACKS):
        assert guard.judge(20, calm_metrics(20) | SPIKE).action is Action.ROLLBACK
        guard.roll_back(5, reduces_lr=True)
        assert guard.lr_scale == 0.5 ** (number + 1)
        (finding,) = judge(guard, step=5, actor__grad_norm=3.0)
        assert finding.z is None, "the past from step 5 on is forgotten, the warm-up begins again"
    verdict = guard.judge(20, calm_metrics(20) | SPIKE)
    assert verdict.action is Action.STOP and "2 times already" in verdict.reason


def test_only_skip_update_gives_limits_and_they_are_those_of_a_severe_finding():
    assert calm_guard(action="warn").limits() == []
    limits = dict(calm_guard(action="skip_update").limits())
    of_actor = {"actor/grad_norm", "actor/ppo_kl", "actor/pg_clipfrac"}
    assert set(limits) == of_actor | {"critic/grad_norm", "critic/vf_clipfrac"}
    below, above = 0.999 * limits["actor/grad_norm"], 1.001 * limits["actor/grad_norm"]
    assert not any(finding.is_severe for finding in judge(calm_guard(), actor__grad_norm=below))
    assert any(finding.is_severe for finding in judge(calm_guard(), actor__grad_norm=above))


def test_a_skipped_update_is_counted_and_one_that_was_not_skipped_is_only_reported():
    guard = calm_guard(action="skip_update")
    assert guard.judge(20, SPIKE, num_skipped=1).action is Action.SKIP_UPDATE
    assert guard.counters()["guard/skipped_updates"] == 1.0
    verdict = guard.judge(21, SPIKE)
    assert verdict.action is Action.WARN and verdict.reason


def test_what_was_changed_survives_a_restart():
    guard = calm_guard(action="rollback")
    guard.roll_back(5, reduces_lr=True)
    again = Guard(GuardSection(action="rollback"))
    again.restore(guard.state())
    assert (again.lr_scale, again.num_rollbacks) == (0.5, 1)


def test_of_checkpoint_and_journal_the_one_with_more_rollbacks_is_believed():
    section = GuardSection(action="rollback")
    watch = Watch(section)
    before = watch.state()
    watch.roll_back(8, 5, offenders=[])
    once = watch.state()
    for kept, note, expected in [({}, {}, (1.0, -1)), (before, once, (0.5, 5)), (once, before, (0.5, 5))]:
        again = Watch(section)
        again.restore(kept, note)
        assert (again.adjustment().lr_scale, again.rolled_back_to) == expected


def test_only_a_gradient_that_is_not_finite_in_some_of_the_updates_has_clear_offenders():
    watch = Watch(GuardSection(action="rollback"))
    watch.judge(0, calm_metrics(0) | {"actor/grad_norm": math.nan}, 0)
    assert watch.offenders([4, 3], num_trainable=4) == [3, 4]
    assert watch.offenders([4, 3], num_trainable=2) == [], "all of them: the weights may be to blame"
    watch.roll_back(0, 0, watch.offenders([4, 3], 4))
    assert watch.state()["num_rollbacks"] == 1 and not watch.has_changed, "the learning rate stays"
    watch.judge(0, calm_metrics(0) | {"actor/grad_norm": math.nan, "actor/ppo_kl": 5.0}, 0)
    assert watch.offenders([4, 3], num_trainable=4) == []
