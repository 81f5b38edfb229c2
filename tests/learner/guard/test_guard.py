"""The guard's detectors and decisions, each finding injected into a calm history."""

from __future__ import annotations

import math
import re
from contextlib import closing
from pathlib import Path

import pytest
from pydantic import ValidationError

from asyncrl.buffer.client import LearnerClient
from asyncrl.core.config.tree import Config, GuardSection
from learner.checkpoint import CheckpointStore
from learner.guard.explanations import EXPLANATIONS, explain
from learner.guard.guard import MAX_ROLLBACKS, Action, Guard
from learner.guard.signals import Finding, make_signals
from learner.guard.watch import Watch
from learner.leader.leader import Leader

NUM_CALM = 20
NORMS = {name: {"max": 2.0} for name in ("actor/grad_norm", "critic/grad_norm")}
"""A fixed limit, to show what one does; the usual one is relative."""
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
    "actor/step_kl": 0.004,
    "actor/step_gain": 0.7,
    "actor/unsampled_share": 0.0,
    "weights/engine_gap_mean": 4e-7,
    "critic/rewards/mean": 0.3,
}


def calm_metrics(step: int) -> dict[str, float]:
    """A healthy step; values differ a little from step to step."""
    return {name: value * (1 + 0.05 * math.sin(7.0 * step)) for name, value in CALM.items()}


def calm_guard(num_steps: int = NUM_CALM, **changes) -> Guard:
    guard = make_guard(**{"limits": NORMS} | changes)
    for step in range(num_steps):
        assert guard.judge(step, calm_metrics(step)).action is Action.NONE
    return guard


def make_guard(dtype: str = "float32", **changes) -> Guard:
    return Guard(GuardSection(**changes), dtype)


def judge(guard: Guard, step: int = NUM_CALM, num_skipped: int = 0, **values: float) -> list[Finding]:
    changes = {name.replace("__", "/"): value for name, value in values.items()}
    return list(guard.judge(step, calm_metrics(step) | changes, num_skipped).findings)


SPIKES = [
    ("kl_spike", {"actor__ppo_kl": 0.4}),
    ("kl_spike", {"actor__ppo_kl": -0.4}),
    ("grad_norm_spike", {"actor__grad_norm": 9.0}),
    ("grad_norm_spike", {"critic__grad_norm": 9.0}),
    ("clip_fraction", {"actor__pg_clipfrac": 0.6}),
    ("value_clip_fraction", {"critic__vf_clipfrac": 0.5}),
    ("low_ess", {"rollout_corr__rollout_is_eff_sample_size": 0.1}),
    ("unsampled_tokens", {"actor__unsampled_share": 0.01}),
    ("weights_differ", {"weights__engine_gap_mean": 1e-4}),
    ("not_finite", {"actor__pg_loss": math.nan}),
    ("not_finite", {"actor__grad_norm": math.inf}),
]


@pytest.mark.parametrize(("kind", "values"), SPIKES)
def test_each_injected_fault_is_found_is_severe_and_is_counted(kind, values):
    guard = calm_guard()
    (finding,) = judge(guard, **values)
    assert finding.kind == kind and finding.is_severe
    assert guard.counters()[f"guard/{kind}"] == 1.0


LASTING = [
    ("large_steps", "actor/step_kl", 0.26, 9),
    ("wrong_direction", "actor/step_gain", -0.3, 9),
    ("grad_norm_spike", "actor/grad_norm", 30.0, 5),
    ("grad_norm_spike", "critic/grad_norm", 30.0, 5),
    ("entropy_collapse", "actor/entropy", 0.01, 5),
    ("low_throughput", "perf/throughput", 20.0, 20),
]


