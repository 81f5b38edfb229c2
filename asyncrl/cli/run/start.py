"""Start of a run from the terminal's side."""

from __future__ import annotations

import fcntl
import os
import platform
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from msgspec.structs import replace

from asyncrl.cli.exits import need
from asyncrl.cli.run.handle import RunHandle, attach
from asyncrl.cli.run.resume import keep_revisions, refuse_lost_past, refuse_other_lineage
from asyncrl.control.machine.processes import end_leftovers, remove_leftovers
from asyncrl.control.ray import bootstrap
from asyncrl.control.ray.launcher import base_folder
from asyncrl.control.record.live import LiveRun, Start, read_live, write_live
from asyncrl.control.record.outcome import read_outcome
from asyncrl.control.record.rundir import RunDir, read_json
from asyncrl.control.roster import RUN_VARIABLE
from asyncrl.control.rows.row_files import remove_rows
from asyncrl.core.config.load import dump_resolved
from asyncrl.core.config.tree import Config
from asyncrl.core.errors import ConfigError
from asyncrl.core.files.durable import replace_text
from asyncrl.core.files.private import keep_others_out, make_own
from asyncrl.core.runtime.faults import fault_point
from asyncrl.core.states import RunState
from asyncrl.core.variants import engine_facts, journal_facts
from asyncrl.planner import plan
from asyncrl.planner.plan import prepare
from asyncrl.planner.plan.footprint import shared_memory

LOCK = ".lock"
HEAD, SUPERVISOR = "asyncrl.control.ray.head", "asyncrl.cli.composition:build"
"""The module of the head process, and the composition root of the supervisor that it keeps."""
MAX_EARLIER_STARTS = 8
"""That a new start knows of: nodes that were away when one of them ended may still hold something of it."""


def folder_of(config: Config) -> RunDir:
    """Return the folder of the run that `config` names."""
    return RunDir(Path(config.run.dir).absolute() / config.run.name)


def with_absolute_dir(config: Config) -> Config:
    """Return `config` with an absolute `run.dir`: it names the same run from anywhere."""
    run = config.run.model_copy(update={"dir": str(Path(config.run.dir).absolute())})
    return config.model_copy(update={"run": run})


def start(
    config: Config,
    say: Callable[[str], None] = lambda sentence: None,
    command: str = "",
    before: Callable[[], None] | None = None,
) -> RunHandle:
    """Check, prepare and start a run.

    Args:
        config: As loaded; paths may still be relative or built-in.
        say: Told, in a sentence, about work that takes time.
        command: Command that starts the run once more, printed after a failure.
        before: Called when all is checked and nothing of the run runs, right before it is started.

    Raises:
        ConfigError: Something that it names is missing or does not fit; nothing was started.
        ModuleNotFoundError: The packages of a run are not installed here.
    """
    asked = with_absolute_dir(config)
    plan.check(config)
    own = [name for name in config.rollout.engines if engine_facts(name).distributions]
    need("ray", "torch", *(() if config.launcher.is_cluster else own))
    fault_point("up.preparing")
    keep_others_out(may_read=True)  # what is fetched goes into a hub's cache, which a team may share
    make_own(Path(asked.run.dir))
    config = keep_revisions(config)
    config = prepare.prepare(config, say)
    found = plan.check(config)
    for note in found.notes:
        say(note)
    if found.shared_memory is not None:
        say(found.shared_memory.describe(shared_memory.free_bytes()))
    folder = RunDir(Path(config.run.dir) / config.run.name)
    refuse_second_start(folder)
    refuse_other_lineage(folder, config)
    refuse_lost_past(folder, Path(config.model.path))
    keep_others_out()
    make_own(folder.logs)
    lock = _take_lock(folder)
    try:
        _refuse_life_elsewhere(folder, config)
        _end_earlier_life(folder, say)
        if before is not None:
            before()
        _write_down(folder, config, asked)
        return _start_head(folder, lock, command)
    finally:
        os.close(lock)  # the head has its own


def finished_run(config: Config) -> RunDir | None:
    """Return the folder of a run of this name that has done all of its steps already, else None."""
    folder = folder_of(config)
    outcome, summary = read_outcome(folder), read_json(folder.summary)
    is_finished = outcome is not None and outcome.state == RunState.FINISHED and summary is not None
    return folder if is_finished and (summary or {})["steps"] >= config.learner.steps else None


