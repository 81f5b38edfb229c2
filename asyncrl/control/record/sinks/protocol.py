"""Protocol of a metrics sink, its record, and the description of the run that it gets."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from asyncrl.core.variants import SINKS, find_record

DEFAULT_PROJECT = "asyncrl"


@dataclass(frozen=True)
class RunLabel:
    """Description of the run for a metrics service.

    Attributes:
        name: Of the run.
        id: Of the run's folder: 21 lower-case letters and digits, the same after a resume.
        folder: `runs/<name>`; what a client writes to disk goes below it.
        settings: The resolved configuration as plain values; it holds no secrets.
    """

    name: str
    id: str
    folder: Path
    settings: Mapping[str, object] = field(default_factory=dict)


class Sink(Protocol):
    """One service. All methods are called from one thread, which may hang or be left behind at the end.

    Any exception is counted by the caller; `open` is tried again later, `write` goes on with the next row.
    """

    name: str

    def open(self) -> None:
        """Connect; the run of an earlier start under the same id is continued."""

    def write(self, values: Mapping[str, float], step: int) -> None:
        """Send one row: metric names of the registry and their values."""

    def close(self) -> None:
        """Flush and say that the run has ended."""


@dataclass(frozen=True)
class SinkKind:
    """One name of `metrics.sinks`, that of its module in `services`.

    Attributes:
        make: Makes the sink from the run's label and the arguments of the configuration.
        package: Name under which its client is installed and imported.
        arguments: Names that it takes; empty where the client is given all.
    """

    make: Callable[[RunLabel, Mapping[str, object]], Sink]
    package: str
    arguments: tuple[str, ...] = ()


def sink_kind(name: str) -> SinkKind:
    """Return the kind that `metrics.sinks` names."""
    return find_record(f"{SINKS}.{name}", "SINK", SinkKind)


def load_library(name: str) -> Any:
    """Return the module `name`. It is imported where it is used: some take seconds, or ask the network."""
    return importlib.import_module(name)
