"""`run.json`: identity and address of a live run. Mode 0600: it holds the run's key."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import msgspec

from asyncrl.core.files.durable import replace_text

MODE = 0o600


class Start(msgspec.Struct, frozen=True):
    """One start of a run: its id, the folder that its sockets were in, and the pid of its head if known."""

    run_id: str
    sockets: str
    pid: int = 0


class LiveRun(msgspec.Struct, frozen=True, kw_only=True):
    """A start of a run.

    Attributes:
        run_id: Unique per start. pid: Of its head, 0 before that is started.
        key: Of the control API. url: Of it, empty while nobody listens.
        sockets: The private folder of its sockets.
        began: Wall-clock seconds of `asyncrl up`. node: The machine's name.
        command: Starts the run once more.
        earlier: Starts before this one, the newest last.
        log_sizes: Bytes that each service's log had before this start.
    """

    run_id: str
    pid: int = 0
    key: str = ""
    url: str = ""
    sockets: str = ""
    began: float | None = None
    node: str = ""
    command: str = ""
    earlier: tuple[Start, ...] = ()
    log_sizes: Mapping[str, int] = {}

    @property
    def start(self) -> Start:
        """Record of this start that a later start keeps."""
        return Start(self.run_id, self.sockets, self.pid)


def read_live(path: Path) -> LiveRun | None:
    """Return what is in `path`; None if there is no such file, or none that can be read."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=LiveRun)
    except (FileNotFoundError, NotADirectoryError, msgspec.MsgspecError):
        return None


def write_live(path: Path, live: LiveRun) -> None:
    """Write it so that a reader sees the old file or the new one, and so that it outlives the machine."""
    replace_text(path, json.dumps(msgspec.to_builtins(live), indent=2) + "\n", MODE, is_synced=True)
