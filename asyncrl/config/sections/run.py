"""What surrounds training: the run's name, checkpoints, the guard, metrics."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from asyncrl.config.sections.section import (
    NAME_PATTERN,
    Count,
    NonNegative,
    NonNegativeNumber,
    Section,
    Share,
    Text,
)
from asyncrl.metrics import find, unknown_names


class RunSection(Section):
    """Names the run; everything that it writes goes to `<dir>/<name>`."""

    name: Annotated[str, Field(pattern=NAME_PATTERN)] = "run"
    dir: Text = "runs"
    seed: NonNegative = 0


EVALUATION_METRICS = ("accuracy", "reward_mean")
"""What an evaluation says, the higher the better."""


def check_metric(name: str) -> str:
    """Raise ValueError unless there is a metric of this name: else no checkpoint would be the best."""
    if name not in EVALUATION_METRICS and find(name) is None:
        similar = unknown_names([name]).get(name)
        guess = f"; did you mean {similar}?" if similar else ""
        raise ValueError(f"{' or '.join(EVALUATION_METRICS)}, or a name of docs/metrics.md{guess}")
    return name


class CheckpointSection(Section):
    """Atomic checkpoints of the learner, written while training goes on; the `keep` newest stay.

    The `keep_best` with the highest `best_metric` stay besides, for `asyncrl export`. The metric is one
    of the evaluation (`accuracy`) or of the step. A checkpoint that is due while the one before is
    still being written waits at most `max_stall_s`, then it is skipped (`checkpoint/skipped`).
    """

    every_steps: Count = 20
    keep: Count = 3
    keep_best: NonNegative = 0
    best_metric: Annotated[Text, AfterValidator(check_metric)] = "accuracy"
    max_stall_s: NonNegativeNumber = 30.0


def check_window(steps: tuple[int, int] | None) -> tuple[int, int] | None:
    """Raise ValueError unless `steps` is [a, b] with a < b."""
    if steps is not None and steps[0] >= steps[1]:
        raise ValueError("[a, b] with a < b")
    return steps


class GuardSection(Section):
    """Watches the metrics of every step; `action` answers a severe finding, every finding is explained.

    The limits are starting points: a value beyond one is reported. It is severe if it is also far
    from the run's usual values (`z_score` robust deviations, after `warmup_steps`), or ten times
    beyond. `min_entropy` and `min_throughput` are shares of the run's first values.
    """

    action: Literal["warn", "skip_update", "reduce_lr", "kl_fallback", "rollback", "stop"] = "warn"
    warmup_steps: Annotated[int, Field(ge=3)] = 10
    z_score: Annotated[float, Field(gt=0)] = 8.0
    max_kl: Annotated[float, Field(gt=0)] = 0.03
    max_grad_norm: Annotated[float, Field(gt=0)] = 2.0
    max_clipfrac: Annotated[float, Field(gt=0)] = 0.3
    max_vf_clipfrac: Annotated[float, Field(gt=0)] = 0.05
    min_entropy: Share = 0.05
    min_ess: Share = 0.3
    min_throughput: Share = 0.3


class MetricsSection(Section):
    """Where metrics go besides `metrics.jsonl`, and what is measured.

    `profile_steps: [a, b]` records learner steps a to b - 1, counted from 0, with torch.profiler, into
    `runs/<name>/profile/`. `peak_tflops` is what `perf/mfu/*` divides by, per learner rank; null takes
    the data sheet's figure of a known GPU and measures any other device.
    """

    tensorboard: bool = True
    profile_steps: Annotated[tuple[NonNegative, Count] | None, AfterValidator(check_window)] = None
    peak_tflops: Annotated[float, Field(gt=0)] | None = None
