"""The arithmetic of staleness."""

from hypothesis import given
from hypothesis import strategies as st

from asyncrl.core.staleness import (
    is_admissible,
    is_over_age,
    lag,
    max_open_tickets,
    step_of_position,
)


def test_lag_is_the_difference_of_steps() -> None:
    assert lag(trained_step=7, sampled_step=3) == 4


def test_a_token_at_the_bound_is_not_over_age() -> None:
    assert not is_over_age(7, 3, max_lag=4)
    assert is_over_age(8, 3, max_lag=4)


def test_with_max_lag_zero_only_the_tickets_of_the_served_step_are_admissible() -> None:
    admissible = [position for position in range(12) if is_admissible(position, 4, served_step=1, max_lag=0)]
    assert admissible == [0, 1, 2, 3, 4, 5, 6, 7]


@given(st.integers(0, 10_000), st.integers(1, 64), st.integers(0, 500), st.integers(0, 16))
def test_an_admitted_ticket_is_within_the_bound_in_its_turn(
    position: int, batch: int, served: int, bound: int
) -> None:
    if is_admissible(position, batch, served, bound):
        assert lag(step_of_position(position, batch), served) <= bound


def test_as_many_tickets_may_be_open_as_the_bound_has_batches() -> None:
    assert max_open_tickets(groups_per_step=16, max_lag=4) == 80
