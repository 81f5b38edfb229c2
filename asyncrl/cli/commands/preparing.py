"""Commands for before a run: a configuration to begin with, what it will take, whether the machine is fit."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from asyncrl.cli import exits
from asyncrl.cli.options import PLAIN, AsJson, Overrides, RunsDir, complete_config, complete_run

PLACE = 3
app = typer.Typer(**PLAIN)


@app.command()
def init(
    folder: Annotated[Path, typer.Argument(metavar="[DIR]", help="Created if it does not exist.")] = Path(
        "."
    ),
    preset: Annotated[
        str,
        typer.Option(
            "--preset",
            metavar="NAME",
            help="A shipped configuration to start from.",
            autocompletion=complete_config,
        ),
    ] = "quickstart",
) -> None:
    """Write a cluster.yaml and a reward to begin with.

    No file is overwritten.
    """
    from asyncrl.cli.run.starter import write_starter

    written, recipes = write_starter(folder, preset)
    exits.show(*written)
    for recipe in recipes:
        exits.say(f"needed, and not here: {recipe}")
    exits.say(f"next: cd {folder}; asyncrl plan cluster.yaml; asyncrl up cluster.yaml")


@app.command()
def plan(
    configs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="CONFIG...",
            help="YAML files, each laid over those before it, or the name of a shipped one.",
            autocompletion=complete_config,
        ),
    ] = None,
    overrides: Overrides = None,
    run: Annotated[
        str | None,
        typer.Option(
            "--run",
            help="Compare with this run; otherwise with that of the same name.",
            autocompletion=complete_run,
        ),
    ] = None,
    schema: Annotated[
        bool, typer.Option("--schema", help="Print the JSON Schema of a configuration and end.")
    ] = False,
    elsewhere: Annotated[
        bool, typer.Option("--elsewhere", help="The run is for another machine: skip the checks of this one.")
    ] = False,
    simulate: Annotated[
        bool,
        typer.Option("--simulate", help="Predict step time, idle, lag and tokens/s; compare alternatives."),
    ] = False,
    rates: Annotated[
        str | None,
        typer.Option(
            "--rates", metavar="FILE", help="Of 'bench calibrate', or a GPU, such as H100 (assumed)."
        ),
    ] = None,
    compare: Annotated[
        str | None,
        typer.Option(
            "--compare",
            metavar="RUN",
            help="Simulate this run; print predicted against measured.",
            autocompletion=complete_run,
        ),
    ] = None,
    runs_dir: RunsDir = "runs",
    as_json: AsJson = False,
) -> None:
    """Check a configuration; print its processes, memory and ports.

    Also placement, the backend and why, and derived values with their rule. Nothing is started. If its run
    exists, differences to it are printed, and which of them a resume accepts.
    With --simulate, print the predicted speed and alternatives; this machine is not checked then. With
    --elsewhere too, run the checks that need no machine and check the memory of the assumed GPU.
    """
    if schema:
        from asyncrl.cli.reports.plan import print_schema

        print_schema()
        return
    _refuse_unused(bool(configs), simulate, rates, compare)
    if compare is not None:
        from asyncrl.cli.reports.prediction import Asked, print_comparison

        print_comparison(Asked((), overrides or [], rates, runs_dir, as_json), compare)
        return
    if not configs:
        raise typer.BadParameter(
            "name a configuration, such as quickstart or cluster.yaml", param_hint="CONFIG"
        )
    if simulate:
        from asyncrl.cli.reports.prediction import Asked, print_prediction

        print_prediction(Asked(configs, overrides or [], rates, runs_dir, as_json, elsewhere))
        return
    from asyncrl.cli.reports.plan import print_plan

    print_plan(configs, overrides or [], run, runs_dir, as_json, elsewhere)


def _refuse_unused(has_configs: bool, simulate: bool, rates: str | None, compare: str | None) -> None:
    if has_configs and compare is not None:
        raise typer.BadParameter(
            "--compare RUN reads the run's own configuration: leave this out, or change values with --set",
            param_hint="CONFIG",
        )
    if rates is not None and not simulate and compare is None:
        raise typer.BadParameter("only --simulate and --compare take rates", param_hint="--rates")


@app.command()
def doctor(
    cluster: Annotated[
        str,
        typer.Option("--ray", metavar="HOST:PORT", help="Also join this Ray cluster and compare its nodes."),
    ] = "",
    runs_dir: RunsDir = "runs",
    as_json: AsJson = False,
) -> None:
    """Check whether this machine can run asyncrl.

    Python, packages against the tested versions, CPUs, GPUs, memory, /dev/shm, which presets fit, disk,
    limits, ports, Redis, Ray, leftovers of dead runs, and run folders, Ray, sockets and gateways that are
    open to other users. Each line that is not ok says what to do. Exit code 1 if a run cannot work here.
    JSON: what, verdict, found, advice.
    """
    from asyncrl.cli.doctor.examination import print_findings

    raise typer.Exit(exits.OK if print_findings(runs_dir, as_json, cluster) else exits.FAILED)
