"""`asyncrl bench`: measures. Most benchmarks read their own arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import typer

from asyncrl.cli.options import GROUP, show_help
from asyncrl.core.errors import ConfigError
from asyncrl.core.variants import function

PLACE = 7
app = typer.Typer(name="bench", help="Run a benchmark.", callback=show_help, **GROUP)


@dataclass(frozen=True)
class Benchmark:
    """One benchmark, or a command about measurements.

    Attributes:
        module: Of `benchmarks`, with a `main(arguments) -> exit code` that reads its own arguments.
        in_all: quick: `asyncrl bench all` always runs it; whole: only without --quick; never; none: it
            measures nothing, or is an alias.
    """

    module: str
    summary: str
    in_all: Literal["quick", "whole", "never", "none"] = "whole"


BENCHMARKS: dict[str, Benchmark] = {
    "ledger": Benchmark(
        "buffer.ledger", "Measure the ledger's transitions, and its cost as the fleet grows.", "quick"
    ),
    "learner": Benchmark(
        "learner.training",
        "Measure a learner step against Hugging Face, and the losses against verl's.",
        "quick",
    ),
    "pipeline": Benchmark(
        "pipeline.asynchrony",
        "Measure the same work synchronously and asynchronously, on the same cores.",
        "quick",
    ),
    "buffer": Benchmark(
        "buffer.throughput", "Measure the buffer beside bare pipes and other systems.", "quick"
    ),
    "weight_sync": Benchmark(
        "weight_sync.rounds", "Measure a weight sync beside bare broadcasts and copies.", "quick"
    ),
    "rollout": Benchmark(
        "rollout.replica", "Measure a replica's whole path beside a bare AsyncLLM.", "quick"
    ),
    "packing": Benchmark(
        "learner.packing", "Measure packed rows in dynamic microbatches against padded rows."
    ),
    "memory": Benchmark("learner.memory", "Measure what log-probs of a large vocabulary cost in memory."),
    "checkpoints": Benchmark(
        "learner.checkpoints", "Measure the stall of a checkpoint, its write and its load."
    ),
    "restart": Benchmark(
        "buffer.restart", "Measure how soon the buffer serves again with 10,000 groups in its journal."
    ),
    "hostile": Benchmark(
        "buffer.hostile", "Measure what honest replicas still get through while others attack the buffer."
    ),
    "concurrency": Benchmark(
        "rollout.concurrency",
        "Simulate when a replica should take another group, by fixed rules and by its own.",
    ),
    "placement": Benchmark(
        "rollout.placement", "Simulate which group goes to which replica's KV cache, by rule and trace."
    ),
    "gateway": Benchmark(
        "rollout.gateway.overhead",
        "Measure the gateway beside vLLM's own server, and a killed replica's turns.",
    ),
    "weight_sync_publish": Benchmark(
        "weight_sync.publish", "Measure how long a learner stands still to publish."
    ),
    "weight_sync_plan": Benchmark(
        "weight_sync.planned", "Compare real transfers with what `asyncrl plan` says of them."
    ),
    "manifests": Benchmark("weight_sync.manifests", "Measure the manifest of 36,000 tensors."),
    "scale": Benchmark(
        "fleet.scale", "Measure one to three live replicas, and the control plane under up to 4,096 of them."
    ),
    "prediction": Benchmark("fleet.prediction", "Compare live runs with what the simulator says of them."),
    "calibrate": Benchmark(
        "calibration.calibrate",
        "Measure rates for `asyncrl plan --simulate`, or take them from a run's rows.",
        "never",
    ),
    "concurrency_vllm": Benchmark(
        "rollout.concurrency_vllm", "Measure when a replica should take another group, on vLLM.", "never"
    ),
    "gpu": Benchmark(
        "gpu.suite",
        "Measure all that a GPU machine can tell in 25 minutes; --dry checks it on a CPU.",
        "never",
    ),
    "soak": Benchmark(
        "soak.soak", "Measure what grows in a run that never ends, and tell it for a week.", "never"
    ),
    "all": Benchmark(
        "reports.suite", "Measure the parts one after another; --quick takes at most five minutes.", "none"
    ),
    "compare": Benchmark(
        "reports.comparison",
        "Print ratios of two measurements, or of a run and verl's log, and what is noise.",
        "none",
    ),
    "plot": Benchmark("reports.pictures", "Draw a file of rows as a PNG.", "none"),
    "sync": Benchmark("weight_sync.rounds", "As weight_sync.", "none"),
}
"""By command, in the order of `asyncrl bench all`: most information per minute first."""


def _main_of(name: str) -> Callable[[Sequence[str]], int]:
    """Return a benchmark's `main`.

    Raises:
        ConfigError: The benchmark is not installed: a wheel holds the harness and the calibration only.
    """
    try:
        return function(f"benchmarks.{BENCHMARKS[name].module}:main")
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


for _name, _one in sorted(BENCHMARKS.items()):
    _add_benchmark(_name, _one.summary)
