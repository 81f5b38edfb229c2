"""A stand-in for the library `swanlab`: takes the same calls and remembers them. Nothing else."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

RUNS: dict[str, Run] = {}
SECRET = "SWANLAB_API_KEY"
CURRENT: list[Run] = []


class Run:
    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = settings
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.num_finishes = 0


def init(
    project: str | None = None,
    workspace: str | None = None,
    experiment_name: str | None = None,
    description: str | None = None,
    config: dict[str, Any] | None = None,
    logdir: str | None = None,
    mode: str | None = None,
    id: str | None = None,
    resume: str | None = None,
) -> Run:
    if SECRET not in os.environ:
        raise RuntimeError("not logged in")
    assert id is not None
    assert len(id) == 21
    assert id.isalnum()
    assert id.islower() or id.isdigit()
    assert resume == "allow"
    assert Path(logdir or "").is_dir(), "the folder must exist"
    assert not CURRENT, "one experiment at a time"
    run = RUNS.setdefault(id, Run({"project": project, "name": experiment_name, "config": config}))
    CURRENT.append(run)
    return run


def log(data: dict[str, Any], step: int | None = None, print_to_console: bool = False) -> None:
    assert step is not None
    CURRENT[0].rows.append((step, dict(data)))


def finish() -> None:
    CURRENT.pop().num_finishes += 1


def received() -> list[list[tuple[int, dict[str, float]]]]:
    return [run.rows for run in RUNS.values()]


def finishes() -> list[int]:
    return [run.num_finishes for run in RUNS.values()]
