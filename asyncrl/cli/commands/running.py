"""Commands that start, watch and end a run."""

from __future__ import annotations

from typing import Annotated

import typer

from asyncrl.cli.options import (
    PLAIN,
    AsJson,
    Configs,
    Overrides,
    Run,
    RunOption,
    RunsDir,
    complete_run,
    find_folder,
    find_live_folder,
    one_of,
)

PLACE = 1
app = typer.Typer(**PLAIN)


@app.command()
def up(
    configs: Configs,
    overrides: Overrides = None,
    is_detached: Annotated[
        bool, typer.Option("--detach", "-d", help="Start in the background: return once the run answers.")
    ] = False,
    resume: Annotated[
        str,
        typer.Option(
            "--resume",
            metavar="auto|never|STEP",
            help="auto: from the newest checkpoint; STEP: from that one; never: refuse to resume.",
        ),
    ] = "auto",
) -> None:
    """Start a run, or attach to it if it is live.

    Ctrl-C ends the run; closing the terminal leaves it running.
    """
    from asyncrl.cli.up import up as run_to_end

    raise typer.Exit(run_to_end(configs, overrides or [], is_detached, resume))


@app.command()
def down(run: Run = None, run_option: RunOption = None, runs_dir: RunsDir = "runs") -> None:
    """End a live run in order, also one that is starting.

    Writes a checkpoint first if a step was trained. `up` resumes the run later.
    """
    from asyncrl.cli.watch import down as end_run

    raise typer.Exit(end_run(find_live_folder(runs_dir, run, run_option)))


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
    run: RunOption = None,
    is_all: Annotated[bool, typer.Option("--all", help="Every run of the folder, ended ones too.")] = False,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Refresh until the run ends.")] = False,
    services: Annotated[
        bool, typer.Option("--services", help="A line for each service, also of a large fleet.")
    ] = False,
    runs_dir: RunsDir = "runs",
    as_json: AsJson = False,
) -> None:
    """Show what runs are doing, the bottleneck, and why.

    Several runs stand side by side. Exit code 3 if one of them is degraded: a service is being repaired.
    JSON: the snapshot, a list of several runs' snapshots, or with --watch a line per refresh.
    """
    from asyncrl.cli.reports.status import Asked, show_status

    names = list(dict.fromkeys([*(runs or []), *([run] if run else [])]))
    if is_all and names:
        raise typer.BadParameter(f"--all shows every run: leave out {', '.join(names)}", param_hint="--all")
    if services and (is_all or watch or as_json or len(names) > 1):
        told = "it prints one run once, as text; --json has each service in any case"
        raise typer.BadParameter(told, param_hint="--services")
    asked = Asked(names, is_all, runs_dir, services)
    raise typer.Exit(show_status(asked, as_json=as_json, is_watching=watch))


@app.command()
def logs(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RUN] [SERVICE]...",
            help="The run; services: rollout.0, or rollout for all.",
        ),
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Follow until the run ends.")] = False,
    num_lines: Annotated[
        int, typer.Option("--lines", "-n", metavar="N", min=0, help="The newest N lines first.")
    ] = 200,
    run: RunOption = None,
    runs_dir: RunsDir = "runs",
    as_json: AsJson = False,
) -> None:
    """Print the logs of a run's services, merged by time.

    JSON: an object per line with time, service and line.
    """
    from asyncrl.cli.reports.logs import is_service, print_logs

    named = [word for word in words or [] if not is_service(word)]
    services = [word for word in words or [] if is_service(word)]
    folder = find_folder(runs_dir, one_of(*named), run)
    print_logs(folder, services, num_lines, is_following=follow, as_json=as_json)
