"""Account of a run, from its journal (pure).

Times are seconds since the epoch, None where a journal has none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypedDict

from asyncrl.buffer.ledger import events as ev
from asyncrl.buffer.ledger.state import LedgerState
from asyncrl.cli.audit.recount import PENDING, Account, Recount

AGE_BOUNDS_S = (1, 10, 60, 600, 3600)
"""Upper ends of the classes of the histogram of ages, in seconds; the last class has none."""


@dataclass(frozen=True)
class TimedEvent:
    """An event and when it was journalled."""

    time_s: float | None
    event: ev.Event


class AccountReport(TypedDict):
    """The account of a run.

    `lag`: trained groups by the lag of their oldest token, which a mask may have kept out of the loss.
    `age_s`: open tickets by the time since they were issued, counted to the newest event.
    """

    account: Account
    steps_trained: int
    lineages: int
    versions: int
    events: int
    lag_max_trained: int | None
    max_lag: int
    lag: dict[int, int]
    age_s: dict[str, int]


def describe_account(
    past: Iterable[TimedEvent], max_lag: int, start: LedgerState | None = None
) -> AccountReport:
    """Return the account, tickets by state, and histograms."""
    recount = Recount(max_lag)
    issued_s: dict[int, float | None] = {}
    newest_s: float | None = None
    if start is not None:
        recount.begin_at(start)
    for timed in past:
        recount.take(timed.event)
        newest_s = timed.time_s if newest_s is None or timed.time_s is None else max(newest_s, timed.time_s)
        if isinstance(timed.event, ev.Issued):
            issued_s[timed.event.ticket] = timed.time_s
    ages = [
        newest_s - issued
        for number, row in recount.rows.items()
        if row.state in PENDING and (issued := issued_s.get(number)) is not None and newest_s is not None
    ]
    return {
        "account": recount.account(),
        "steps_trained": recount.steps_trained,
        "lineages": recount.num_lineages,
        "versions": len(recount.steps_of_versions),
        "events": recount.num_events,
        "lag_max_trained": recount.lag_max if recount.lag_max != ev.UNSAID else None,
        "max_lag": max_lag,
        "lag": dict(sorted(Counter(_lags(recount)).items())),
        "age_s": _classify(ages),
    }


def _lags(recount: Recount) -> Iterable[int]:
    steps = recount.steps_of_versions
    for row in recount.rows.values():
        low, high = row.versions
        if row.state == "trained" and 0 < low <= high <= len(steps):
            yield row.step - min(steps[low - 1 : high])


def _classify(ages_s: Iterable[float]) -> dict[str, int]:
    names = [f"under {bound} s" for bound in AGE_BOUNDS_S] + [f"{AGE_BOUNDS_S[-1]} s and more"]
    classes = dict.fromkeys(names, 0)
    for age_s in ages_s:
        classes[names[sum(age_s >= bound for bound in AGE_BOUNDS_S)]] += 1
    return classes
