"""Commands that change a live run."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from asyncrl.cli import exits
from asyncrl.cli.options import PLAIN, Run, RunOption, RunsDir, find_live, split_run

PLACE = 2
app = typer.Typer(**PLAIN)


@app.command()
def scale(
    words: Annotated[
        list[str],
        typer.Argument(metavar="[RUN] rollout=N", help="The run, and its number of rollout replicas."),
    ],
    run: RunOption = None,
    runs_dir: RunsDir = "runs",
) -> None:
    """Change the number of rollout replicas; 0 is allowed.

    Refused where this machine has no room for them beside standbys and replicas that drain.
    """
    named, target = split_run(words, _is_count, "[RUN] rollout=N, for example rollout=4")
    count = int(target.partition("=")[2])
    find_live(runs_dir, named, run).scale(count)
    exits.say(f"scaling to {count} rollout replica{'' if count == 1 else 's'}; see 'asyncrl status'")


def _is_count(word: str) -> bool:
    what, _, count = word.partition("=")
    return what == "rollout" and count.isascii() and count.isdigit()


@app.command()
def drain(
    words: Annotated[
        list[str],
        typer.Argument(metavar="[RUN] rollout.N", help="The run, and the replica to drain."),
    ],
    run: RunOption = None,
    runs_dir: RunsDir = "runs",
) -> None:
    """Drain a replica: return its work to the ledger and replace it."""
    named, replica = split_run(words, _is_replica, "[RUN] rollout.N, for example rollout.0")
    index = int(replica.partition(".")[2])
    begun = find_live(runs_dir, named, run).drain(index)
    started = ", ".join(begun.started)
    exits.say(f"rollout.{index} drains" + (f"; {started} takes its place" if started else ""))


def _is_replica(word: str) -> bool:
    kind, _, index = word.partition(".")
    return kind == "rollout" and index.isascii() and index.isdigit()


@app.command()
def pause(run: Run = None, run_option: RunOption = None, runs_dir: RunsDir = "runs") -> None:
    """Pause a run after the step in progress.

    No new leases are granted. Answers that are being generated are finished and kept. Services stay up,
    with their memory; a service that restarts meanwhile is paused too. Recorded as an event.
    """
    unreached = find_live(runs_dir, run, run_option).pause().unreached
    exits.say("the run pauses after the step in progress; 'asyncrl unpause' continues it")
    if unreached:
        exits.say(f"{', '.join(unreached)} cannot be reached and pauses as soon as it is up")


@app.command()
def unpause(run: Run = None, run_option: RunOption = None, runs_dir: RunsDir = "runs") -> None:
    """Continue a paused run."""
    find_live(runs_dir, run, run_option).unpause()
    exits.say("the run continues")


@app.command()
def checkpoint(
    run: Run = None,
    run_option: RunOption = None,
    runs_dir: RunsDir = "runs",
    wait_s: Annotated[
        float,
        typer.Option(
            "--wait", metavar="S", min=0.0, help="Seconds until it must be written; 0: do not wait."
        ),
    ] = 600.0,
) -> None:
    """Write a checkpoint after the step in progress.

    Prints {"step": N} once it is on disk and in the journal. The request survives a restart of the learner
    or of the supervisor.
    """
    from asyncrl.cli.reports.status import await_checkpoint

    client = find_live(runs_dir, run, run_option)
    asked = client.checkpoint()
    if not wait_s:
        exits.say(f"a checkpoint is written after the step in progress; steps done: {asked.step}")
        return
    print(json.dumps(await_checkpoint(client, asked.step, wait_s)))
