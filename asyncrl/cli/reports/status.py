"""`asyncrl status`: what runs are doing, once or until they are over; one as a panel, several as a table.

consumes: snapshots of live runs, and what ended ones have left
waits for: a second between two looks      unblocked by: the end of the runs, or Ctrl-C, which ends nothing
produces: text, or JSON: an object for one run, a list for several; a line per look while it watches
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from asyncrl.cli import exits
from asyncrl.cli.live import row_of, text_of
from asyncrl.cli.reports.table import align
from asyncrl.cli.run.client import NotRunning, RunClient, connect, find_folders, find_live_folder
from asyncrl.cli.run.handle import attach
from asyncrl.control.api.access import page_url
from asyncrl.control.record.outcome import read_outcome
from asyncrl.control.record.rundir import RunDir, read_json
from asyncrl.control.snapshot import LastWord, Snapshot, values_of
from asyncrl.core.errors import DeadlineExceeded
from asyncrl.core.runtime.clock import Clock, SystemClock
from asyncrl.core.states import RUN_ENDS, RunState

REFRESH_S = 1.0
CHECKPOINT_POLL_S = 0.2


@dataclass(frozen=True)
class Asked:
    """Selection of runs: by name, all of a folder, or, without either, the one started last.

    Attributes:
        is_whole: Each service of a large fleet is asked for.
    """

    names: Sequence[str]
    is_all: bool
    runs_dir: str
    is_whole: bool = False

    @property
    def is_several(self) -> bool:
        return self.is_all or len(self.names) > 1

    def snapshots(self) -> list[Snapshot]:
        """Return the snapshots of these runs.

        Raises:
            NotRunning: There is no such live run.
        """
        if self.is_all:
            return [_last_word(RunDir(folder)) for folder in find_folders(self.runs_dir)]
        if self.names:
            return [self._one(name) for name in self.names]
        return [self._one(None)]

    def _one(self, name: str | None) -> Snapshot:
        folder = find_live_folder(self.runs_dir, name)
        return _poll(folder) or _last_word(folder)


def show_status(asked: Asked, *, as_json: bool, is_watching: bool = False, clock: Clock | None = None) -> int:
    """Print what the runs are doing and return the exit code.

    Raises:
        NotRunning: There is no such live run.
    """
    clock = clock or SystemClock()
    snapshots = asked.snapshots()
    if not is_watching:
        _print(snapshots, asked, as_json)
        return exits.DEGRADED if any(snapshot.is_held_up for snapshot in snapshots) else exits.OK
    view: _Json | _Text = _Json(asked) if as_json else _Text(asked)
    try:
        while True:
            view.show(snapshots)
            if not any(map(_is_live, snapshots)):
                return exits.OK
            clock.sleep(REFRESH_S)
            snapshots = asked.snapshots()
    except NotRunning:
        exits.say("the run is over")
        return exits.OK
    finally:
        view.close()


def await_checkpoint(
    client: RunClient, step: int, wait_s: float, clock: Clock | None = None
) -> dict[str, int]:
    """Return `{"step": s}` once the journal knows a checkpoint of a step `s` of at least `step`.

    Whoever dies meanwhile: the run asks its learner again until there is one.

    Raises:
        DeadlineExceeded: There was none in `wait_s` seconds.
        NotRunning: The run ended meanwhile.
    """
    clock = clock or SystemClock()
    end = clock.now() + wait_s
    while True:
        ledger = _answer(client).ledger
        known = ledger.checkpoints if ledger is not None else ()
        if known and max(known) >= step:
            return {"step": max(known)}
        if clock.now() >= end:
            raise DeadlineExceeded(
                f"no checkpoint of step {step} or later was written within {wait_s:g} s",
                hint="'asyncrl status' shows what the learner does",
            )
        clock.sleep(CHECKPOINT_POLL_S)


def _answer(client: RunClient) -> Snapshot:
    """Return the snapshot, an empty one while a live run does not answer: its supervisor starts again."""
    try:
        return client.status()
    except DeadlineExceeded:
        return Snapshot()
    except NotRunning:
        if attach(client.folder) is None:
            raise
        return Snapshot()


def _poll(folder: RunDir) -> Snapshot | None:
    handle = attach(folder)
    return None if handle is None else handle.poll()


def _last_word(folder: RunDir) -> Snapshot:
    """Return the snapshot of a run, or, once it has ended, what it has left."""
    found = _poll(folder)
    if found is not None:
        return found
    outcome, summary = read_outcome(folder), read_json(folder.summary) or {}
    return LastWord(
        run=folder.path.name,
        state=outcome.state if outcome is not None else RunState.ENDED,
        step=summary.get("steps", 0),
        accuracy=summary.get("accuracy_end"),
        error=(outcome.error if outcome is not None else "") or None,
        is_over=True,
    )


def _is_live(snapshot: Snapshot) -> bool:
    return not snapshot.is_over and snapshot.state not in RUN_ENDS


def _plain(snapshots: Sequence[Snapshot], asked: Asked) -> object:
    """Return what stands in JSON: a list of several runs, of one an object."""
    found = [values_of(snapshot) for snapshot in snapshots]
    return found if asked.is_several else found[0]


def _print(snapshots: Sequence[Snapshot], asked: Asked, as_json: bool) -> None:
    if as_json:
        print(json.dumps(_plain(snapshots, asked), indent=2, sort_keys=True))
    elif asked.is_several:
        exits.show(*table_of(snapshots))
    else:
        exits.show(*text_of(snapshots[0], is_whole=asked.is_whole))
        _say_page(asked, snapshots[0])


def table_of(snapshots: Sequence[Snapshot]) -> list[str]:
    """Return several runs as lines of one table."""
    if not snapshots:
        return ["there are no runs"]
    rows = [row_of(snapshot) for snapshot in snapshots]
    return align([[*rows[0]], *([*row.values()] for row in rows)])


def _say_page(asked: Asked, snapshot: Snapshot) -> None:
    """Tell the person at a terminal where the page is; its token is for nobody else."""
    name = snapshot.run
    client = connect(RunDir(Path(asked.runs_dir) / name)) if name else None
    if client is not None and sys.stderr.isatty():
        exits.say(f"page: {page_url(client.url, client.key)}")


class _Text:
    """The panel of one run, or the table of several, drawn again in place where that is possible."""

    def __init__(self, asked: Asked) -> None:
        from asyncrl.cli.views import view_on

        self._asked = asked
        self._view = None if asked.is_several else view_on(sys.stdout)

    def show(self, snapshots: Sequence[Snapshot]) -> None:
        if self._view is not None:
            self._view.show(snapshots[0])
            return
        if sys.stdout.isatty():
            print("\x1b[H\x1b[2J", end="")
        exits.show(*table_of(snapshots))

    def close(self) -> None:
        if self._view is not None:
            self._view.close()


class _Json:
    """A line per look."""

    def __init__(self, asked: Asked) -> None:
        self._asked = asked

    def show(self, snapshots: Sequence[Snapshot]) -> None:
        print(json.dumps(_plain(snapshots, self._asked), sort_keys=True), flush=True)

    def close(self) -> None:
        """A line is complete when it is printed."""
