"""`asyncrl up`: read and check the configuration, start the run or find it live, watch it."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from asyncrl.cli import exits
from asyncrl.cli.exits import say
from asyncrl.core.config.reading.problems import ConfigProblems, Problem, suggest
from asyncrl.core.errors import AsyncrlError, ConfigError
from asyncrl.core.runtime.clock import SystemClock
from asyncrl.core.runtime.faults import fault_point
from asyncrl.core.states import RUN_ENDS, RunState
from asyncrl.core.variants import function

if TYPE_CHECKING:
    from asyncrl.cli.run.handle import RunHandle
    from asyncrl.control.record.rundir import RunDir
    from asyncrl.core.config.load import Loaded
    from asyncrl.core.config.tree import Config

AUTO, NEVER = "auto", "never"
KEY = re.compile(r"[a-z_]+(\.\w+)+|[a-z_]+(?=:)")
"""A key, or a section before a colon, at the beginning of a line."""
OTHER_START_S, OTHER_START_POLL_S = 30.0, 0.1
"""Time that another `asyncrl up` may take between the run's lock and its head, and the poll interval."""
NOTHING_STARTED = "interrupted: nothing was started"
ENDING = (RunState.STOPPING, *RUN_ENDS)
"""States of a run whose head still cleans up."""


def up(
    configs: Sequence[str], overrides: Sequence[str], is_detached: bool = False, resume: str = AUTO
) -> int:
    """Start the run of `configs`, or find it live; watch it to its end and return the exit code.

    Ctrl-C before anything is started is told too.

    Args:
        configs: Files, later ones laid over earlier ones, or the name of a shipped one.
        is_detached: Return as soon as the run's supervisor answers.
        resume: `auto` goes on from the newest checkpoint, a number from the checkpoint of that step;
            `never` refuses to go on.

    Raises:
        ConfigError: The configuration, or what it names, cannot be used, or the run is live with another
            one. Nothing was started.
    """
    try:
        return _up(configs, overrides, is_detached, resume)
    except KeyboardInterrupt:
        say(NOTHING_STARTED)
        return exits.INTERRUPTED


def _up(configs: Sequence[str], overrides: Sequence[str], is_detached: bool, resume: str) -> int:
    step = _step_of(resume)
    if sys.stderr.isatty():  # before anything heavy is imported: a person waits
        say(f"reading {', '.join(configs)}")
    from asyncrl.cli import watch
    from asyncrl.core.config.load import load

    fault_point("up.reading")
    loaded = load([find_config(name) for name in configs], overrides)
    say(f"{loaded.config.run.name}: checking the configuration and what it names")
    fault_point("up.checking")
    from asyncrl.cli.run.handle import attach
    from asyncrl.cli.run.start import AlreadyStarted, finished_run, folder_of

    folder = folder_of(loaded.config)
    try:
        live = _await_end_of_ending(attach(folder))
        if live is not None:
            return _join(live, loaded.config, resume, is_detached)
        if resume == AUTO and finished_run(loaded.config) is not None:
            say(
                f"the run in {folder.path} has done its steps; raise learner.steps or choose another run.name"
            )
            watch.print_summary(folder)
            return exits.OK
        try:
            handle = _start(loaded.config, resume, step, command_of(configs, overrides))
            return _detach(handle) if is_detached else watch.follow(handle)
        except AlreadyStarted:
            if (live := _await_other_start(folder)) is None:
                raise
            return _join(live, loaded.config, resume, is_detached)
        except KeyboardInterrupt:
            return _interrupted(folder)
    except ConfigError as error:
        raise placed(error, loaded) from error


def _join(live: RunHandle, config: Config, resume: str, is_detached: bool) -> int:
    """Watch a live run that was started with `config`; return the exit code."""
    from asyncrl.cli import watch

    _refuse_difference(live.folder, config, resume)
    say(f"the run in {live.folder.path} is live (process {live.pid}): nothing is started")
    return _detach(live) if is_detached else watch.follow(live)


def _await_other_start(folder: RunDir) -> RunHandle | None:
    """Return the run that another `asyncrl up` starts at this moment; None if nothing comes of it."""
    from asyncrl.cli.run.handle import attach

    clock = SystemClock()
    end = clock.now() + OTHER_START_S
    while (live := attach(folder)) is None and clock.now() < end:
        clock.sleep(OTHER_START_POLL_S)
    return live


def _interrupted(folder: RunDir) -> int:
    """Ctrl-C in a start: end the head if it is there."""
    from asyncrl.cli import watch
    from asyncrl.cli.run.handle import attach

    if (live := attach(folder)) is not None:
        watch.stop(live)
    else:
        say(NOTHING_STARTED)
    return exits.INTERRUPTED


