"""Arguments and options that several commands have, and how a shell completes them.

Imports nothing heavy: every command line loads this.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from asyncrl.control.api.client import RunClient

PLAIN: dict[str, Any] = {"no_args_is_help": True, "rich_markup_mode": None}


def complete_run(context: typer.Context, incomplete: str) -> list[str]:
    """Return the runs in `--dir` whose names begin so."""
    root = Path(context.params.get("runs_dir") or "runs")
    return sorted(
        path.parent.name for path in root.glob("*/resolved.yaml") if path.parent.name.startswith(incomplete)
    )


def complete_config(incomplete: str) -> list[str]:
    """Return the shipped configurations, and the YAML files here, whose names begin so."""
    from configs import shipped

    names = [*shipped(), *(str(path) for path in Path(".").glob("*.yaml"))]
    return sorted(name for name in names if name.startswith(incomplete))


RunName = Annotated[
    str | None,
    typer.Option(
        "--run",
        help="The run's name or folder; without it, the one started last.",
        autocompletion=complete_run,
    ),
]
Run = Annotated[
    str | None,
    typer.Argument(
        help="The run's name or folder; without it, the one started last.", autocompletion=complete_run
    ),
]
RunsDir = Annotated[str, typer.Option("--dir", help="The folder that holds the runs (run.dir).")]
AsJson = Annotated[bool, typer.Option("--json", help="Print it as JSON.")]
Configs = Annotated[
    list[str],
    typer.Argument(
        metavar="CONFIG...",
        help="YAML files, each laid over those before it, or the name of a shipped one, such as quickstart.",
        autocompletion=complete_config,
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change a value: learner.steps=10."),
]
Step = Annotated[
    str, typer.Option("--step", metavar="N", help="The checkpoint's step, or 'newest', or 'best'.")
]


def find_live(runs_dir: str, name: str | None) -> RunClient:
    """Return a client of the named live run, or of the one that was started last."""
    from asyncrl.control.api.client import find_run

    return find_run(runs_dir, name)


def name_run(runs_dir: str, name: str | None) -> str:
    """Return the named run, or the one that was started last; living or ended."""
    if name:
        return name
    from asyncrl.control.record.sync_history import find_newest_folder

    return str(find_newest_folder(runs_dir))
