"""Factory of a run's metric sinks, and the check of the packages and arguments that they need."""

from __future__ import annotations

import importlib.util
import secrets
import string
import sys
from collections.abc import Iterator
from pathlib import Path

from asyncrl.control.record.rundir import RunDir, read_json, write_json
from asyncrl.control.record.sinks.outbox import Outbox
from asyncrl.control.record.sinks.protocol import RunLabel, Sink, sink_kind
from asyncrl.control.record.sinks.tensorboard import TensorBoardSink
from asyncrl.core.config.tree import Config
from asyncrl.core.errors import ConfigError

ID_FILE = "sinks.json"
ID_CHARACTERS = 21
"""Length of an id that SwanLab requires."""


def check_sinks(config: Config) -> Iterator[str]:
    """Yield the problems of `metrics.sinks` on this machine; imports none of the packages."""
    names = [sink.name for sink in config.metrics.sinks]
    packages = [sink_kind(name).package for name in names]
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    if missing:
        yield (
            f"metrics.sinks: {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed here. "
            f"Run {Path(sys.executable).parent / 'pip'} install {' '.join(missing)}, or remove the sink"
        )
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        yield f"metrics.sinks: {', '.join(sorted(twice))} stands there more than once"
    for sink in config.metrics.sinks:
        known = sink_kind(sink.name).arguments
        unknown = sorted(set(sink.arguments) - set(known))
        if known and unknown:
            told = f"{sink.name} has no argument {', '.join(unknown)}. It takes {', '.join(known)}"
            yield f"metrics.sinks: {told}"


def open_sinks(config: Config, run_dir: RunDir) -> list[Outbox]:
    """Return a queue for each sink of the configuration; nothing is imported or connected here.

    Raises:
        ConfigError: With all that `check_sinks` finds.
    """
    problems = list(check_sinks(config))
    if problems:
        raise ConfigError("\n".join(problems))
    sinks: list[Sink] = []
    if config.metrics.tensorboard:
        sinks.append(TensorBoardSink(run_dir.path / "tensorboard"))
    if config.metrics.sinks:
        label = label_of(config, run_dir)
        sinks += [sink_kind(sink.name).make(label, sink.arguments) for sink in config.metrics.sinks]
    return [Outbox(sink) for sink in sinks]


def label_of(config: Config, run_dir: RunDir) -> RunLabel:
    """Return how services know the run; its id is drawn once per folder."""
    path = run_dir.path / ID_FILE
    known = read_json(path)
    if known is None:
        alphabet = string.ascii_lowercase + string.digits
        known = {"id": "".join(secrets.choice(alphabet) for _ in range(ID_CHARACTERS))}
        write_json(path, known)
    return RunLabel(config.run.name, known["id"], run_dir.path, config.model_dump(mode="json"))