class AlreadyStarted(ConfigError):
    """Another `asyncrl up` has started the run, or is about to."""


def refuse_second_start(folder: RunDir) -> None:
    """Raise AlreadyStarted if the run in `folder` is running."""
    handle = attach(folder)
    if handle is not None:
        raise AlreadyStarted(
            f"run.name: the run in {folder.path} is live (pid {handle.pid})",
            hint="Watch it with 'asyncrl status', end it with 'asyncrl down', or choose another run.name",
        )


def _take_lock(folder: RunDir) -> int:
    """Return the descriptor of the run's lock, which the head holds until it dies, however it dies."""
    lock = os.open(folder.path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(lock)
        what = f"run.name: another 'asyncrl up' is starting the run in {folder.path}"
        raise AlreadyStarted(what, hint="Call it again in a second to watch that run") from error
    return lock


def _refuse_life_elsewhere(folder: RunDir, config: Config) -> None:
    """Before anything of the run is written over: a head that another machine started is seen only there."""
    live = read_live(folder.live)
    if live is None or not config.launcher.is_cluster or folder.outcome.exists():
        return
    if live.node != platform.node():
        bootstrap.refuse_running(config, _earlier_starts(folder))


def _end_earlier_life(folder: RunDir, say: Callable[[str], None]) -> None:
    """End by pid what a head that died has left, and remove its sockets and segments."""
    live = read_live(folder.live)
    if live is None:
        return
    num_ended = end_leftovers(live.run_id)
    segments = remove_leftovers(live.run_id, Path(live.sockets))
    if num_ended or segments:
        say(
            f"an earlier start of the run was cut short: ended {num_ended} processes that it had left, "
            f"removed {len(segments)} shared-memory segments"
        )


def _earlier_starts(folder: RunDir) -> tuple[Start, ...]:
    """Return the marks of the run's starts before this one, the newest last, for the nodes of a cluster."""
    live = read_live(folder.live)
    if live is None:
        return ()
    return (*live.earlier, live.start)[-MAX_EARLIER_STARTS:]


def _write_down(folder: RunDir, config: Config, asked: Config) -> None:
    folder.outcome.unlink(missing_ok=True)
    folder.phase.unlink(missing_ok=True)
    folder.pending_checkpoint.unlink(missing_ok=True)
    if not journal_facts(config.buffer.journal).keeps_past:  # nothing to go on from: a new history
        remove_rows(folder.metrics)
        folder.remove_learner_rows()
    for path, one in ((folder.resolved, config), (folder.config, asked)):
        replace_text(path, dump_resolved(one), 0o600, is_synced=True)  # buffer.url may hold a password


def _start_head(folder: RunDir, lock: int, command: str) -> RunHandle:
    run_id = uuid.uuid4().hex[:8]
    sockets = base_folder() / f"asyncrl-{run_id}"
    live = LiveRun(
        run_id=run_id,
        key=uuid.uuid4().hex,
        sockets=str(sockets),
        began=time.time(),
        node=platform.node(),
        command=command,
        earlier=_earlier_starts(folder),
        log_sizes=folder.log_sizes(),
    )
    write_live(folder.live, live)
    with folder.log("head.0").open("ab") as log_file, _holding_sigterm_back(), _deferring_interrupt():
        head = subprocess.Popen(
            [sys.executable, "-m", HEAD, str(folder.path), str(lock), SUPERVISOR],
            stdin=subprocess.PIPE,
            stdout=log_file,
            stderr=log_file,
            start_new_session=True,
            pass_fds=(lock,),
            env={**os.environ, RUN_VARIABLE: run_id},
        )
        write_live(folder.live, replace(live, pid=head.pid))
        assert head.stdin is not None
        head.stdin.close()  # it waits for that: nobody else writes the file meanwhile
        fault_point("up.head")
    return RunHandle(folder, head.pid, run_id, sockets, head, command)


@contextmanager
def _deferring_interrupt() -> Iterator[None]:
    """Hold Ctrl-C back until what is started here can be found by who ends it."""
    if threading.current_thread() is not threading.main_thread():  # only the main one is interrupted
        yield
        return
    interrupts: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: interrupts.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if interrupts:
        raise KeyboardInterrupt


@contextmanager
def _holding_sigterm_back() -> Iterator[None]:
    """Let a process that is started here find a SIGTERM when it can heed it; it would die of it before."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
