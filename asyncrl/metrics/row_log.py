"""The learner's own log of its metric rows, in the run's folder.

Rank 0 appends each row before its step is booked; the supervisor takes from it what it was not handed: it
was away, or the learner died. Owns the file's place and form. Invariant: a step that a checkpoint holds has
its row here, or in the run's record.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from asyncrl.durable import append_lines

NAME = "learner_rows.jsonl"


def append_row(run_dir: Path, row: Mapping[str, Any]) -> None:
    """Add one row, in one write: who dies meanwhile has written it or has not.

    Raises:
        OSError: The disk is full, or the folder is gone.
    """
    append_lines(run_dir / NAME, json.dumps(row) + "\n")


def read_rows(run_dir: Path) -> list[dict[str, Any]]:
    """Return the rows as they were written, none if there is no log; a torn line is left out."""
    try:
        lines = (run_dir / NAME).read_bytes().splitlines()
    except FileNotFoundError:
        return []
    found = (_row_in(line) for line in lines)
    return [row for row in found if row is not None]


def _row_in(line: bytes) -> dict[str, Any] | None:
    try:
        row: dict[str, Any] = json.loads(line)
    except ValueError:
        return None
    return row
