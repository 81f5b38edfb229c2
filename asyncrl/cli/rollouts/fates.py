"""Rollouts in a run's journal: the answers of each step, the dropped groups, the reason for each drop (pure).

Owns the facts per token: the lag of its version, and the reason for its exclusion from the loss. A lag counts
plain steps of the current lineage; the lag of a dropped group is the lag at the step in the making at that
time.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from asyncrl.buffer.ledger import events as ev
from asyncrl.buffer.ledger.state import LedgerState
from asyncrl.cli.audit.account import TimedEvent
from asyncrl.cli.audit.recount import Recount
from asyncrl.core.errors import ConfigError
from asyncrl.core.experience import CUT_REASONS, Group, Trajectory
from asyncrl.core.staleness import Span

TRAINED, OBSERVED, CUT, OVER_AGE = "", "observation", "cut", "over age"
"""Reason for which a token is not trained; empty if it is."""

WHY_DROPPED: Mapping[str, str] = {
    "stale": "over age: its tokens were older than max_lag allows",
    "zero_variance": "all its rewards were equal, so there was nothing to learn from it",
    "masked": "all its answers were cut, and cut answers are masked",
    "poison": "every attempt at it failed",
    "guard": "the guard refused its update",
    "oversized": "a row of it was longer than a microbatch of the learner",
    "infrastructure": "a reward's or an environment's server, sandbox or process could not be used",
    "timeout": "its reward or environment took too long at every attempt",
    "environment": "its environment failed at every attempt",
    "reward": "no reward could be computed at any attempt",
    "budget": "the budget of a judge is used up",
    "not_retryable": "an attempt ended inside a call that must not be made twice",
}


@dataclass(frozen=True)
class Fate:
    """Final state of one group.

    Attributes:
        step: That trained or reserved it; for a dropped one the step that was in the making, -1 if it was
            dropped before the journal begins.
        reason: Why it was dropped, empty otherwise.
        time_s: When it was dropped, seconds since the epoch.
    """

    ticket: int
    attempt: int
    state: str
    step: int
    reason: str = ""
    is_given_up: bool = False
    time_s: float | None = None

    @property
    def key(self) -> tuple[int, int]:
        """Key of its payload."""
        return self.ticket, self.attempt


@dataclass(frozen=True)
class AgedSpan:
    """Tokens of one version, and their lag; None for a version that the journal does not know."""

    span: Span
    lag: int | None
    is_over_age: bool


@dataclass(frozen=True)
class Rollout:
    """One answer with all that is known of it.

    Attributes:
        group_mean: Mean reward of its group.
        spans: Of its trajectory, with their ages.
    """

    fate: Fate
    sample: int
    prompt_ids: Sequence[int]
    trajectory: Trajectory
    group_mean: float
    spans: tuple[AgedSpan, ...]

    def masks(self) -> list[str]:
        """Return for each token why it is not trained, `TRAINED` if it is."""
        trajectory = self.trajectory
        is_cut = trajectory.finish_reason in CUT_REASONS and not trajectory.loss_mask.any()
        kept_out = CUT if is_cut else OBSERVED
        masks = [TRAINED if kept else kept_out for kept in trajectory.loss_mask.tolist()]
        for aged in self.spans:
            for place in range(aged.span.start, aged.span.end) if aged.is_over_age else ():
                masks[place] = masks[place] or OVER_AGE
        return masks


class FateBook:
    """Reads the events once; then tells which groups a step was made of and which were dropped.

    Args:
        start: The ledger before the first event.
    """

    def __init__(self, past: Iterable[TimedEvent], start: LedgerState, max_lag: int) -> None:
        self._max_lag = max_lag
        self._recount = Recount(max_lag)
        self._recount.begin_at(start)
        self._state = start
        self._drops: dict[int, tuple[int, float | None]] = {
            number: (-1, None) for number, row in self._recount.rows.items() if row.state == "dropped"
        }
        for timed in past:
            if isinstance(timed.event, ev.Dropped):
                self._drops[timed.event.ticket] = (self._recount.steps_trained, timed.time_s)
            self._recount.take(timed.event)
            self._state.apply(timed.event)

    @property
    def newest_step(self) -> int:
        """The newest step that was trained.

        Raises:
            ConfigError: There is none.
        """
        if not self._recount.steps_trained:
            raise ConfigError(
                "no step was trained yet", hint="Look at the groups of step 0 in the making with --step 0"
            )
        return self._recount.steps_trained - 1

    def of_step(self, step: int) -> list[Fate]:
        """Return the groups that a step trained or has reserved, by ticket.

        Raises:
            ConfigError: There are none.
        """
        fates = [
            Fate(number, row.attempt, row.state, step)
            for number, row in sorted(self._recount.rows.items())
            if row.step == step and row.state in ("trained", "reserved")
        ]
        if not fates:
            raise ConfigError(
                f"the journal knows no group of step {step}",
                hint=f"{self._recount.steps_trained} steps were trained, counted from 0",
            )
        return fates

    def dropped(self, step: int | None = None) -> list[Fate]:
        """Return the groups that were dropped, newest first; with `step` those while it was in the making."""
        fates = []
        for number, (making, time_s) in reversed(self._drops.items()):
            row = self._recount.rows.get(number)
            if row is not None and (step is None or making == step):
                fates.append(
                    Fate(number, row.attempt, row.state, making, row.reason, row.is_given_up, time_s)
                )
        return fates

    def rollouts_of(self, fate: Fate, group: Group) -> list[Rollout]:
        """Return the answers of one group."""
        mean = statistics.fmean(group.episode_rewards)
        prompt_ids = group.prompt_ids.tolist()
        return [
            Rollout(fate, sample, prompt_ids, trajectory, mean, self._aged(trajectory.spans, fate.step))
            for sample, trajectory in zip(group.samples, group.trajectories, strict=True)
        ]

    def _aged(self, spans: Iterable[Span], step: int) -> tuple[AgedSpan, ...]:
        versions = self._state.versions
        aged = []
        for span in spans:
            is_known = span.version in versions
            lag = step - versions.counted_step(span.version) if is_known and step >= 0 else None
            aged.append(AgedSpan(span, lag, lag is not None and lag > self._max_lag))
        return tuple(aged)


def order_rollouts(rollouts: Iterable[Rollout], order: str) -> list[Rollout]:
    """Return them `worst` or `best` reward first, equal ones and all others by ticket and sample."""
    sign = {"worst": 1, "best": -1}.get(order, 0)
    return sorted(rollouts, key=lambda one: (sign * one.trajectory.reward, _place(one)))


def _place(one: Rollout) -> tuple[int, int]:
    return one.fate.ticket, one.sample