@pytest.mark.parametrize(("kind", "metric", "value", "over"), LASTING)
def test_what_is_judged_by_a_median_is_found_once_most_of_the_last_steps_are_beyond(
    kind, metric, value, over
):
    guard, found = calm_guard(limits={}), []
    for step in range(NUM_CALM, NUM_CALM + over):
        verdict = guard.judge(step, calm_metrics(step) | {metric: value})
        found.append([finding.kind for finding in verdict.findings])
        assert all(finding.is_severe == (kind != "low_throughput") for finding in verdict.findings)
    needed = over // 2
    assert found == [[]] * needed + [[kind]] * (over - needed)
    for step in range(NUM_CALM + over, NUM_CALM + 2 * over):
        last = guard.judge(step, calm_metrics(step))
    assert last.findings == (), "it is over"


@pytest.mark.parametrize(("metric", "value"), [("actor/step_kl", 2.4), ("actor/grad_norm", 500.0)])
def test_one_step_alone_is_no_finding_of_what_is_judged_by_a_median(metric, value):
    guard = calm_guard(limits={})
    assert guard.judge(NUM_CALM, calm_metrics(NUM_CALM) | {metric: value}).action is Action.NONE
    assert guard.judge(NUM_CALM + 1, calm_metrics(NUM_CALM + 1)).action is Action.NONE


def test_one_step_that_moves_the_policy_ten_times_too_far_needs_no_median_even_the_first():
    guard = make_guard(action="stop")
    (finding,) = guard.judge(0, calm_metrics(0) | {"actor/step_kl": 2.6}).findings
    assert (finding.kind, finding.value, finding.is_severe) == ("large_steps", 2.6, True)


def test_what_is_beyond_its_limit_from_the_first_step_on_is_severe_at_the_fifth():
    guard = make_guard(action="stop")
    kls = [0.34, 0.27, 0.42, 0.47, 0.48]
    verdicts = [guard.judge(step, calm_metrics(step) | {"actor/ppo_kl": kl}) for step, kl in enumerate(kls)]
    assert [len(verdict.findings) for verdict in verdicts] == [1, 0, 1, 1, 1]
    assert [verdict.action for verdict in verdicts][2:] == [Action.WARN, Action.WARN, Action.STOP]


def test_a_loss_of_the_other_sign_is_found_at_the_ninth_step():
    guard = make_guard(action="stop")
    actions = [guard.judge(step, calm_metrics(step) | {"actor/step_gain": -0.6}).action for step in range(9)]
    assert actions == [*[Action.NONE] * 8, Action.STOP]


def test_a_slow_run_is_reported_and_never_acted_upon():
    guard, verdict = calm_guard(action="stop"), None
    for step in range(NUM_CALM, 2 * NUM_CALM):
        verdict = guard.judge(step, calm_metrics(step) | {"perf/throughput": 20.0})
    assert verdict is not None and [finding.kind for finding in verdict.findings] == ["low_throughput"]
    assert verdict.action is Action.WARN


@pytest.mark.parametrize(
    ("reward", "kinds"), [(0.3, ["entropy_collapse"]), (0.1, ["entropy_collapse"]), (0.9, [])]
)
def test_a_policy_that_became_certain_is_a_finding_unless_its_reward_has_risen(reward, kinds):
    guard, verdict = calm_guard(limits={}), None
    for step in range(NUM_CALM, 2 * NUM_CALM):
        sure = {"actor/entropy": 0.01, "critic/rewards/mean": reward}
        verdict = guard.judge(step, calm_metrics(step) | sure)
    assert verdict is not None and [finding.kind for finding in verdict.findings] == kinds


@pytest.mark.parametrize(
    ("dtype", "first", "same", "other"),
    [("float32", 1e-6, 2.1e-5, 2.2e-5), ("float32", 1e-5, 3.4e-5, 3.6e-5), ("bfloat16", 0.015, 0.027, 0.028)],
)
def test_the_gap_to_the_engine_may_grow_a_little_over_the_first_one_by_dtype(dtype, first, same, other):
    for value, kinds in ((same, []), (other, ["weights_differ"])):
        guard = make_guard(dtype)
        assert guard.judge(0, {"weights/engine_gap_mean": first}).findings == ()
        verdict = guard.judge(1, {"weights/engine_gap_mean": value})
        assert [finding.kind for finding in verdict.findings] == kinds
        assert all(finding.is_severe for finding in verdict.findings), "two steps are enough"


