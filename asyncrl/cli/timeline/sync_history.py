"""History of a run's weight sync, from its coordinator's journal, for `asyncrl inspect weights`.

Owns the report: of a living run the coordinator's own word, else the journal's last.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from asyncrl.control.record.syncing import WeightsAnswer
from asyncrl.core.errors import ConfigError, UnknownRun
from asyncrl.core.status.service import MemberStatus, RoundStatus
from weight_sync.sync_records import (
    JOURNAL_FILE,
    BlameRecord,
    Entry,
    LoadFailureRecord,
    MembersRecord,
    RoundRecord,
    StartRecord,
    parse_entry,
)

MAX_ROUNDS, MAX_FAILURES = 10, 20
REFUSED = "REFUSED"
"""Outcome of a round's version at a member whose engine did not load it."""


class Membership(msgspec.Struct, frozen=True):
    """The group that has carried a version last."""

    number: int
    members: tuple[str, ...]


class WeightsReport(msgspec.Struct, frozen=True, kw_only=True):
    """History of versions on their way to the replicas of a run.

    Attributes:
        told_by: `coordinator` or `journal`. token: The coordinator's, None where the journal has lost it.
        version: The newest, as (number, step); digest and num_bytes are of it.
        under_way: Rounds that have not ended. rounds: The last that have. failures: The last blames.
        replicas: By the name of the member beside each.
    """

    run: str
    told_by: str
    token: int | None
    version: tuple[int, int] | None
    digest: str
    num_bytes: int
    under_way: tuple[RoundStatus, ...] = ()
    replicas: Mapping[str, MemberStatus]
    counters: Mapping[str, int]
    membership: Membership | None
    rounds: tuple[RoundRecord, ...]
    failures: tuple[BlameRecord, ...]


def read_entries(folder: Path) -> Iterator[Entry]:
    """Yield the journal's entries, oldest first; none if there is no journal. Torn lines are left out."""
    path = folder / JOURNAL_FILE
    if path.exists():
        for line in path.read_bytes().splitlines():
            if (entry := parse_entry(line)) is not None:
                yield entry


def find_newest_folder(runs_dir: str) -> Path:
    """Return the folder of the run that was started last. Raises UnknownRun if there is none."""
    found = list(Path(runs_dir).glob("*/resolved.yaml"))
    if not found:
        raise UnknownRun(f"there is no run in {runs_dir}", hint="Say where the runs are with --dir")
    return max(found, key=lambda path: path.stat().st_mtime).parent


def report_weights(folder: Path, living: WeightsAnswer | None) -> WeightsReport:
    """Return how versions reached the replicas of a run.

    Args:
        living: The answer of the run's supervisor (see `syncing.weights_answer`), None once it has ended.

    Raises:
        ConfigError: The run has ended, and its coordinator has journalled nothing.
    """
    entries = list(read_entries(folder))
    if not entries and living is None:
        raise ConfigError(
            f"run '{folder.name}' has no {JOURNAL_FILE}", hint="Its weight sync has never started"
        )
    report = _from_journal(folder.name, entries)
    return report if living is None else _as_told(report, living)


def _from_journal(run: str, entries: Sequence[Entry]) -> WeightsReport:
    failed_loads = [one for one in entries if isinstance(one, LoadFailureRecord)]
    refused = {(one.member, one.number): one.error for one in failed_loads}
    rounds = [_with_loads(one, refused) for one in entries if isinstance(one, RoundRecord)]
    last = next((one for one in reversed(entries) if isinstance(one, MembersRecord)), None)
    newest = (rounds[-1].number, rounds[-1].step) if rounds else None
    if last is not None and last.version is not None:
        newest = last.version
    known = next((one for one in reversed(rounds) if newest and one.number == newest[0]), None)
    counters = {
        "rounds": len(rounds),
        "rounds_failed": sum(bool(one.cause) for one in rounds),
        "failed_loads": len(failed_loads),
    }
    return WeightsReport(
        run=run,
        told_by="journal",
        token=next((one.token for one in reversed(entries) if isinstance(one, StartRecord)), None),
        version=newest,
        digest=known.digest if known else "",
        num_bytes=known.version_bytes if known else 0,
        replicas=last.members if last else {},
        counters=counters if rounds else {},
        membership=_membership(rounds),
        rounds=tuple(rounds[-MAX_ROUNDS:]),
        failures=tuple([one for one in entries if isinstance(one, BlameRecord)][-MAX_FAILURES:]),
    )


def _with_loads(record: RoundRecord, refused: Mapping[tuple[str, int], str]) -> RoundRecord:
    """Return a round with how its version's loads ended: bytes that arrived are not served yet."""
    members = [name for name in record.parts if (name, record.number) in refused]
    if not members:
        return record
    parts = {**record.parts, **dict.fromkeys(members, REFUSED)}
    why = f"load refused: {refused[members[0], record.number]}"
    return msgspec.structs.replace(record, parts=parts, cause=record.cause or why)


def _as_told(report: WeightsReport, living: WeightsAnswer) -> WeightsReport:
    """Return the report with what the coordinator itself says, if it does."""
    status = living.coordinator
    if status is None:
        return report
    deferred = living.publisher.counters.get("deferred", 0) if living.publisher is not None else 0
    return msgspec.structs.replace(
        report,
        told_by="coordinator",
        token=status.token,
        version=status.version,
        digest=status.digest,
        num_bytes=status.num_bytes,
        under_way=status.rounds,
        replicas=status.members,
        counters={**status.counters, "deferred": deferred},
    )


def _membership(rounds: Sequence[RoundRecord]) -> Membership | None:
    """Return the newest group that carried a version."""
    last = next((one for one in reversed(rounds) if one.membership), None)
    return None if last is None else Membership(last.membership, tuple(sorted(last.parts)))
