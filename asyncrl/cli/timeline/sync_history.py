"""Reads what the weight-sync coordinator has journalled in a run's folder, for `asyncrl inspect weights`.

Owns the form of the report: of a living run the coordinator's own word, else the journal's last.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.control.record.syncing import WeightsAnswer
from asyncrl.core.errors import ConfigError, UnknownRun

JOURNAL_FILE = "weight_sync.jsonl"
MAX_ROUNDS, MAX_FAILURES = 10, 20
REFUSED = "REFUSED"
"""Outcome of a round's version at a member whose engine did not load it."""


def read_lines(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the journal's lines, oldest first; none if there is no journal. A torn last line is left out."""
    path = folder / JOURNAL_FILE
    if not path.exists():
        return
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        if line.endswith("\n"):
            yield json.loads(line)


def find_newest_folder(runs_dir: str) -> Path:
    """Return the folder of the run that was started last. Raises UnknownRun if there is none."""
    found = list(Path(runs_dir).glob("*/resolved.yaml"))
    if not found:
        raise UnknownRun(f"there is no run in {runs_dir}", hint="Say where the runs are with --dir")
    return max(found, key=lambda path: path.stat().st_mtime).parent


def report_weights(folder: Path, living: WeightsAnswer | None) -> dict[str, Any]:
    """Return how versions reached the replicas of a run.

    Args:
        living: The answer of the run's supervisor (see `syncing.weights_answer`), None once it has ended.

    Raises:
        ConfigError: The run has ended, and its coordinator has journalled nothing.
    """
    lines = list(read_lines(folder))
    if not lines and living is None:
        raise ConfigError(
            f"run '{folder.name}' has no {JOURNAL_FILE}", hint="Its weight sync has never started"
        )
    refused = {(one["member"], one["number"]): one["error"] for one in lines if one["kind"] == "load_failure"}
    rounds = [_with_loads(line, refused) for line in lines if line["kind"] == "round"]
    report = _from_journal(lines, rounds) | (_from_coordinator(living) if living else {})
    return {
        "run": folder.name,
        **report,
        "membership": _membership(rounds),
        "rounds": rounds[-MAX_ROUNDS:],
        "failures": [line for line in lines if line["kind"] == "blame"][-MAX_FAILURES:],
    }


def _with_loads(line: dict[str, Any], refused: Mapping[tuple[str, int], str]) -> dict[str, Any]:
    """Return a round with how its version's loads ended: bytes that arrived are not served yet."""
    members = [name for name in line["parts"] if (name, line["number"]) in refused]
    if not members:
        return line
    parts = line["parts"] | dict.fromkeys(members, REFUSED)
    why = f"load refused: {refused[members[0], line['number']]}"
    return line | {"parts": parts, "cause": line["cause"] or why}


def _from_journal(lines: list[dict[str, Any]], rounds: list[dict[str, Any]]) -> dict[str, Any]:
    last: dict[str, Any] = next((line for line in reversed(lines) if line["kind"] == "members"), {})
    token = next((line["token"] for line in reversed(lines) if line["kind"] == "start"), None)
    newest = last.get("version") or ([rounds[-1]["number"], rounds[-1]["step"]] if rounds else None)
    known: dict[str, Any] = next((r for r in reversed(rounds) if newest and r["number"] == newest[0]), {})
    failed = [line for line in rounds if line["cause"]]
    return {
        "told_by": "journal",
        "token": token,
        "version": newest,
        "digest": known.get("digest", ""),
        "num_bytes": known.get("version_bytes", 0),
        "under_way": [],
        "replicas": last.get("members", {}),
        "counters": {
            "rounds": len(rounds),
            "rounds_failed": len(failed),
            "failed_loads": sum(line["kind"] == "load_failure" for line in lines),
        }
        if rounds
        else {},
    }


def _from_coordinator(living: WeightsAnswer) -> dict[str, Any]:
    status = living.coordinator
    if status is None:
        return {}
    deferred = living.publisher.counters.get("deferred", 0) if living.publisher is not None else 0
    return {
        "told_by": "coordinator",
        "token": status.token,
        "version": status.version,
        "digest": status.digest,
        "num_bytes": status.num_bytes,
        "under_way": msgspec.to_builtins(status.rounds),
        "replicas": msgspec.to_builtins(status.members),
        "counters": {**status.counters, "deferred": deferred},
    }


def _membership(rounds: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the number and the members of the newest group that carried a version."""
    last = next((line for line in reversed(rounds) if line["membership"]), None)
    return None if last is None else {"number": last["membership"], "members": sorted(last["parts"])}