@pytest.mark.parametrize(("first", "second"), [(0.001, 0.012), (0.012, 0.001), (0.002, 0.022)])
def test_a_small_first_gap_of_bfloat16_is_luck_and_no_measure(first, second):
    guard = make_guard("bfloat16")
    for step, value in enumerate((first, second, 0.012, 0.015)):
        assert guard.judge(step, {"weights/engine_gap_mean": value}).findings == ()
    (finding,) = guard.judge(4, {"weights/engine_gap_mean": 0.04}).findings
    assert finding.is_severe


def test_the_first_gaps_count_by_their_median_and_those_after_them_no_more():
    guard = make_guard("float32")
    for step, value in enumerate((9e-5, 1e-5, 1e-5, 1e-5, 1e-5)):
        assert guard.judge(step, {"weights/engine_gap_mean": value}).findings == ()
    assert guard.judge(5, {"weights/engine_gap_mean": 3.6e-5}).findings, "one step alone is no measure"
    for step in range(6, 60):
        assert guard.judge(step, {"weights/engine_gap_mean": 3.4e-5}).findings == ()
    assert guard.judge(60, {"weights/engine_gap_mean": 3.6e-5}).findings, "it does not creep after them"


@pytest.mark.parametrize(("dtype", "num_tokens"), [("float32", 1), ("float16", 64), ("bfloat16", 64)])
def test_a_gap_that_rests_on_too_few_tokens_is_neither_judged_nor_a_measure(dtype, num_tokens):
    guard = make_guard(dtype)
    few = {"weights/engine_gap_mean": 0.5, "weights/engine_gap_tokens": num_tokens - 1.0}
    assert guard.judge(0, few).findings == ()
    enough = {"weights/engine_gap_mean": 1e-7, "weights/engine_gap_tokens": float(num_tokens)}
    assert guard.judge(1, enough).findings == ()
    assert guard.judge(2, enough | {"weights/engine_gap_mean": 0.19}).findings


@pytest.mark.parametrize(("dtype", "limit"), [("float32", 1e-3), ("float16", 0.05), ("bfloat16", 0.2)])
def test_a_first_gap_of_another_model_is_found_at_once_and_the_limit_can_be_set_or_taken_away(dtype, limit):
    for changes, num_found in (
        ({}, 1),
        ({"limits": {"weights/engine_gap_mean": None}}, 0),
        ({"limits": {"weights/engine_gap_mean": {"max": 9.0}}}, 0),
        ({"limits": {"weights/engine_gap_mean": {"max": 1e-9}}}, 1),
    ):
        verdict = make_guard(dtype, **changes).judge(0, {"weights/engine_gap_mean": 1.01 * limit})
        assert len(verdict.findings) == num_found
    assert make_guard(dtype).judge(0, {"weights/engine_gap_mean": 0.99 * limit}).findings == ()


def test_far_beyond_the_limit_is_severe_also_during_the_warm_up():
    (finding,) = judge(calm_guard(2), step=2, actor__grad_norm=25.0)
    assert finding.is_severe and finding.z is None


def test_a_little_beyond_the_limit_is_reported_but_not_severe_during_the_warm_up():
    (finding,) = judge(calm_guard(2), step=2, actor__grad_norm=3.0)
    assert not finding.is_severe


def test_a_run_whose_gradients_are_always_large_is_left_alone_once_that_is_known():
    guard = make_guard(action="stop", limits=NORMS)
    for step in range(NUM_CALM):
        guard.judge(step, {"actor/grad_norm": 15.0 + math.sin(step)})
    assert guard.judge(NUM_CALM, {"actor/grad_norm": 15.5}).action is Action.NONE
    assert guard.judge(NUM_CALM + 1, {"actor/grad_norm": 90.0}).action is Action.STOP


