"""Commands that read what a run has written down."""

from __future__ import annotations

from typing import Annotated

import typer

from asyncrl.cli import exits
from asyncrl.cli.options import PLAIN, AsJson, Overrides, Run, RunsDir, name_run

app = typer.Typer(**PLAIN)
inspect = typer.Typer(help="Read a run's journals.", **PLAIN)
app.add_typer(inspect, name="inspect")


@inspect.command()
def account(run: Run = None, runs_dir: RunsDir = "runs", as_json: AsJson = False) -> None:
    """Print what became of every prompt.

    Also how old what was trained, and what is open, is.
    """
    from asyncrl.cli.reports.account import print_account

    print_account(name_run(runs_dir, run), runs_dir, as_json)


@inspect.command()
def ticket(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="[RUN] TICKET", help="The run, else the one started last, and the ticket's id."
        ),
    ],
    runs_dir: RunsDir = "runs",
    as_json: AsJson = False,
) -> None:
    """Print the life of one ticket, from its issue on."""
    from asyncrl.cli.reports.account import print_ticket

    *runs, number = words
    if len(runs) > 1 or not (number.isascii() and number.isdigit() and int(number) > 0):
        raise typer.BadParameter(f"'{' '.join(words)}' is not of the form [RUN] TICKET, for example: 17")
    print_ticket(name_run(runs_dir, runs[0] if runs else None), runs_dir, int(number), as_json)


@inspect.command()
def rollouts(
    run: Run = None,
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
    from asyncrl.cli.rollouts.command import print_rollouts

    if worst and best:
        raise typer.BadParameter("--worst and --best exclude each other")
    if html and as_json:
        raise typer.BadParameter("--html and --json exclude each other")
    print_rollouts(
        run,
        runs_dir,
        step=step,
        order="worst" if worst else "best" if best else "",
        is_dropped=dropped,
        limit=limit,
        as_json=as_json,
        as_page=html,
    )


@inspect.command()
def weights(run: Run = None, runs_dir: RunsDir = "runs", as_json: AsJson = False) -> None:
    """Print which version each replica serves.

    Also how it came there, and who was to blame for failures.
    """
    from asyncrl.cli.reports.weights import print_weights

    print_weights(run, runs_dir, as_json)


@inspect.command()
def trace(
    run: Run = None,
    steps: Annotated[
        str | None, typer.Option("--steps", metavar="A-B", help="Of these learner steps; else the newest 50.")
    ] = None,
    json_file: Annotated[
        str | None,
        typer.Option("--json", metavar="FILE", help="The file; - is stdout. Else trace.json in the run."),
    ] = None,
    runs_dir: RunsDir = "runs",
) -> None:
    """Write what every service did when, for Perfetto.

    Prints the file's name.
    """
    from asyncrl.cli.reports.trace import print_trace

    print_trace(run, runs_dir, steps, json_file)


@app.command()
def verify(run: Run = None, runs_dir: RunsDir = "runs", as_json: AsJson = False) -> None:
    """Recount a run's journal.

    Every prompt was accounted for, once, and no token was too old. Exit code 1 if anything is wrong.
    """
    from asyncrl.cli.reports.account import print_verdict

    is_sound = print_verdict(name_run(runs_dir, run), runs_dir, as_json)
    raise typer.Exit(exits.OK if is_sound else exits.FAILED)


@app.command()
def replay(
    run: Run = None,
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
    """Train what a run recorded again, and compare.

    Begins at the newest checkpoint at or before step K. Needs run.record; starts no rollouts. Each step is
    trained under what was recorded with it, from step K on changed by --set. Exit code 1 if a metric, the
    weights or what a later checkpoint holds differs.
    """
    from asyncrl.cli.reports.replay import print_replay

    code = print_replay(
        name_run(runs_dir, run),
        runs_dir,
        first,
        num_steps,
        overrides or (),
        shows_difference=difference,
        as_json=as_json,
    )
    raise typer.Exit(code)
