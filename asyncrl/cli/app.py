"""The command line. Each command reads its arguments, calls one function and sets the exit code.

Imports at the top stay light: `asyncrl --help` answers in well under half a second. stdout is
data, stderr is talk.

Exit codes: 0 done, 1 the run or a command failed, 2 usage or configuration, 4 no such live run,
130 interrupted.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from asyncrl import __version__
from asyncrl.cli import exits
from asyncrl.errors import AsyncrlError

if TYPE_CHECKING:
    from asyncrl.control.api.client import RunClient

PLAIN = {"no_args_is_help": True, "rich_markup_mode": None, "add_completion": False}

app = typer.Typer(help="Asynchronous reinforcement learning for language models.", **PLAIN)  # type: ignore[arg-type]
data = typer.Typer(help="Make prompt files.", **PLAIN)  # type: ignore[arg-type]
bench = typer.Typer(help="Measure.", **PLAIN)  # type: ignore[arg-type]
inspect = typer.Typer(help="Read a run's journals.", **PLAIN)  # type: ignore[arg-type]
app.add_typer(data, name="data")
app.add_typer(bench, name="bench")
app.add_typer(inspect, name="inspect")

BENCHMARKS = {
    "buffer": "Measure the buffer beside bare pipes and other systems.",
    "checkpoints": "Measure the stall of a checkpoint, its write and its load.",
    "concurrency": "Simulate when a replica should take another group, by fixed rules and a controller.",
    "concurrency_vllm": "Measure when a replica should take another group, on vLLM.",
    "hostile": "Measure what honest replicas still get through while others attack the buffer.",
    "learner": "Measure a learner step against Hugging Face, and the losses against verl's.",
    "ledger": "Measure the ledger's transitions, and its cost as the fleet grows.",
    "memory": "Measure what log-probs of a large vocabulary cost in memory.",
    "packing": "Measure packed rows in dynamic microbatches against padded rows.",
    "staleness_policies": "Simulate what each staleness policy costs, beside published rules.",
    "restart": "Measure how soon the buffer serves again with 10,000 groups in its journal.",
    "rollout": "Measure a replica's whole path beside a bare AsyncLLM.",
    "staleness_study": "Measure what lag does to learning under each correction.",
    "weight_sync": "Measure a weight sync beside bare broadcasts and copies.",
    "weight_sync_delta": "Measure differences between versions: bytes, seconds, and how much changes.",
    "weight_sync_publish": "Measure how long a learner stands still to publish.",
}
"""Benchmarks that read their own arguments: modules of `benchmarks` with a `main(arguments) -> exit code`."""

RunName = Annotated[
    str | None, typer.Option("--run", help="The run's name; without it, the one started last.")
]
Run = Annotated[str, typer.Argument(help="The run's name, or its folder.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print it as JSON.")]
RunsDir = Annotated[str, typer.Option("--dir", help="The folder that holds the runs (run.dir).")]


@app.callback(invoke_without_command=True)
def root(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    """Answer `--version`."""
    if version:
        print(__version__)
        raise typer.Exit(exits.OK)


@app.command()
def up(
    config: Annotated[
        str, typer.Argument(help="A YAML file, or the name of a shipped one, such as quickstart.")
    ],
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a value: learner.steps=10.")
    ] = None,
) -> None:
    """Start a run and watch it.

    Ctrl-C stops the run; hanging up leaves it running.
    """
    from asyncrl.cli.up import up as run_to_end

    raise typer.Exit(run_to_end(config, overrides or []))


@app.command()
def status(
    run: RunName = None,
    runs_dir: RunsDir = "runs",
    as_json: Annotated[bool, typer.Option("--json", help="Print the snapshot as JSON.")] = False,
) -> None:
    """Show what a live run is doing."""
    snapshot = _find(runs_dir, run).status()
    if as_json:
        print(json.dumps(snapshot, indent=2, sort_keys=True))
        return
    from rich.console import Console

    from asyncrl.cli.live import panel_of

    Console().print(panel_of(snapshot))


@app.command()
def down(run: RunName = None, runs_dir: RunsDir = "runs") -> None:
    """End a live run in order.

    It writes a checkpoint first, so that `up` can go on later.
    """
    from asyncrl.cli.down import down as end_run

    end_run(_find(runs_dir, run))


@app.command()
def scale(
    target: Annotated[
        str, typer.Argument(metavar="rollout=N", help="How many rollout replicas there shall be.")
    ],
    run: RunName = None,
    runs_dir: RunsDir = "runs",
) -> None:
    """Change the number of rollout replicas of a live run."""
    what, _, count = target.partition("=")
    if what != "rollout" or not (count.isascii() and count.isdigit()):
        raise typer.BadParameter(f"'{target}' is not of the form rollout=N, for example rollout=4")
    _find(runs_dir, run).scale(int(count))
    exits.say(f"the run goes to {int(count)} rollout replicas; see 'asyncrl status'")


@app.command()
def export(
    run: Annotated[str, typer.Argument(help="The run's name, or its folder.")],
    step: Annotated[
        str, typer.Option("--step", metavar="N", help="The checkpoint's step, or 'newest', or 'best'.")
    ] = "newest",
    to: Annotated[
        Path | None, typer.Option("--to", metavar="DIR", help="Where; otherwise export/step-N in the run.")
    ] = None,
    runs_dir: RunsDir = "runs",
) -> None:
    """Write a checkpoint of a run as a Hugging Face model; nothing is started."""
    from asyncrl.cli.services import function

    print(function("learner.checkpoint.export:export_run")(run, runs_dir, step, to))


@app.command()
def score(
    source: Annotated[
        str, typer.Argument(metavar="IN", help="JSON lines with 'response' and 'ground_truth'; - is stdin.")
    ],
    target: Annotated[str, typer.Argument(metavar="OUT", help="The file to write; - is stdout.")],
    rewards: Annotated[
        list[str],
        typer.Option(
            "--reward", metavar="FN", help="As reward.fn, or '{fn: NAME, weight: 0.5}'. May be repeated."
        ),
    ],
) -> None:
    """Add what a reward gives to each line of a file.

    Every line gets its 'score', and its 'parts' where there are several rewards. A line that cannot be read
    or scored ends the command, and nothing is written.
    """
    from asyncrl.cli.services import function

    num_lines = function("rollout_service.rewards.lines:score_lines")(rewards, source, target)
    exits.say(f"scored {num_lines} lines")


@app.command(name="eval")
def evaluate(
    target: Annotated[str, typer.Argument(help="A Hugging Face folder, or a run's name or folder.")],
    data_files: Annotated[
        list[str] | None,
        typer.Option(
            "--data", metavar="FILE", help="Held-out prompts; otherwise the run's. May be repeated."
        ),
    ] = None,
    reward: Annotated[
        str | None,
        typer.Option("--reward", metavar="NAME", help="A name or file.py:function; else the run's."),
    ] = None,
    samples: Annotated[int | None, typer.Option("--samples", min=1, help="Answers per prompt.")] = None,
    temperature: Annotated[float | None, typer.Option("--temperature", min=0.0)] = None,
    num_prompts: Annotated[
        int | None, typer.Option("--prompts", min=1, help="The first of each file only.")
    ] = None,
    max_tokens: Annotated[int | None, typer.Option("--max-tokens", min=1, help="Of an answer.")] = None,
    max_prompt_tokens: Annotated[
        int | None, typer.Option("--max-prompt-tokens", min=1, help="Longer prompts are left out.")
    ] = None,
    step: Annotated[
        str, typer.Option("--step", metavar="N", help="The checkpoint's step, or 'newest', or 'best'.")
    ] = "newest",
    runs_dir: RunsDir = "runs",
    as_json: AsJson = False,
) -> None:
    """Let a model answer held-out prompts and print mean@k, pass@k and maj@k with 95 % intervals."""
    from asyncrl.cli.eval import Wishes, print_evaluation

    wishes = Wishes(
        data_files or (), reward, samples, temperature, num_prompts, max_tokens, max_prompt_tokens
    )
    print_evaluation(target, runs_dir, step, wishes, as_json)


@inspect.command()
def account(run: Run, runs_dir: RunsDir = "runs", as_json: AsJson = False) -> None:
    """Print what became of every prompt, and how old what was trained and what is open is."""
    from asyncrl.cli.audit import print_account

    print_account(run, runs_dir, as_json)


@inspect.command()
def ticket(
    run: Run,
    number: Annotated[int, typer.Argument(metavar="TICKET", min=1, help="The ticket's id.")],
    runs_dir: RunsDir = "runs",
    as_json: AsJson = False,
) -> None:
    """Print the life of one ticket, from its issue on."""
    from asyncrl.cli.audit import print_ticket

    print_ticket(run, runs_dir, number, as_json)


@inspect.command()
def rollouts(
    run: Annotated[
        str | None, typer.Argument(help="The run's name or folder; without it, the one started last.")
    ] = None,
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
    """Print prompts and answers, token by token: log-probs, versions and their lag, rewards, masks."""
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
def weights(
    run: Annotated[
        str | None, typer.Argument(help="The run's name or folder; without it, the one started last.")
    ] = None,
    runs_dir: RunsDir = "runs",
    as_json: AsJson = False,
) -> None:
    """Print which version each replica serves, how it came there, and who was to blame for failures."""
    from asyncrl.cli.weights import print_weights

    print_weights(run, runs_dir, as_json)


@app.command()
def verify(run: Run, runs_dir: RunsDir = "runs", as_json: AsJson = False) -> None:
    """Check from a run's journal that every prompt was accounted for, once, and no token was too old.

    Exit code 1 if anything is wrong.
    """
    from asyncrl.cli.audit import print_verdict

    raise typer.Exit(exits.OK if print_verdict(run, runs_dir, as_json) else exits.FAILED)


@data.command()
def gsm8k(
    source: Annotated[Path, typer.Argument(metavar="SRC", exists=True, help="GSM8K's jsonl file.")],
    target: Annotated[Path, typer.Argument(metavar="DST", help="The Parquet file to write.")],
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="Take the first rows only.")] = None,
) -> None:
    """Convert GSM8K to prompts that a run can read."""
    from asyncrl.cli.services import function

    num_prompts = function("rollout_service.data.gsm8k:convert_gsm8k")(source, target, limit)
    exits.say(f"wrote {num_prompts} prompts to {target}")


@bench.command()
def pipeline(
    quick: Annotated[bool, typer.Option("--quick", help="A minute instead of the whole table.")] = False,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the figures there.")
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Exit with 1 if a figure misses its target.")
    ] = False,
) -> None:
    """Measure the asynchronous pipeline against the synchronous one."""
    from asyncrl.cli.services import function

    results = function("benchmarks.pipeline:measure")(quick=quick, say=exits.say)
    print(function("benchmarks.pipeline:table")(results))
    if json_file is not None:
        function("benchmarks.pipeline:write")(results, json_file)
    if check:
        is_met, verdict = function("benchmarks.pipeline:check")(results)
        print(verdict)
        raise typer.Exit(exits.OK if is_met else exits.FAILED)


def _add_benchmark(name: str, summary: str) -> None:
    """Add the command that hands its arguments to `benchmarks.<name>:main`, which knows its own flags."""
    settings = {"allow_extra_args": True, "ignore_unknown_options": True}

    @bench.command(name, help=summary, context_settings=settings, add_help_option=False)
    def run_benchmark(context: typer.Context) -> None:
        from asyncrl.cli.services import function

        raise typer.Exit(function(f"benchmarks.{name}:main")(context.args))


for _name, _summary in BENCHMARKS.items():
    _add_benchmark(_name, _summary)


@data.callback()
def prompts() -> None:
    """Make prompt files."""


def _find(runs_dir: str, name: str | None) -> RunClient:
    from asyncrl.control.api.client import find_run

    return find_run(runs_dir, name)


def main() -> None:
    """Run the command line; an error of ours is one message and an exit code, never a traceback."""
    try:
        app(prog_name="asyncrl")
    except AsyncrlError as error:
        exits.say(exits.message_of(error))
        sys.exit(exits.code_of(error))
