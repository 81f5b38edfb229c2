"""A live run in the hands of a terminal, which started it or found it: poll it, stop it, read its outcome.

The head process lives as long as the run does. What a dead head has left is ended by the run's mark.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace

from asyncrl.cli.run.client import connect
from asyncrl.control.machine.processes import end_leftovers, is_alive, remove_leftovers
from asyncrl.control.phases import FIRST_START
from asyncrl.control.record.live import read_live
from asyncrl.control.record.outcome import Outcome, read_outcome
from asyncrl.control.record.rundir import RunDir, read_json
from asyncrl.control.snapshot import HeadWord, Snapshot
from asyncrl.core.errors import AsyncrlError, WireError
from asyncrl.core.files.durable import is_read_only
from asyncrl.core.states import RunState

STOP_POLL_S = 0.2
REAP_S = 10.0
LITTLE_BYTES = 1 << 20
"""A disk with less room than this may be what a head died of that left no word."""


@dataclass
class RunHandle:
    """A run whose head is process `pid`; `head` is that process where this one started it.

    `command` starts the run once more. `last_error` is why it failed, as its supervisor said last.
    """

    folder: RunDir
    pid: int
    run_id: str
    sockets: Path
    head: subprocess.Popen[bytes] | None = None
    command: str = ""
    last_error: str = ""

    def poll(self) -> Snapshot:
        """Return the newest snapshot; while no supervisor answers, what the head says of itself."""
        client = connect(self.folder)
        try:
            if client is not None:
                snapshot = client.status()
                self.last_error = snapshot.error or ""
                return snapshot
        except WireError as error:
            return replace(
                self._word(), state=RunState.SILENT, phase=f"another version of asyncrl runs it: {error}"
            )
        except AsyncrlError:
            pass  # it is starting again, or ending, or too busy
        word = self._word()
        if client is not None and word.phase == FIRST_START:  # which is over: it has answered once
            return replace(word, state=RunState.SILENT, phase="the supervisor does not answer")
        return word

    @property
    def is_over(self) -> bool:
        return not is_alive(self.pid, self.run_id)

    def ask_stop(self) -> bool:
        """Ask the run to checkpoint and end; return whether somebody was there to be asked."""
        client = connect(self.folder)
        try:
            if client is not None:
                client.stop()
                return True
        except AsyncrlError:
            pass
        word = self._word()
        if word.state == RunState.STARTING and client is None:  # it has no services yet
            self._signal(signal.SIGTERM)
        return word.state == RunState.STOPPING or client is None

    def stop(self, deadline_s: float, show: Callable[[Snapshot], None] = lambda snapshot: None) -> None:
        """Ask the run to end, wait, and end what is left of it after the deadline.

        Args:
            show: Given snapshots meanwhile.
        """
        if not self.await_end(deadline_s, show):
            self._signal(signal.SIGKILL)
        self.clear()

    def await_end(self, deadline_s: float, show: Callable[[Snapshot], None]) -> bool:
        """Ask the run to end and return whether it has within the deadline."""
        end = time.monotonic() + deadline_s
        is_asked = False
        while not self.is_over and time.monotonic() < end:
            is_asked = is_asked or self.ask_stop()
            show(snapshot := self.poll())
            # A supervisor that was killed meanwhile has a successor that was not asked.
            is_asked = is_asked and snapshot.state != RunState.RUNNING
            time.sleep(STOP_POLL_S)
        return self.is_over

    def clear(self) -> None:
        """End by pid and remove what a run that is over has left; a head that is ending is waited for."""
        if self.head is not None:
            self.head.wait(REAP_S)
        end_leftovers(self.run_id)
        remove_leftovers(self.run_id, self.sockets)

    def result(self) -> Outcome:
        """Return how the run ended, with the command that starts it once more."""
        return replace(read_outcome(self.folder) or self._guess_outcome(), command=self.command)

    def _guess_outcome(self) -> Outcome:
        """Return how a run ended that has left no word of it."""
        is_removed = not self.folder.live.exists()
        service = self.last_error.split(" ")[0] or "head.0"
        signals = {-number.value: f" of {number.name}" for number in signal.Signals}
        how = signals.get(self.head.poll() or 0, "") if self.head is not None else ""
        died = (
            f"the run's folder {self.folder.path} was removed"
            if is_removed
            else f"the head process died{how}"
        )
        return Outcome(
            state=RunState.FAILED,
            error=f"{self.last_error or died}{'' if is_removed else _trouble_of_disk(self.folder.path)}",
            service=service,
            tail=tuple(self.folder.tail(service)),
            is_removed=is_removed,
        )

    def _word(self) -> HeadWord:
        word = read_json(self.folder.phase) or {}
        state = RunState(word.get("state", RunState.STARTING))
        phase = str(word.get("phase", "starting the head process"))
        return HeadWord(run=self.folder.path.name, state=state, phase=phase)

    def _signal(self, number: signal.Signals) -> None:
        try:
            os.kill(self.pid, number)
        except ProcessLookupError:
            pass  # it has just ended


def _trouble_of_disk(path: Path) -> str:
    """Return why nobody could write into a folder, empty if they could."""
    free = shutil.disk_usage(path).free
    if free < LITTLE_BYTES:
        return f": the disk of {path} is full ({free:,} bytes free)"
    return f": {path} is read-only" if is_read_only(path) else ""


def attach(folder: RunDir) -> RunHandle | None:
    """Return a handle of the live run in `folder`, None if there is none."""
    live = read_live(folder.live)
    if live is None or not is_alive(live.pid, live.run_id):
        return None
    return RunHandle(folder, live.pid, live.run_id, Path(live.sockets), command=live.command)
