"""`asyncrl up`: read and check the configuration, start the run, watch it, say how it ended."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from asyncrl.cli import exits, live, watch
from asyncrl.cli.exits import say
from asyncrl.clock import SystemClock
from asyncrl.config.load import Loaded, load
from asyncrl.config.problems import ConfigProblems, Problem, suggest
from asyncrl.errors import ConfigError

if TYPE_CHECKING:
    from asyncrl.control.launch.run import RunHandle
    from asyncrl.control.record.rundir import RunDir

STOP_DEADLINE_S = 240.0


def up(config: str, overrides: Sequence[str]) -> int:
    """Run `config` to its end and return the exit code.

    Raises:
        ConfigError: The configuration, or what it names, cannot be used. Nothing was started.
    """
    loaded = load(find_config(config), overrides)
    from asyncrl.control.launch import run

    if (folder := run.finished_run(loaded.config)) is not None:
        say(f"the run in {folder.path} has done its steps; raise learner.steps or choose another run.name")
        print_summary(folder)
        return exits.OK
    try:
        handle = run.start(loaded.config, say)
    except ConfigError as error:
        raise placed(error, loaded) from error
    return follow(handle)


def follow(handle: RunHandle) -> int:
    """Watch a started run to its end and return the exit code; Ctrl-C and SIGTERM stop it."""
    try:
        with sigterm_as_interrupt():
            say(f"the run writes to {handle.folder.path}; Ctrl-C stops it, hanging up leaves it running")
            watch.watch(handle, watch.view_on(sys.stdout), SystemClock())
    except KeyboardInterrupt:
        stop(handle)
        return exits.INTERRUPTED
    return report(handle)


def find_config(name: str) -> Path:
    """Return the file `name`, or the shipped configuration of that name.

    Raises:
        ConfigError: There is neither.
    """
    if Path(name).exists():
        return Path(name)
    from configs import shipped

    found = shipped()
    if name in found:
        return found[name]
    hint = suggest(name, found) or f"Give a file, or one of: {', '.join(found)}"
    raise ConfigError(f"there is no configuration '{name}'", hint=hint)


def placed(error: ConfigError, loaded: Loaded) -> ConfigError:
    """Return `error` with file:line:col on each line that begins with a key (`model.path: ...`)."""
    if isinstance(error, ConfigProblems):
        return error.placed(loaded.places)
    problems = []
    for line in error.message.splitlines():
        key, colon, _ = line.partition(":")
        path = tuple(key.split("."))
        is_key = bool(colon) and path[0] in type(loaded.config).model_fields
        problems.append(Problem(line, where=loaded.places.of_value(path) if is_key else ""))
    if error.hint:
        problems.append(Problem(error.hint))
    return ConfigProblems(problems)


def stop(handle: RunHandle) -> None:
    """End the run in order; a second Ctrl-C ends it at once."""
    say("stopping the run; Ctrl-C again ends it at once")
    try:
        handle.stop(STOP_DEADLINE_S)
    except KeyboardInterrupt:
        handle.stop(0.0)
    say(f"stopped; 'asyncrl up' goes on from the newest checkpoint in {handle.folder.path}")


def report(handle: RunHandle) -> int:
    """Print the run's figures to stdout, and a failure to stderr."""
    outcome: dict[str, Any] = handle.result()
    if outcome.get("state") == "failed":
        where = f" in {outcome['service']}" if outcome.get("service") else ""
        say(f"the run failed{where}: {outcome.get('error') or 'without a message'}")
        say("\n".join(f"  | {line}" for line in outcome.get("tail") or []))
        say(f"logs: {handle.folder.path / 'logs'}")
        return exits.FAILED
    print_summary(handle.folder)
    say(f"the run is {outcome.get('state', 'over')}; see {handle.folder.path}")
    return exits.OK


def print_summary(folder: RunDir) -> None:
    """Print what is in the run's `summary.json`, if there is one."""
    from asyncrl.control.record.rundir import read_json

    summary = read_json(folder.summary)
    if summary:
        print(live.table_of(summary))


@contextmanager
def sigterm_as_interrupt() -> Iterator[None]:
    """Let SIGTERM stop the run as Ctrl-C does, so that no wrapper leaves one behind."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
