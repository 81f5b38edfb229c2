"""Arguments and options that several commands have, and how a shell completes them.

Imports nothing heavy: every command line loads this.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from asyncrl.cli.run.client import RunClient
    from asyncrl.control.record.rundir import RunDir

PLAIN: dict[str, Any] = {"rich_markup_mode": None, "pretty_exceptions_enable": False}
GROUP: dict[str, Any] = {**PLAIN, "invoke_without_command": True}
"""Of a group of commands: it shows its help where it is called without one."""


def show_help(context: typer.Context) -> None:
    """Print the help of a group that was called without a command."""
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit(0)


def complete_run(context: typer.Context, incomplete: str) -> list[str]:
    """Return the runs in `--dir` whose names begin so."""
    root = Path(context.params.get("runs_dir") or "runs")
    return sorted(
        path.parent.name for path in root.glob("*/resolved.yaml") if path.parent.name.startswith(incomplete)
    )


def complete_config(incomplete: str) -> list[str]:
    """Return the shipped configurations, and the YAML files here, whose names begin so."""
    from configs import overlays, shipped

    names = [*shipped(), *overlays(), *(str(path) for path in Path(".").glob("*.yaml"))]
    return sorted(name for name in names if name.startswith(incomplete))


RUN_HELP = "The run's name or folder; without it, the one started last."
Run = Annotated[str | None, typer.Argument(metavar="[RUN]", help=RUN_HELP, autocompletion=complete_run)]
RunOption = Annotated[
    str | None, typer.Option("--run", metavar="RUN", help="The same.", autocompletion=complete_run)
]
"""Every command that is about a run takes it either way: `asyncrl VERB NAME`, `asyncrl VERB --run NAME`."""
RUNS_DIR_HELP = "The folder that holds the runs (run.dir)."
RunsDir = Annotated[str, typer.Option("--dir", help=RUNS_DIR_HELP)]
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


def find_live(runs_dir: str, *names: str | None) -> RunClient:
    """Return a client of the named live run, or of the one that was started last."""
    from asyncrl.cli.run.client import find_run

    return find_run(runs_dir, one_of(*names))


def find_live_folder(runs_dir: str, *names: str | None) -> RunDir:
    """Return the folder of the named live run, or of the live one that was started last."""
    from asyncrl.cli.run import client

    return client.find_live_folder(runs_dir, one_of(*names))


def find_folder(runs_dir: str, *names: str | None) -> Path:
    """Return the folder of the named run, or of the one that was started last; living or ended.

    Raises:
        UnknownRun: There is none.
    """
    from asyncrl.cli.timeline.sync_history import find_newest_folder

    name = one_of(*names)
    if not name:
        return find_newest_folder(runs_dir)
    from asyncrl.core.config.load import find_run_folder

    return find_run_folder(name, runs_dir)


def find_target(runs_dir: str, *names: str | None) -> str:
    """Return the model folder or the run's folder that is named; without a name, the run started last.

    Raises:
        UnknownRun: There is neither.
    """
    from asyncrl.planner.plan.prepare import is_model

    name = one_of(*names)
    return name if name and is_model(name) else str(find_folder(runs_dir, name))


def one_of(*names: str | None) -> str | None:
    """Return the run that was named as an argument or with `--run`; a command is about one."""
    given = {name for name in names if name}
    if len(given) > 1:
        raise typer.BadParameter(f"two runs are named: {', '.join(sorted(given))}", param_hint="RUN")
    return given.pop() if given else None


def split_run(words: Sequence[str], is_other: Callable[[str], bool], usage: str) -> tuple[str | None, str]:
    """Return the run, if it was named, and the last word, of `[RUN] WORD`."""
    *runs, last = words
    if len(runs) > 1 or not is_other(last):
        raise typer.BadParameter(f"'{' '.join(words)}' is not of the form {usage}")
    return (runs[0] if runs else None), last
