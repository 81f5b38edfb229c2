"""Autoscaler's number of replicas: decided calmly, within the bounds, and right for the pipeline."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.control.fleet.autoscaler import FULL, GROW_AT, Autoscaler, Decision, Pacing
from research.policies.experiment import draw_lengths
from research.policies.ledger_rule import LedgerRule
from research.policies.work import Shape
from tests.control.fleet.elastic_queue import ElasticQueue

PACING = Pacing(settle_s=10.0, window_s=20.0, min_steps=9, hold_s=40.0, max_hold_s=640.0)


def row(idle: float, rollout_idle: float, lag: float = 1.0) -> dict[str, float]:
    return {
        "timing_s/step": 1.0,
        "timing_s/wait": idle,
        "perf/rollout_idle_share": rollout_idle,
        "staleness/lag_mean": lag,
    }


def drive(
    scaler: Autoscaler, rows: list[dict[str, float]], wanted: int = 2, start_s: int = 5
) -> list[tuple[int, Decision]]:
    """Give the autoscaler a row per second and do what it says; replicas take `start_s` to get READY."""
    made, ready_at = [], 0
    for second, one in enumerate(rows):
        ready = wanted if second >= ready_at else 0
        if (decision := scaler.decide(float(second), wanted, ready, [one])) is not None:
            made.append((second, decision))
            wanted, ready_at = decision.replicas, second + start_s
    return made


def test_a_learner_that_waits_for_busy_replicas_gets_as_many_as_it_needs() -> None:
    ((_, decision),) = drive(Autoscaler(1, 8, 4, PACING), [row(0.4, 0.0)] * 35)
    assert decision.replicas == 4  # 2 / (1 - 0.4) = 3.3
    assert decision.reason == "2 -> 4 replicas: the learner idles 39%, the replicas 0%, mean lag 1.0 of 4"


def test_it_never_wants_more_than_the_most_and_at_most_doubles() -> None:
    starved = [row(0.9, 0.0)] * 200
    assert [one.replicas for _, one in drive(Autoscaler(1, 3, 4, PACING), starved)] == [3]
    assert [one.replicas for _, one in drive(Autoscaler(1, 16, 4, PACING), starved)][:3] == [4, 8, 16]


def test_replicas_that_wait_too_are_not_made_more() -> None:
    assert drive(Autoscaler(1, 8, 4, PACING), [row(0.5, 0.5)] * 300) == []


def test_the_idleness_of_spares_does_not_count() -> None:
    starved = row(0.4, 0.5) | {"perf/rollout_idle/standby": 0.5}
    assert drive(Autoscaler(1, 8, 4, PACING), [starved] * 35)[0][1].replicas == 4


def test_a_replica_whose_work_the_others_can_do_is_given_back_one_at_a_time() -> None:
    made = drive(Autoscaler(1, 8, 4, PACING), [row(0.0, 0.5)] * 60, wanted=5)
    assert [decision.replicas for _, decision in made] == [4]
    assert drive(Autoscaler(1, 8, 4, PACING), [row(0.0, 0.2)] * 300, wanted=3) == []


def test_old_data_makes_it_give_back_sooner() -> None:
    young, old = row(0.0, 0.40, lag=1.0), row(0.0, 0.40, lag=3.5)  # the others would be busy 90 %
    assert drive(Autoscaler(1, 8, 4, PACING), [young] * 300, wanted=3) == []
    assert drive(Autoscaler(1, 8, 4, PACING), [old] * 60, wanted=3)[0][1].replicas == 2


def test_one_long_wait_or_one_bad_stretch_changes_nothing() -> None:
    calm = [row(0.1, 0.3)] * 200
    evaluation = {**row(0.1, 0.3), "timing_s/step": 60.0, "timing_s/wait": 59.0}
    assert drive(Autoscaler(1, 8, 4, PACING), [*calm, evaluation, *calm]) == []
    assert drive(Autoscaler(1, 8, 4, PACING), [*calm, *[row(0.6, 0.0)] * 8, *calm]) == []


def test_nothing_is_decided_while_replicas_are_on_their_way() -> None:
    scaler = Autoscaler(1, 8, 4, PACING)
    assert all(scaler.decide(float(n), 3, 2, [row(0.9, 0.0)]) is None for n in range(500))


def test_a_decision_that_could_not_be_carried_out_is_not_made_at_every_pulse() -> None:
    scaler = Autoscaler(1, 8, 4, PACING)
    made = [
        second for second in range(100) if scaler.decide(float(second), 2, 2, [row(0.5, 0.0)]) is not None
    ]
    assert made == [31, 61, 91]


@settings(deadline=None, max_examples=30)
@given(st.lists(st.tuples(st.floats(0.06, 0.19), st.floats(0.0, 1.0), st.floats(0.0, 4.0)), max_size=300))
def test_noise_within_the_band_never_changes_the_fleet(noise: list[tuple[float, float, float]]) -> None:
    assert drive(Autoscaler(1, 8, 4, PACING), [row(*values) for values in noise], wanted=3) == []


@settings(deadline=None, max_examples=30)
@given(
    st.lists(st.tuples(st.floats(0.0, 1.0), st.floats(0.0, 1.0), st.floats(0.0, 4.0)), max_size=400),
    st.integers(0, 4),
    st.integers(0, 4),
)
def test_whatever_comes_it_stays_in_its_bounds_and_is_patient(
    noise: list[tuple[float, float, float]], minimum: int, more: int
) -> None:
    maximum = minimum + more
    made = drive(Autoscaler(minimum, maximum, 4, PACING), [row(*values) for values in noise], wanted=minimum)
    assert all(minimum <= decision.replicas <= maximum for _, decision in made)
    times = [0, *(second for second, _ in made)]
    patience_s = PACING.settle_s + PACING.window_s
    assert all(later - before >= patience_s for before, later in itertools.pairwise(times))


def test_a_load_that_swings_makes_it_slower_not_wilder() -> None:
    swing = ([row(0.4, 0.0)] * 60 + [row(0.0, 0.6)] * 60) * 40
    made = drive(Autoscaler(1, 8, 4, PACING), swing)
    early, late = (sum(low <= second < low + 1600 for second, _ in made) for low in (0, 3200))
    assert late <= early / 2 and late <= 10


def simulate(replicas: int, needed: float, seed: int, num_steps: int = 300) -> ElasticQueue:
    """Run the real ledger with groups so long that `needed` replicas of 8 slots feed a learner of 16."""
    shape = Shape(groups_per_step=16, slots=0, max_lag=4)
    lengths = draw_lengths(seed, 0.5, 1000 * needed * 8 / 16)
    queue = ElasticQueue(
        shape,
        LedgerRule(shape, "mask"),
        lengths,
        num_steps,
        Autoscaler(1, 12, shape.max_lag, PACING),
        replicas=replicas,
        slots=8,
    )
    queue.run()
    return queue


@pytest.mark.parametrize(("replicas", "needed"), [(1, 5.5), (7, 2.4)])
def test_a_simulated_pipeline_gets_the_fleet_that_it_needs_from_below_and_above(
    replicas: int, needed: float
) -> None:
    queue = simulate(replicas, needed, seed=1)
    assert (1 - GROW_AT) * needed <= queue.replicas <= needed / FULL + 1, queue.changes
    assert sum(queue.idle[-50:]) / 50 < 0.2
    assert not [change for change in queue.changes if change.step > 250], "it has come to rest"
