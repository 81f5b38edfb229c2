"""Commands that start, watch and end a run."""

from __future__ import annotations

from typing import Annotated

import typer

from asyncrl.cli.options import (
    PLAIN,
    AsJson,
    Configs,
    Overrides,
    RunName,
    RunsDir,
    complete_run,
)

app = typer.Typer(**PLAIN)


@app.command()
def up(
    configs: Configs,
    overrides: Overrides = None,
    is_detached: Annotated[
        bool, typer.Option("--detach", "-d", help="Return once the run answers; it goes on.")
    ] = False,
    resume: Annotated[
        str,
        typer.Option(
            "--resume",
            metavar="auto|never|STEP",
            help="auto: from the newest checkpoint; STEP: from that one; never: refuse to go on.",
        ),
    ] = "auto",
) -> None:
    """Start a run, or find it live, and watch it.

    Ctrl-C stops the run; hanging up leaves it running.
    """
    from asyncrl.cli.up import up as run_to_end

    raise typer.Exit(run_to_end(configs, overrides or [], is_detached, resume))


@app.command()
def down(run: RunName = None, runs_dir: RunsDir = "runs") -> None:
    """End a live run in order, also one that is starting.

    It writes a checkpoint first, so that `up` can go on later.
    """
    from asyncrl.cli.down import down as end_run
    from asyncrl.control.api.client import find_live_folder

    raise typer.Exit(end_run(find_live_folder(runs_dir, run)))


@app.command()
def status(
    runs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RUN]...",
            help="Names or folders; without one, the live run started last.",
            autocompletion=complete_run,
        ),
    ] = None,
    run: RunName = None,
    is_all: Annotated[bool, typer.Option("--all", help="Every run of the folder, ended ones too.")] = False,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Refresh until the run is over.")] = False,
    runs_dir: RunsDir = "runs",
    as_json: AsJson = False,
) -> None:
    """Show what runs are doing, the bottleneck, and why.

    Several runs stand side by side. Exit code 3 if one of them is degraded: a service is being repaired.
    """
    from asyncrl.cli.reports.status import Asked, show_status

    names = [*(runs or []), *([run] if run else [])]
    raise typer.Exit(show_status(Asked(names, is_all, runs_dir), as_json=as_json, is_watching=watch))


@app.command()
def logs(
    services: Annotated[
        list[str] | None,
        typer.Argument(metavar="[SERVICE]...", help="As rollout.0, or rollout for all of a kind."),
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the run is over.")] = False,
    num_lines: Annotated[
        int, typer.Option("--lines", "-n", metavar="N", min=0, help="The newest N lines first.")
    ] = 200,
    run: RunName = None,
    runs_dir: RunsDir = "runs",
    as_json: AsJson = False,
) -> None:
    """Print the logs of a run's services, merged by time."""
    from asyncrl.cli.reports.logs import print_logs

    print_logs(run, runs_dir, services or [], num_lines, is_following=follow, as_json=as_json)