def test_where_gradients_are_large_and_noisy_ten_times_the_limit_is_not_severe():
    guard = make_guard(action="stop", limits=NORMS)
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
    kinds = {signal.kind for signal in make_signals(GuardSection(), "float32")}
    kinds |= {"not_finite", "out_of_memory", "limit"}
    assert kinds == set(EXPLANATIONS)
    for kind in kinds:
        text = explain(Finding(kind, "actor/x", 3.0, 2.0, 9.5))
        for part in ("what happened:", "in order:\n    1. ", "what to change:", "may still look fine:"):
            assert part in text
        assert "actor/x is 3, limit 2, +9.5 robust deviations" in text


@pytest.mark.parametrize(("way", "metric", "value"), [
    ("max", "actor/ppo_kl", 0.02),
    ("max", "actor/unsampled_share", 0.0),
    ("max", "actor/grad_norm", 1.5),
    ("max_times", "actor/grad_norm", 1.5),
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
    usual = 1.0 if way in ("max", "min") else CALM[metric]
    bound = (value / 1.1 if way.startswith("max") else value * 1.1) / usual
    worst = calm_metrics(NUM_CALM) | {metric: 1e6 if way.startswith("max") else 0.0}
    (finding,) = calm_guard(limits={metric: {way: bound}}).judge(NUM_CALM, worst).findings
    assert finding.metric == metric and finding.kind != "limit"
    assert calm_guard(limits={metric: None}).judge(NUM_CALM, worst).findings == ()


def test_any_metric_of_the_learner_can_have_a_limit_that_acts_unless_it_is_of_speed():
    calm = {"response_length/mean": 100.0, "timing_s/update_actor": 1.0}
    limits = {"response_length/mean": {"max": 150.0}, "timing_s/update_actor": {"max": 2.0}}
    guard = make_guard(action="stop", limits=limits)
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
        guard = make_guard(action="stop", limits={"critic/rewards/mean": limit})
        if value is not None:
            assert guard.judge(0, {"critic/rewards/mean": value}).action is action
    guard = make_guard(action="stop", limits={"critic/rewards/mean": limit})
    (way, bound), usual = next(iter(limit.items())), 1.0
    inside = bound - usual if way == "max" else bound + usual
    for step in range(NUM_CALM):
        assert guard.judge(step, {"critic/rewards/mean": inside}).action is Action.NONE
    outside = bound + 50.0 if way == "max" else bound - 50.0
    assert guard.judge(NUM_CALM, {"critic/rewards/mean": outside}).action is Action.STOP, "by its z-score"


def test_before_the_warm_up_no_update_is_refused_for_a_limit_of_zero():
    limits = {metric: {"max": 0.0} for metric in ("actor/grad_norm", "actor/pg_clipfrac")}
    bounds = dict(make_guard(action="skip_update", limits=limits).limits())
    assert not bounds.keys() & limits.keys() and bounds["actor/ppo_kl"] == pytest.approx(3.0)


def test_a_usual_value_below_zero_is_not_far_from_itself():
    guard = make_guard(action="stop", limits={"critic/rewards/mean": {"min": -0.1}})
    for step in range(NUM_CALM):
        value = -0.3 + 0.05 * math.sin(7.0 * step)
        assert guard.judge(step, {"critic/rewards/mean": value}).action is Action.WARN
    assert guard.judge(NUM_CALM, {"critic/rewards/mean": -0.35}).action is Action.WARN
    assert guard.judge(NUM_CALM, {"critic/rewards/mean": -9.0}).action is Action.STOP


def test_a_lower_limit_never_refuses_an_update_beforehand():
    guard = make_guard(action="skip_update", limits={"actor/grad_norm": {"min": 0.1}})
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


@pytest.mark.parametrize("action", ["skip_update", "reduce_lr", "kl_fallback", "rollback", "stop"])
def test_a_fault_that_no_change_mends_is_only_told_unless_the_run_is_to_stop(action):
    guard = calm_guard(3, action=action)
    verdict = guard.judge(
        3, calm_metrics(3) | {"weights/engine_gap_mean": 1e-3, "actor/unsampled_share": 0.1}
    )
    assert [finding.is_severe for finding in verdict.findings] == [True, True]
    assert verdict.action is (Action.STOP if action == "stop" else Action.WARN)
    assert guard.lr_scale == 1.0
    both = {"weights/engine_gap_mean": 1e-3, "actor/grad_norm": 50.0}
    if action != "skip_update":
        assert guard.judge(4, calm_metrics(4) | both).action is Action(action)


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
    again = make_guard(action="rollback")
    again.restore(guard.state())
    assert (again.lr_scale, again.num_rollbacks) == (0.5, 1)


def test_of_checkpoint_and_journal_the_one_with_more_rollbacks_is_believed():
    section = GuardSection(action="rollback")
    watch = Watch(section, "float32")
    before = watch.state()
    watch.roll_back(8, 5, offenders=[])
    once = watch.state()
    for kept, note, expected in [({}, {}, (1.0, -1)), (before, once, (0.5, 5)), (once, before, (0.5, 5))]:
        again = Watch(section, "float32")
        again.restore(kept, note)
        assert (again.adjustment().lr_scale, again.rolled_back_to) == expected


def test_what_is_told_of_a_finding_is_one_sentence_with_its_first_cause_and_not_said_at_every_step():
    watch = Watch(GuardSection(), "float32")
    for step in range(12):
        watch.judge(step, calm_metrics(step) | {"actor/unsampled_share": 0.2}, 0)
    first, again = watch.findings
    assert (first.number, first.step, again.number, again.step) == (1, 0, 2, 10)
    assert first.kind == "unsampled_tokens"
    assert first.text == (
        "step 0: unsampled_tokens: actor/unsampled_share is 0.2, limit 0: tokens are trained that no version "
        "sampled: loss mask and tokens do not belong together. Look first at: the loss mask is off by a "
        "position, in a custom loss or in an environment of your own"
    )


def test_only_a_gradient_that_is_not_finite_in_some_of_the_updates_has_clear_offenders():
    watch = Watch(GuardSection(action="rollback"), "float32")
    watch.judge(0, calm_metrics(0) | {"actor/grad_norm": math.nan}, 0)
    assert watch.offenders([4, 3], num_trainable=4) == [3, 4]
    assert watch.offenders([4, 3], num_trainable=2) == [], "all of them: the weights may be to blame"
    watch.roll_back(0, 0, watch.offenders([4, 3], 4))
    assert watch.state()["num_rollbacks"] == 1 and not watch.has_changed, "the learning rate stays"
    watch.judge(0, calm_metrics(0) | {"actor/grad_norm": math.nan, "actor/ppo_kl": 5.0}, 0)
    assert watch.offenders([4, 3], num_trainable=4) == []


@pytest.mark.parametrize(
    ("dtype", "quantization", "gap", "kinds"),
    [
        ("float32", None, 0.01, ["weights_differ"]),
        ("float32", "int8", 0.01, []),
        ("bfloat16", None, 0.3, ["weights_differ"]),
        ("bfloat16", "int8", 0.3, []),
        ("bfloat16", "int8", 0.5, ["weights_differ"]),
    ],
)
def test_a_quantised_engine_may_differ_by_what_quantisation_makes(
    dtype: str, quantization: str | None, gap: float, kinds: list[str], tmp_path: Path
) -> None:
    config = Config(
        model={"path": "m", "dtype": dtype},
        data={"train": "t"},
        reward={"fn": "gsm8k"},
        rollout={"quantization": quantization},
    )
    with closing(LearnerClient("tcp://127.0.0.1:1")) as client:
        leader = Leader(config, client, lambda _: None, CheckpointStore(tmp_path / "checkpoints", keep=1))
        leader.judge(0, {"weights/engine_gap_mean": gap}, 0)
    assert [finding.kind for finding in leader.findings] == kinds
