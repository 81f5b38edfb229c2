"""Policy versions and the arithmetic of staleness (pure).

This module owns the one rule that three places apply: the ledger when it admits a ticket, the
learner when it masks a token, and the loss when it asserts the bound again.

    lag = step of the weights being trained - step of the version that sampled the token
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from asyncrl.core.errors import WireError

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


def check_spans(spans: Iterable[Sequence[int]], lengths: Sequence[int]) -> None:
    """Raise WireError unless the spans cover every length without gap, in rising version order.

    Args:
        spans: (sample, version, start, end), sample by sample.
    """
    last, end, version, num_samples = -1, 0, UNLOADED, len(lengths)
    for sample, number, start, stop in spans:
        if not 0 <= sample < num_samples:
            raise WireError(f"a span names sample {sample} of {num_samples}")
        if sample != last:
            _check_covered(lengths, last, sample, end)
            last, end, version = sample, 0, UNLOADED
        if start != end or stop <= start or number <= version:
            raise WireError(
                f"sample {sample}: the span {start} to {stop} of version {number} does not follow "
                f"token {end} of version {version}"
            )
        end, version = stop, number
    _check_covered(lengths, last, num_samples, end)


def _check_covered(lengths: Sequence[int], last: int, following: int, end: int) -> None:
    """Check that sample `last` ends at `end`, and that those between it and `following` are empty."""
    if following < last:
        raise WireError(f"a span of sample {following} comes after one of sample {last}")
    if last >= 0 and end != lengths[last]:
        raise WireError(f"sample {last}: its spans end at token {end}, but there are {lengths[last]} tokens")
    for sample in range(last + 1, following):
        if lengths[sample]:
            raise WireError(f"sample {sample}: no span covers its {lengths[sample]} tokens")