def _await_end_of_ending(live: RunHandle | None) -> RunHandle | None:
    """Return the live run; one that is ending already is waited for, and is then none."""
    if live is None or live.poll().state not in ENDING:
        return live
    from asyncrl.cli import watch
    from asyncrl.cli.views import LineView

    say("the run is still ending")
    watch.watch(live, LineView(sys.stderr), SystemClock())
    live.clear()
    return None


def command_of(configs: Sequence[str], overrides: Sequence[str]) -> str:
    """Return what a user types for the same run."""
    sets = [part for text in overrides for part in ("--set", text)]
    return shlex.join(["asyncrl", "up", *configs, *sets])


def _step_of(resume: str) -> int | None:
    if resume in (AUTO, NEVER):
        return None
    if resume.isascii() and resume.isdigit():
        return int(resume)
    raise ConfigError(f"--resume {resume}: it is 'auto', 'never' or the step of a checkpoint")


def _start(config: Config, resume: str, step: int | None, command: str) -> RunHandle:
    from asyncrl.cli.run import start as run
    from asyncrl.cli.run.resume import check_step, refuse_earlier_life

    folder = run.folder_of(config)
    if resume == NEVER:
        refuse_earlier_life(folder)
    if step is not None:
        check_step(folder, step, lambda number: _verify_checkpoint(folder, number))
    return run.start(config, say, command, before=None if step is None else lambda: _go_back(folder, step))


def _verify_checkpoint(folder: RunDir, step: int) -> None:
    say(f"checking the checkpoint of step {step}")
    function("learner.checkpoint.store:CheckpointStore")(folder.checkpoints, 1).verify_whole(step)


def _go_back(folder: RunDir, step: int) -> None:
    from asyncrl.cli.run.resume import rewind

    aside = rewind(folder, step)
    kept = f"; the later checkpoints are kept in {aside}, and are not used again" if aside else ""
    say(f"going on from step {step}{kept}")


def _refuse_difference(folder: RunDir, config: Config, resume: str) -> None:
    """Raise ConfigError unless the live run in `folder` was started with `config`."""
    from asyncrl.cli.run.resume import differences
    from asyncrl.cli.run.start import with_absolute_dir
    from asyncrl.core.config.load import load_config

    end_it = f"End it first: asyncrl down {folder.path.name} --dir {folder.path.parent}"
    if resume != AUTO:
        raise ConfigError(f"--resume {resume}: the run in {folder.path} is live", hint=end_it)
    before = load_config(folder.config if folder.config.exists() else folder.resolved)
    if changed := differences(before, with_absolute_dir(config)):
        what = f"the run in {folder.path} is live with another configuration (there), and yours (here)"
        raise ConfigError(
            "\n".join([f"{what} differs:", *changed]), hint=f"{end_it}; then up goes on with yours"
        )


def _detach(handle: RunHandle) -> int:
    """Return once somebody can be asked about the run; say how to watch it."""
    from asyncrl.cli import watch
    from asyncrl.cli.views import LineView

    try:
        is_up = watch.follow_until_up(handle, LineView(sys.stderr), SystemClock())
    except KeyboardInterrupt:
        return exits.INTERRUPTED
    if not is_up:
        return watch.report(handle)
    place = f"{handle.folder.path.name} --dir {handle.folder.path.parent}"
    say(f"the run is in the background (process {handle.pid}). Watch it: asyncrl status -w {place}")
    say(f"its logs: {handle.folder.logs}. End it: asyncrl down {place}")
    return exits.OK


def find_config(name: str) -> Path:
    """Return the file `name`, or the shipped configuration or overlay of that name.

    Raises:
        ConfigError: There is neither.
    """
    if Path(name).exists():
        return Path(name)
    from configs import overlays, shipped

    found = shipped() | overlays()
    if name in found:
        return found[name]
    hint = suggest(name, found) or f"Give a file, or one of: {', '.join(found)}"
    raise ConfigError(f"there is no configuration '{name}'", hint=hint)


def placed(error: ConfigError, loaded: Loaded) -> AsyncrlError:
    """Return `error` with the place of its key on each line that begins with one (`model.path: ...`)."""
    if isinstance(error, ConfigProblems):
        return error.placed(loaded.places)
    problems = []
    for line in error.message.splitlines():
        found = KEY.match(line)
        path = tuple(found[0].split(".")) if found else ("",)
        is_key = path[0] in type(loaded.config).model_fields
        where = loaded.places.of_written(path) if is_key else ""
        problems.append(Problem(line, hint=_recipe_for(line, loaded), where=where))
    if error.hint:
        problems.append(Problem(error.hint))
    return ConfigProblems(problems)


def _recipe_for(line: str, loaded: Loaded) -> str:
    """Return what the configuration says of a data file that `line` misses, in its first lines."""
    data = loaded.config.data
    missing = [one.path for one in (*data.train, *(data.eval or ())) if f"{one.path} does not exist" in line]
    if not missing:
        return ""
    from configs import find_recipe

    return find_recipe(Path(loaded.places.origin).read_text(encoding="utf-8"), missing[0])
