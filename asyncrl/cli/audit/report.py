"""Reports on the journal of a run, living or ended: `asyncrl inspect` and `asyncrl verify`.

Nothing in the journal is changed, and a buffer may be at work on it: see `journals.kind`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypedDict

from asyncrl.buffer.composition import ledger_settings
from asyncrl.buffer.journals.kind import Scan, journal_kind
from asyncrl.buffer.ledger.census import take_census
from asyncrl.buffer.ledger.state import LedgerState
from asyncrl.cli.audit.account import AccountReport, TimedEvent, describe_account
from asyncrl.cli.audit.recount import Account, Finding, Recount
from asyncrl.core.config.load import find_run_folder, load_resolved
from asyncrl.core.config.tree import Config


@dataclass(frozen=True)
class RunPast:
    """Contents of a run's journal, and the configuration that they are read by."""

    config: Config
    scan: Scan

    def start(self) -> LedgerState:
        """Return the ledger before the first of the commits."""
        settings = ledger_settings(self.config)
        return (
            LedgerState(settings)
            if self.scan.snapshot is None
            else LedgerState.from_snapshot(settings, self.scan.snapshot)
        )

    def events(self) -> Iterator[TimedEvent]:
        """Yield every event with the time of its commit."""
        for commit in self.scan.commits:
            for event in commit.events:
                yield TimedEvent(commit.time_s, event)


def open_past(run: str, runs_dir: str) -> RunPast:
    """Return the past of a run by name or folder, without its payloads. Raises as `opened_past`."""
    with opened_past(find_run_folder(run, runs_dir)) as past:
        return past


@contextlib.contextmanager
def opened_past(folder: Path, *, is_whole: bool = True) -> Iterator[RunPast]:
    """Open the past of the run in `folder`.

    Args:
        is_whole: From the beginning, where the journal has kept it; otherwise from its newest snapshot on.

    Raises:
        ConfigError: It keeps no journal, or the journal cannot be reached.
        CheckpointError: The journal is damaged.
    """
    config = load_resolved(folder)
    with journal_kind(config.buffer.journal).scan(config.buffer, folder, is_whole=is_whole) as scan:
        yield RunPast(config, scan)


def committed_steps(folder: Path) -> list[int]:
    """Return the steps that the run in `folder` can go on from, ascending; 0 is its beginning.

    None at all: nothing has been written to its journal. Raises as `opened_past`.
    """
    with opened_past(folder, is_whole=False) as past:
        if past.scan.snapshot is None and not past.scan.commits:
            return []
        state = past.start()
        for timed in past.events():
            state.apply(timed.event)
    is_whole = state.floor_step == 0
    return sorted({*state.checkpoints, *([0] if is_whole else [])})


def inspect_account(run: str, runs_dir: str) -> AccountReport:
    """Return the account of a run, see `describe_account`."""
    past = open_past(run, runs_dir)
    return describe_account(past.events(), past.config.staleness.max_lag, past.start())


class Verdict(TypedDict):
    """Result of a recount: its findings as {law, message}, empty for a sound run; and its extent."""

    findings: list[dict[str, str]]
    events: int
    from_the_beginning: bool
    steps_trained: int
    lineages: int
    max_lag: int
    lag_max_trained: int | None
    steps_without_a_lag: int
    account: Account


def verify_run(run: str, runs_dir: str) -> Verdict:
    """Check S1, S2, S3 and S5 on a run's journal by a recount, and the ledger's own account against it."""
    past = open_past(run, runs_dir)
    recount = Recount(past.config.staleness.max_lag)
    recount.begin_at(past.start())
    recount.take_all(timed.event for timed in past.events())
    findings = recount.conclude() or _compare(recount, past)
    return {
        "findings": [asdict(finding) for finding in findings],
        "events": recount.num_events,
        "from_the_beginning": past.scan.snapshot is None,
        "steps_trained": recount.steps_trained,
        "lineages": recount.num_lineages,
        "max_lag": recount.max_lag,
        "lag_max_trained": recount.lag_max if recount.lag_max >= 0 else None,
        "steps_without_a_lag": recount.num_steps_unsaid,
        "account": recount.account(),
    }


def _compare(recount: Recount, past: RunPast) -> list[Finding]:
    """Return where the ledger's own account differs from the recount."""
    state = past.start()
    for timed in past.events():
        state.apply(timed.event)
    ours: Mapping[str, object] = recount.account()
    theirs = take_census(state).as_values()
    return [
        Finding("S1", f"the recount says {key}: {ours[key]}, the ledger {theirs[key]}")
        for key in ours
        if _without_zeros(ours[key]) != _without_zeros(theirs[key])
    ]


def _without_zeros(value: object) -> object:
    return {key: count for key, count in value.items() if count} if isinstance(value, dict) else value
