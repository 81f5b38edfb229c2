"""`asyncrl bench`: measures. Most benchmarks read their own arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import typer

from asyncrl.cli.options import GROUP, show_help
from asyncrl.core.errors import ConfigError
from asyncrl.core.variants import function

PLACE = 7
app = typer.Typer(name="bench", help="Run a benchmark.", callback=show_help, **GROUP)

BENCHMARKS = {
    "all": "Measure the parts one after another; --quick takes at most five minutes.",
    "buffer": "Measure the buffer beside bare pipes and other systems.",
    "calibrate": "Measure rates for `asyncrl plan --simulate`, or take them from a run's rows.",
    "checkpoints": "Measure the stall of a checkpoint, its write and its load.",
    "compare": "Print ratios of two measurements, or of a run and verl's log, and what is noise.",
    "concurrency": "Simulate when a replica should take another group, by fixed rules and a controller.",
    "concurrency_vllm": "Measure when a replica should take another group, on vLLM.",
    "hostile": "Measure what honest replicas still get through while others attack the buffer.",
    "learner": "Measure a learner step against Hugging Face, and the losses against verl's.",
    "ledger": "Measure the ledger's transitions, and its cost as the fleet grows.",
    "memory": "Measure what log-probs of a large vocabulary cost in memory.",
    "packing": "Measure packed rows in dynamic microbatches against padded rows.",
    "pipeline": "Measure the same work synchronously and asynchronously, on the same cores.",
    "scale": "Measure one to three live replicas, and the control plane under up to 4,096 of them.",
    "plot": "Draw a file of rows as a PNG.",
    "prediction": "Compare live runs with what the simulator says of them.",
    "soak": "Measure what grows in a run that never ends, and tell it for a week.",
    "restart": "Measure how soon the buffer serves again with 10,000 groups in its journal.",
    "rollout": "Measure a replica's whole path beside a bare AsyncLLM.",
    "sync": "As weight_sync.",
    "weight_sync": "Measure a weight sync beside bare broadcasts and copies.",
    "weight_sync_publish": "Measure how long a learner stands still to publish.",
}
"""Benchmarks that read their own arguments: modules of `benchmarks` with a `main(arguments) -> exit code`."""


MODULES = {
    "all": "reports.suite",
    "buffer": "buffer.throughput",
    "calibrate": "calibration.calibrate",
    "checkpoints": "learner.checkpoints",
    "compare": "reports.comparison",
    "concurrency": "rollout.concurrency",
    "concurrency_vllm": "rollout.concurrency_vllm",
    "hostile": "buffer.hostile",
    "learner": "learner.training",
    "ledger": "buffer.ledger",
    "memory": "learner.memory",
    "packing": "learner.packing",
    "pipeline": "pipeline.asynchrony",
    "plot": "reports.pictures",
    "prediction": "fleet.prediction",
    "restart": "buffer.restart",
    "rollout": "rollout.replica",
    "scale": "fleet.scale",
    "soak": "soak.soak",
    "sync": "weight_sync.rounds",
    "weight_sync": "weight_sync.rounds",
    "weight_sync_publish": "weight_sync.publish",
}
"""The module of `benchmarks` for each command."""


def _main_of(name: str) -> Callable[[Sequence[str]], int]:
    """Return a benchmark's `main`.

    Raises:
        ConfigError: The benchmark is not installed: a wheel holds the harness and the calibration only.
    """
    try:
        return function(f"benchmarks.{MODULES[name]}:main")
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("benchmarks."):
            raise
        hint = "Clone the repository and run it there: make bench, or .venv/bin/asyncrl bench"
        raise ConfigError(f"asyncrl bench {name} needs a checkout of asyncrl", hint=hint) from error


def _add_benchmark(name: str, summary: str) -> None:
    """Add the command that hands its arguments to the benchmark's `main`, which knows its own flags."""
    settings = {"allow_extra_args": True, "ignore_unknown_options": True}

    @app.command(name, help=summary, context_settings=settings, add_help_option=False)
    def run_benchmark(context: typer.Context) -> None:
        raise typer.Exit(_main_of(name)(context.args))


for _name, _summary in BENCHMARKS.items():
    _add_benchmark(_name, _summary)
