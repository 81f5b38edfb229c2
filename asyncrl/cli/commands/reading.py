"""Commands that read what a run has written down."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from asyncrl.cli import exits
from asyncrl.cli.options import (
    GROUP,
    PLAIN,
    AsJson,
    Overrides,
    Run,
    RunOption,
    RunsDir,
    find_folder,
    show_help,
    split_run,
)

PLACE = 4
app = typer.Typer(**PLAIN)
inspect = typer.Typer(help="Read a run's journals.", callback=show_help, **GROUP)
app.add_typer(inspect, name="inspect")


@inspect.command()
def account(
    run: Run = None, run_option: RunOption = None, runs_dir: RunsDir = "runs", as_json: AsJson = False
) -> None:
    """Print what became of every prompt.

    Also the lag of trained and of open groups.
    """
    folder = find_folder(runs_dir, run, run_option)  # here and below before imports that take their time
    from asyncrl.cli.reports.account import print_account

    print_account(folder, as_json)


@inspect.command()
def ticket(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="[RUN] TICKET", help="The run, else the one started last, and the ticket's id."
        ),
    ],
    run: RunOption = None,
    runs_dir: RunsDir = "runs",
    as_json: AsJson = False,
) -> None:
    """Print the history of one ticket."""
    named, number = split_run(words, _is_ticket, "[RUN] TICKET, for example 17")
    folder = find_folder(runs_dir, named, run)
    from asyncrl.cli.reports.account import print_ticket

    print_ticket(folder, int(number), as_json)


def _is_ticket(word: str) -> bool:
    return word.isascii() and word.isdigit() and int(word) > 0


@inspect.command()
def rollouts(
    run: Run = None,
    run_option: RunOption = None,
    step: Annotated[
        int | None, typer.Option("--step", metavar="N", min=0, help="Otherwise the newest that was trained.")
    ] = None,
    worst: Annotated[bool, typer.Option("--worst", help="The lowest rewards first.")] = False,
    best: Annotated[bool, typer.Option("--best", help="The highest rewards first.")] = False,
    dropped: Annotated[
        bool, typer.Option("--dropped", help="Groups that were dropped, the newest first, and why.")
    ] = False,
    limit: Annotated[
        int | None, typer.Option("--limit", metavar="N", min=1, help="How many answers: 8, or 64 elsewhere.")
    ] = None,
    html: Annotated[
        bool, typer.Option("--html", help="Write one HTML file into the run's folder and print its path.")
    ] = False,
    runs_dir: RunsDir = "runs",
    as_json: AsJson = False,
) -> None:
    """Print prompts and answers, token by token.

    Log-probs, versions and their lag, rewards, masks.
    """
    if worst and best:
        raise typer.BadParameter("--worst and --best exclude each other")
    if html and as_json:
        raise typer.BadParameter("--html and --json exclude each other")
    folder = find_folder(runs_dir, run, run_option)
    from asyncrl.cli.rollouts.command import print_rollouts

    print_rollouts(
        folder,
        step=step,
        order="worst" if worst else "best" if best else "",
        is_dropped=dropped,
        limit=limit,
        as_json=as_json,
        as_page=html,
    )


@inspect.command()
def weights(
    run: Run = None, run_option: RunOption = None, runs_dir: RunsDir = "runs", as_json: AsJson = False
) -> None:
    """Print which version each replica serves.

    Also the sync rounds that led to it, and the culprit of each failure.
    """
    folder = find_folder(runs_dir, run, run_option)
    from asyncrl.cli.reports.weights import print_weights

    print_weights(folder, as_json)


@inspect.command()
def trace(
    run: Run = None,
    run_option: RunOption = None,
    steps: Annotated[
        str | None, typer.Option("--steps", metavar="A-B", help="Of these learner steps; else the newest 50.")
    ] = None,
    to: Annotated[
        Path | None, typer.Option("--to", metavar="FILE", help="Where; otherwise trace.json in the run.")
    ] = None,
    runs_dir: RunsDir = "runs",
    as_json: Annotated[bool, typer.Option("--json", help="Print the trace itself.")] = False,
) -> None:
    """Write a trace of every service's activity for Perfetto.

    Prints the file's name.
    """
    if to and as_json:
        raise typer.BadParameter("--to and --json exclude each other")
    folder = find_folder(runs_dir, run, run_option)
    from asyncrl.cli.reports.trace import print_trace

    print_trace(folder, steps, to, as_json)


@app.command()
def verify(
    run: Run = None, run_option: RunOption = None, runs_dir: RunsDir = "runs", as_json: AsJson = False
) -> None:
    """Recount a run's journal.

    Checks that every prompt is accounted for exactly once and that no trained token exceeds the bound on lag.
    Exit code 1 otherwise.
    """
    folder = find_folder(runs_dir, run, run_option)
    from asyncrl.cli.reports.account import print_verdict

    is_sound = print_verdict(folder, as_json)
    raise typer.Exit(exits.OK if is_sound else exits.FAILED)


@app.command()
def replay(
    run: Run = None,
    run_option: RunOption = None,
    first: Annotated[
        int | None,
        typer.Option(
            "--from", metavar="K", min=0, help="The first step; else the oldest that can be reached."
        ),
    ] = None,
    num_steps: Annotated[
        int | None, typer.Option("--steps", metavar="N", min=1, help="How many; else all that are recorded.")
    ] = None,
    difference: Annotated[
        bool, typer.Option("--diff", help="End at the first step from K on that differs, and list what does.")
    ] = False,
    overrides: Overrides = None,
    runs_dir: RunsDir = "runs",
    as_json: AsJson = False,
) -> None:
    """Train recorded steps again, and compare.

    Begins at the newest checkpoint at or before step K. Needs run.record; starts no rollouts. Each step is
    trained under what was recorded with it, from step K on changed by --set. Exit code 1 if a metric, the
    weights or what a later checkpoint holds differs.
    """
    folder = find_folder(runs_dir, run, run_option)
    from asyncrl.cli.reports.replay import print_replay

    code = print_replay(
        str(folder),
        runs_dir,
        first,
        num_steps,
        overrides or (),
        shows_difference=difference,
        as_json=as_json,
    )
    raise typer.Exit(code)
