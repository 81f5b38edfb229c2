"""Configuration sections around training: the run's name, checkpoints, metrics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field, model_serializer

from asyncrl.core.config.sections.section import (
    NAME_PATTERN,
    Count,
    NonNegative,
    NonNegativeNumber,
    Section,
    Text,
    refuse,
)
from asyncrl.core.metrics import find, unknown_names
from asyncrl.core.variants import SinkName, sink_names


class RunSection(Section):
    """Names the run; everything that it writes is in `<dir>/<name>`.

    With `record` each trained batch is kept there too, so that `asyncrl replay` can train the same steps
    again, from the oldest kept checkpoint on.
    """

    name: Annotated[str, Field(pattern=NAME_PATTERN)] = "run"
    """Name of the run, in `asyncrl status` and of its folder. For example: gsm8k_small"""
    dir: Text = "runs"
    """Folder of all runs; each has a subfolder."""
    seed: Annotated[int, Field(ge=0, lt=1 << 63)] = 0
    """[1] Seed of the prompt order, of sampling, and of newly initialised weights."""
    record: bool = False
    """Whether trained batches are kept for `asyncrl replay`."""


EVALUATION_METRICS = ("accuracy", "reward_mean")
"""Results of an evaluation, the higher the better."""


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
    """[steps] Steps between checkpoints."""
    keep: Count = 3
    """[checkpoints] Newest checkpoints that are kept."""
    keep_best: NonNegative = 0
    """[checkpoints] Best checkpoints that are kept in addition."""
    best_metric: Annotated[Text, AfterValidator(check_metric)] = "accuracy"
    """Metric whose highest value is best. For example: accuracy, critic/rewards/mean"""
    max_stall_s: NonNegativeNumber = 30.0
    """[s] Longest wait of training for the previous checkpoint."""


NamedSink = Annotated[dict[SinkName, dict[str, object] | None], Field(min_length=1, max_length=1)]
WrittenSink = SinkName | NamedSink
WrittenSinks = WrittenSink | tuple[WrittenSink, ...]
"""The forms in which a person writes them."""


class SinkSection(Section):
    """One service: its name, and the arguments of its client (`{project: x}`), secrets never among them."""

    name: SinkName
    """Name of the service."""
    arguments: Mapping[str, object] = Field(default_factory=dict)
    """Arguments of its client. For example: {project: x}"""

    @model_serializer
    def as_written(self) -> str | dict[str, object]:
        """Return the short form, as a person writes it."""
        return {self.name: dict(self.arguments)} if self.arguments else self.name


def as_sinks(value: object) -> object:
    """Return sinks as sections; each is a name, or a map from one name to its arguments.

    Raises:
        PydanticCustomError: An item is neither.
    """
    if isinstance(value, str | dict):
        value = (value,)
    if not isinstance(value, list | tuple):
        return value
    return tuple(_as_sink(item) for item in value)


def _as_sink(item: object) -> object:
    if isinstance(item, SinkSection):
        return item
    if isinstance(item, str):
        name, arguments = item, None
    elif isinstance(item, dict) and len(item) == 1:
        ((name, arguments),) = item.items()
    else:
        raise refuse("a list of names, or of {name: {argument: value}}", "For example [wandb: {project: x}]")
    if name == "tensorboard":
        raise refuse(", ".join(sink_names()), "TensorBoard has a key of its own: metrics.tensorboard: true")
    return {"name": name, "arguments": arguments or {}}


def check_window(steps: tuple[int, int] | None) -> tuple[int, int] | None:
    """Raise ValueError unless `steps` is [a, b] with a < b."""
    if steps is not None and steps[0] >= steps[1]:
        raise ValueError("[a, b] with a < b")
    return steps


class MetricsSection(Section):
    """Destinations of metrics besides `metrics.jsonl`, and measurements.

    `profile_steps: [a, b]` records learner steps a to b - 1, counted from 0, with torch.profiler, into
    `runs/<name>/profile/`. `peak_tflops` is what `perf/mfu/*` divides by, per learner rank; null takes
    the data sheet's figure of a known GPU and measures any other device. `sinks` are names, or
    `{wandb: {project: x}}` with the arguments that the service's own client takes.
    """

    tensorboard: bool = True
    """Whether metrics are also written for TensorBoard."""
    sinks: Annotated[
        tuple[SinkSection, ...], BeforeValidator(as_sinks, json_schema_input_type=WrittenSinks)
    ] = ()
    """Services that also get the metrics. For example: [wandb], [{mlflow: {experiment: x}}]"""
    profile_steps: Annotated[tuple[NonNegative, Count] | None, AfterValidator(check_window)] = None
    """[steps] First profiled step, and the step after the last. For example: [10, 12]"""
    peak_tflops: Annotated[float, Field(gt=0)] | None = None
    """[TFLOP/s] Peak of a rank, for MFU; null looks it up or measures it. For example: 989.0"""
