"""The engine under virtual time against what can be worked out by hand."""

from collections import Counter

import pytest

from asyncrl.planner.actors.engine import SimulatedEngine


def make_engine(rate=lambda n: 10.0, most=100):
    engine = SimulatedEngine(rate, most)
    engine.serve(1, 0.0)
    return engine


def drive(engine):
    """Return (time, sample) of every end."""
    ends = []
    while (end := engine.next_end()) is not None:
        ends += [(pytest.approx(end), key[1]) for key, _ in engine.take_ended(end)]
    return ends


def test_requests_end_in_the_order_of_their_lengths_at_the_rate_of_one_request():
    engine = make_engine()
    for sample, num_tokens in enumerate((30, 10, 20)):
        engine.begin(((1, 1), sample), num_tokens, 0.0)
    assert drive(engine) == [(1.0, 1), (2.0, 2), (3.0, 0)]
    assert engine.num_tokens == 60


def test_requests_that_share_a_rate_slow_one_another_until_one_ends():
    engine = make_engine(lambda n: 10.0 / n)  # 10 tokens/s in all
    engine.begin(((1, 1), 0), 10, 0.0)
    engine.begin(((1, 1), 1), 20, 0.0)
    assert drive(engine) == [(2.0, 0), (3.0, 1)]


def test_a_request_beyond_the_batch_waits_for_a_place():
    engine = make_engine(most=1)
    engine.begin(((1, 1), 0), 10, 0.0)
    engine.begin(((1, 1), 1), 10, 0.0)
    assert drive(engine) == [(1.0, 0), (2.0, 1)]


def test_tokens_bear_the_version_that_was_served_as_they_were_sampled():
    engine = make_engine()
    engine.begin(((1, 1), 0), 40, 0.0)
    engine.serve(2, 1.0)
    engine.serve(3, 2.5)
    [(_, spans)] = engine.take_ended(4.0)
    assert spans == Counter({1: 10, 2: 15, 3: 15})


def test_a_swap_holds_up_all_requests_and_is_no_busy_time():
    engine = make_engine()
    engine.begin(((1, 1), 0), 20, 0.0)
    engine.swap(3.0, 1.0)
    assert drive(engine) == [(5.0, 0)]
    assert engine.busy_s == pytest.approx(2.0)
