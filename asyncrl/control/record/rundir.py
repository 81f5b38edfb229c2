"""The files of a run: where each lies, written whole or not at all.

runs/<name>/: config.yaml, resolved.yaml, run.json, keys.json and service_keys.json (of the live run),
phase.json, metrics.jsonl, learner_rows.jsonl (until the end), events.jsonl, fleet.json,
pending_checkpoint.json (until it is there), weight_sync.jsonl, outcome.json, outcome.reserve, summary.json,
curves.png, tensorboard/, logs/, journal/, checkpoints/, weights/ (Hugging Face).
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncrl.control.record.live import read_live
from asyncrl.core.files.durable import replace_text
from asyncrl.core.metrics import row_log

TAIL_LINES, TAIL_BYTES = 20, 1 << 16
STATE_DUMP = "[state-dump]"
"""Marks the lines of the state dump that a raylet logs as it exits; `tail` leaves them out."""


@dataclass(frozen=True)
class RunDir:
    """Paths under `runs/<name>`."""

    path: Path

    @property
    def resolved(self) -> Path:
        return self.path / "resolved.yaml"

    @property
    def live(self) -> Path:
        """Connection of a client to the live run: pid, address, key. Mode 0600."""
        return self.path / "run.json"

    @property
    def keys(self) -> Path:
        """Connection of an external generator to the live run's buffer. Mode 0600."""
        return self.path / "keys.json"

    @property
    def service_keys(self) -> Path:
        """Keys for an external learner; they open every operation of the run. Mode 0600."""
        return self.path / "service_keys.json"

    @property
    def config(self) -> Path:
        """The configuration as it was submitted, before models and data were fetched. Mode 0600.

        `asked.yaml` in a run of an older asyncrl.
        """
        older = self.path / "asked.yaml"
        return older if older.exists() else self.path / "config.yaml"

    @property
    def phase(self) -> Path:
        """Activity of the head while no supervisor can be asked."""
        return self.path / "phase.json"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def outcome(self) -> Path:
        return self.path / "outcome.json"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def learner_rows(self) -> tuple[Path, ...]:
        """The learner's own log of its rows, its older file first: see `asyncrl.core.metrics.row_log`."""
        return row_log.paths_of(self.path)

    def remove_learner_rows(self) -> None:
        """Remove the learner's own log: its rows are in `metrics`, or of steps that a rollback discarded."""
        for path in self.learner_rows:
            path.unlink(missing_ok=True)

    @property
    def events(self) -> Path:
        """Events of the run, a line each: see `asyncrl.control.record.events`."""
        return self.path / "events.jsonl"

    @property
    def reserve(self) -> Path:
        """Preallocated file, given up so that `outcome` can be written to a full disk."""
        return self.path / "outcome.reserve"

    @property
    def identity(self) -> tuple[int, int] | None:
        """Device and inode: tell this folder from a later one of its name; None if there is none."""
        try:
            found = self.path.stat()
        except FileNotFoundError:
            return None
        return found.st_dev, found.st_ino

    @property
    def fleet(self) -> Path:
        """State from which a restarted supervisor goes on: the services, and why each was started again."""
        return self.path / "fleet.json"

    @property
    def pending_checkpoint(self) -> Path:
        """A checkpoint that was asked for, until the journal knows it: see `asyncrl.control.operations`."""
        return self.path / "pending_checkpoint.json"

    @property
    def summary(self) -> Path:
        return self.path / "summary.json"

    @property
    def curves(self) -> Path:
        return self.path / "curves.png"

    @property
    def weights(self) -> Path:
        return self.path / "weights"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    def log(self, name: str) -> Path:
        return self.logs / f"{name}.log"

    def log_sizes(self) -> dict[str, int]:
        """Return the bytes of each service's log: at a start of the run, those that earlier starts wrote."""
        return {path.stem: path.stat().st_size for path in self.logs.glob("*.log")}

    def tail(self, name: str, num_lines: int = TAIL_LINES) -> list[str]:
        """Return the last lines of a service's log since this start of the run; none if there is no log."""
        live = read_live(self.live)
        before = live.log_sizes.get(name, 0) if live is not None else 0
        try:
            with self.log(name).open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(before if before <= size else 0, size - TAIL_BYTES))
                lines = file.read().decode(errors="replace").splitlines()
        except FileNotFoundError:
            return []
        return [line for line in lines if STATE_DUMP not in line][-num_lines:]


def write_json(path: Path, value: Mapping[str, object], mode: int = 0o644, is_synced: bool = False) -> None:
    """Write `value` so that a reader sees the old file or the new one, never a part; see `replace_text`."""
    replace_text(path, json.dumps(value, indent=2) + "\n", mode, is_synced)


def read_json(path: Path) -> dict[str, Any] | None:
    """Return the JSON object in `path`; None if there is no such file, or none that can be read.

    A file that was not synced may be empty after the machine died: it is as if it had not been written.
    """
    try:
        found = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    return found if isinstance(found, dict) else None
