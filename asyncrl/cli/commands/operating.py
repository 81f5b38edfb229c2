"""Commands that change a live run."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from asyncrl.cli import exits
from asyncrl.cli.options import PLAIN, RunName, RunsDir, find_live

app = typer.Typer(**PLAIN)


@app.command()
def scale(
    target: Annotated[
        str, typer.Argument(metavar="rollout=N", help="How many rollout replicas there shall be.")
    ],
    run: RunName = None,
    runs_dir: RunsDir = "runs",
) -> None:
    """Change the number of rollout replicas."""
    what, _, count = target.partition("=")
    if what != "rollout" or not (count.isascii() and count.isdigit()):
        raise typer.BadParameter(f"'{target}' is not of the form rollout=N, for example rollout=4")
    find_live(runs_dir, run).scale(int(count))
    exits.say(f"the run goes to {int(count)} rollout replicas; see 'asyncrl status'")


@app.command()
def drain(
    replica: Annotated[str, typer.Argument(metavar="rollout.N", help="The replica that shall leave.")],
    run: RunName = None,
    runs_dir: RunsDir = "runs",
) -> None:
    """Let a replica hand back its work and leave.

    Another one takes its place.
    """
    kind, _, index = replica.partition(".")
    if kind != "rollout" or not (index.isascii() and index.isdigit()):
        raise typer.BadParameter(f"'{replica}' is not of the form rollout.N, for example rollout.0")
    begun = find_live(runs_dir, run).drain(int(index))
    started = ", ".join(begun.get("started") or [])
    exits.say(f"rollout.{int(index)} drains" + (f"; {started} takes its place" if started else ""))


@app.command()
def pause(run: RunName = None, runs_dir: RunsDir = "runs") -> None:
    """Hold a run after the step in progress.

    No new leases are granted. Answers that are being generated are finished and kept. Services stay up,
    with their memory.
    """
    unreached = find_live(runs_dir, run).pause().get("unreached") or []
    exits.say("the run pauses after the step in progress; 'asyncrl unpause' lets it go on")
    if unreached:
        exits.say(f"{', '.join(unreached)} cannot be reached and pauses as soon as it is up")


@app.command()
def unpause(run: RunName = None, runs_dir: RunsDir = "runs") -> None:
    """Let a paused run go on."""
    find_live(runs_dir, run).unpause()
    exits.say("the run goes on")


@app.command()
def checkpoint(
    run: RunName = None,
    runs_dir: RunsDir = "runs",
    wait_s: Annotated[
        float,
        typer.Option(
            "--wait", metavar="S", min=0.0, help="Seconds until it must be written; 0: do not wait."
        ),
    ] = 600.0,
) -> None:
    """Write a checkpoint after the step in progress.

    Its step is printed once it is on disk and in the journal.
    """
    from asyncrl.cli.reports.status import await_checkpoint

    client = find_live(runs_dir, run)
    asked = client.checkpoint()
    if not wait_s:
        exits.say(f"a checkpoint is written after the step in progress; {asked['step']} are done")
        return
    print(json.dumps(await_checkpoint(client, int(asked["step"]), wait_s)))
