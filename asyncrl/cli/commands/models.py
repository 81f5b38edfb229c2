"""Commands on models and rewards, with or without a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from asyncrl.cli import exits
from asyncrl.cli.options import (
    PLAIN,
    AsJson,
    Run,
    RunOption,
    RunsDir,
    Step,
    complete_run,
    find_folder,
    find_target,
)
from asyncrl.core.variants import function

PLACE = 5
app = typer.Typer(**PLAIN)


@app.command(name="eval")
def evaluate(
    target: Annotated[
        str | None,
        typer.Argument(
            help="A Hugging Face folder, or a run's name or folder; without it, the run started last.",
            autocompletion=complete_run,
        ),
    ] = None,
    data_files: Annotated[
        list[str] | None,
        typer.Option(
            "--data", metavar="FILE", help="Held-out prompts; otherwise the run's. May be repeated."
        ),
    ] = None,
    reward: Annotated[
        str | None,
        typer.Option("--reward", metavar="NAME", help="As reward.fn, or '{fn: NAME, …}'; else the run's."),
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
    run: RunOption = None,
    step: Step = "newest",
    runs_dir: RunsDir = "runs",
    as_json: AsJson = False,
) -> None:
    """Evaluate a model on held-out prompts.

    Prints mean@k, pass@k and maj@k with 95 % intervals.
    """
    found = find_target(runs_dir, target, run)  # before imports that take their time
    from asyncrl.cli.reports.evaluation import Wishes, print_evaluation

    wishes = Wishes(
        data_files or (), reward, samples, temperature, num_prompts, max_tokens, max_prompt_tokens
    )
    print_evaluation(found, runs_dir, step, wishes, as_json)


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
    """Score answers: add the reward to each line of a file.

    Every line gets its 'score', and its 'parts' where there are several rewards. A line that cannot be read
    or scored ends the command, and nothing is written.
    """
    num_lines = function("rollout_service.rewards.lines:score_lines")(rewards, source, target)
    exits.say(f"scored {num_lines} lines")


@app.command()
def export(
    run: Run = None,
    run_option: RunOption = None,
    step: Step = "newest",
    to: Annotated[
        Path | None, typer.Option("--to", metavar="DIR", help="Where; otherwise export/step-N in the run.")
    ] = None,
    adapter: Annotated[
        bool, typer.Option("--adapter", help="The adapters of model.lora, as PEFT's.")
    ] = False,
    runs_dir: RunsDir = "runs",
) -> None:
    """Write a checkpoint as a Hugging Face model."""
    folder = find_folder(runs_dir, run, run_option)  # before the learner is imported: it takes seconds
    write = function("learner.checkpoint.export:export_run")
    exits.show(write(str(folder), runs_dir, step, to, has_adapter=adapter))
