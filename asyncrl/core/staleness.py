"""Policy versions and the arithmetic of staleness (pure).

This module owns the one rule that three places apply: the ledger when it admits a ticket, the
learner when it masks a token, and the loss when it asserts the bound again.

    lag = step of the weights being trained - step of the version that sampled the token
"""

from __future__ import annotations

from dataclasses import dataclass

UNLOADED = 0
"""The version number of an engine that has loaded nothing yet; never used for training."""


@dataclass(frozen=True, order=True)
class PolicyVersion:
    """One published set of weights.

    Attributes:
        number: Rises by one per publish and is never used twice, not even after a resume.
        step: Learner steps that these weights have seen.
    """

    number: int
    step: int


@dataclass(frozen=True)
class Span:
    """Response tokens `start <= i < end` that version `version` (a number) sampled."""

    version: int
    start: int
    end: int


def lag(trained_step: int, sampled_step: int) -> int:
    """Return the lag, in steps, of a token sampled at `sampled_step` and trained at `trained_step`."""
    return trained_step - sampled_step


def is_over_age(trained_step: int, sampled_step: int, max_lag: int) -> bool:
    """Tell whether a token is too old to enter the loss of step `trained_step`."""
    return lag(trained_step, sampled_step) > max_lag


def step_of_position(position: int, groups_per_step: int) -> int:
    """Return the learner step that the ticket at `position` is meant for."""
    return position // groups_per_step


def is_admissible(position: int, groups_per_step: int, served_step: int, max_lag: int) -> bool:
    """Tell whether a replica that serves `served_step` may start the ticket at `position`.

    Rule (b) of admission: trained in its turn, the first token of the ticket is within the bound.
    """
    return lag(step_of_position(position, groups_per_step), served_step) <= max_lag


def max_open_tickets(groups_per_step: int, max_lag: int) -> int:
    """Return rule (a) of admission: how many admitted tickets may be untrained at once."""
    return (max_lag + 1) * groups_per_step
