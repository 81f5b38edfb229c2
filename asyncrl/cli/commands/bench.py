"""`asyncrl bench`: measures. Most benchmarks read their own arguments."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from asyncrl.cli import exits
from asyncrl.cli.options import PLAIN
from asyncrl.cli.services import function

app = typer.Typer(help="Measure.", **PLAIN)

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


@app.command()
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

    @app.command(name, help=summary, context_settings=settings, add_help_option=False)
    def run_benchmark(context: typer.Context) -> None:
        raise typer.Exit(function(f"benchmarks.{name}:main")(context.args))


for _name, _summary in BENCHMARKS.items():
    _add_benchmark(_name, _summary)
