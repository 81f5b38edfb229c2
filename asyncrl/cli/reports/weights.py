"""`asyncrl inspect weights`: which version each replica serves and how it came there, as text or JSON."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path

import msgspec

from asyncrl.cli.exits import show
from asyncrl.cli.reports.table import align
from asyncrl.cli.run.client import connect
from asyncrl.cli.timeline.sync_history import WeightsReport, report_weights
from asyncrl.control.record.rundir import RunDir


def print_weights(folder: Path, as_json: bool) -> None:
    """Print the report of the run in `folder`."""
    report = inspect_weights(folder)
    if as_json:
        print(json.dumps(msgspec.to_builtins(report), indent=2))
    else:
        show(*lines_of(report))


def inspect_weights(folder: Path) -> WeightsReport:
    """Return the report of the run in `folder`, from its coordinator while it lives."""
    client = connect(RunDir(folder))
    return report_weights(folder, client.weights() if client else None)


def lines_of(report: WeightsReport) -> list[str]:
    """Return the report as lines of text."""
    counters = "  ".join(f"{name} {count}" for name, count in sorted(report.counters.items()))
    head = [
        f"run {report.run}, told by its {report.told_by}",
        f"version     {_version(report)}",
        f"membership  {_membership(report)}",
        f"counters    {counters or '-'}",
    ]
    return [*head, "", *_replicas(report), "", *_rounds(report), "", *_failures(report)]


def _version(report: WeightsReport) -> str:
    if report.version is None:
        return "none yet"
    number, step = report.version
    return f"{number} (step {step}), {report.num_bytes} bytes, digest {report.digest or '-'}"


def _membership(report: WeightsReport) -> str:
    found = report.membership
    return f"{found.number} ({', '.join(found.members)})" if found else "none yet"


def _replicas(report: WeightsReport) -> list[str]:
    rows = [("replica", "state", "version", "staged", "transfer s", "swap s", "remarks")]
    for name, member in sorted(report.replicas.items()):
        said = {"fenced": member.fenced, "pinned": member.pinned, "served alone": member.served_alone}
        is_so = [word for word, is_true in said.items() if is_true]
        is_so += [f"maps {member.mapped_from}'s copy"] * bool(member.mapped_from)
        remarks = ", ".join(is_so + [member.error] * bool(member.error))
        version, staged = str(member.version or "-"), str(member.staged or "-")
        times = (_seconds(member.last_round_s), _seconds(member.last_swap_s))
        rows.append((name, member.state, version, staged, *times, remarks or "-"))
    return align(rows)


def _rounds(report: WeightsReport) -> list[str]:
    rows = [("round of", "version", "lane", "seconds", "bytes", "members", "cause")]
    for line in report.rounds:
        parts = ", ".join(f"{name} {part}" for name, part in sorted(line.parts.items()))
        rows.append(
            (
                _clock_time(line.time),
                str(line.number),
                f"{line.lane} of {line.holder}" if line.holder else line.lane,
                _seconds(line.seconds),
                str(line.num_bytes),
                parts,
                line.cause or "-",
            )
        )
    return align(rows) if len(rows) > 1 else ["no round has ended yet"]


def _failures(report: WeightsReport) -> list[str]:
    if not report.failures:
        return ["no culprit"]
    rows = [("blamed at", "culprit", "newest", "cause")]
    for line in report.failures:
        rows.append((_clock_time(line.time), line.culprit, str(line.number), line.cause))
    return align(rows)


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _clock_time(time_s: float) -> str:
    return datetime.fromtimestamp(time_s).isoformat(" ", "milliseconds")
