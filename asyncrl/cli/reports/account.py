"""`asyncrl inspect` and `asyncrl verify`: what a run's journal tells, as text or JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from datetime import datetime
from pathlib import Path

from asyncrl.cli.audit import report
from asyncrl.cli.audit.account import AccountReport
from asyncrl.cli.exits import say, show
from asyncrl.cli.timeline.ticket import TicketMoment, trace_ticket
from asyncrl.core.errors import ConfigError


def print_account(run: Path, as_json: bool) -> None:
    """Print the account of a run."""
    found = report.inspect_account(str(run), "")
    if as_json:
        print(json.dumps(found, indent=2))
        return
    show(*lines_of(found))


def lines_of(found: AccountReport) -> list[str]:
    """Return the account as lines of text."""
    return _lines(_with_explained_lags(found))


def _with_explained_lags(found: AccountReport) -> dict[str, object]:
    """Return the account with each row of `lag` saying what it counts: an age over the bound looks wrong."""
    bound = found["max_lag"]
    rows = {
        f"{lag} (over max_lag: masked)" if lag > bound else str(lag): count
        for lag, count in found["lag"].items()
    }
    title = f"lag of the oldest token of each trained group (max_lag {bound})"
    return {
        title if name == "lag" else name: rows if name == "lag" else value for name, value in found.items()
    }


def _lines(values: Mapping[str, object], indent: str = "") -> list[str]:
    lines = []
    for name, value in values.items():
        if isinstance(value, dict):
            lines += [f"{indent}{name}", *_lines(value, indent + "  ")]
        else:
            lines.append(f"{indent}{name:<{24 - len(indent)}} {'-' if value is None else value}")
    return lines


def print_ticket(run: Path, number: int, as_json: bool) -> None:
    """Print the history of one ticket."""
    moments = find_ticket(run, number)
    if as_json:
        print(json.dumps([asdict(moment) for moment in moments], indent=2))
        return
    show(*(f"{_clock_time(moment.time_s):<24} {moment.what}" for moment in moments))


def find_ticket(run: Path, number: int) -> list[TicketMoment]:
    """Return the history of one ticket of the run in `run`.

    Raises:
        ConfigError: The journal does not know it.
    """
    past = report.open_past(str(run), "")
    moments = trace_ticket(past.events(), number, None if past.scan.snapshot is None else past.start())
    if not moments:
        raise ConfigError(
            f"the journal of run '{run.name}' does not know ticket {number}",
            hint="Tickets count from 1; 'asyncrl inspect account' says how many were issued",
        )
    return moments


def _clock_time(time_s: float | None) -> str:
    return "-" if time_s is None else datetime.fromtimestamp(time_s).isoformat(" ", "milliseconds")


def print_verdict(run: Path, as_json: bool) -> bool:
    """Print what a recount of the journal found; return whether the run is sound."""
    found = report.verify_run(str(run), "")
    if as_json:
        print(json.dumps(found, indent=2))
    else:
        show(*(f"{finding['law']}: {finding['message']}" for finding in found["findings"]), _verdict(found))
    if found["findings"]:
        say(f"run '{run.name}' breaks {', '.join(sorted({one['law'] for one in found['findings']}))}")
    return not found["findings"]


def _verdict(found: report.Verdict) -> str:
    account = found["account"]
    whole = "" if found["from_the_beginning"] else " since the snapshot that the journal begins with"
    lag = "not reported" if found["lag_max_trained"] is None else found["lag_max_trained"]
    return (
        f"{found['events']} events{whole}: {account['issued']} tickets, {account['trained']} trained in "
        f"{found['steps_trained']} steps, residue {account['residue']}; largest lag trained {lag}, "
        f"bound {found['max_lag']}; {len(found['findings'])} findings"
    )
