"""`asyncrl logs`: the logs of a run's services as one, by time.

A record begins with its time; lines without one (a traceback, another program's output) belong to the record
above them and stay with it. Reading never changes a log. Invariant: of one service no line is lost,
repeated or out of order.
"""

from __future__ import annotations

import heapq
import json
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from asyncrl.cli.run.handle import attach
from asyncrl.control.record.rundir import RunDir
from asyncrl.core.errors import ConfigError
from asyncrl.core.files.printable import printable
from asyncrl.core.runtime.clock import Clock, SystemClock

POLL_S = 0.25
BLOCK_BYTES = 1 << 16
TIME = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d[,.]\d{3}")
KINDS = ("head", "supervisor", "buffer", "weight_sync", "publisher", "receiver", "learner", "rollout")
COLORS = (36, 33, 32, 35, 34, 96, 93, 92, 95, 94)
"""Of the terminal, one per service."""


@dataclass(frozen=True, order=True)
class Record:
    """Lines of one service that belong together; `time` as it is written, empty before any was."""

    time: str
    service: str
    lines: tuple[str, ...]


def print_logs(
    run: Path,
    services: Sequence[str],
    num_lines: int,
    *,
    is_following: bool = False,
    as_json: bool = False,
    clock: Clock | None = None,
) -> None:
    """Print the newest lines of a run, and with `is_following` what comes until it is over.

    Raises:
        ConfigError: There is no such service in it.
    """
    folder = RunDir(run)
    logs = Logs(folder, services)
    writer = Writer(as_json=as_json, has_colors=sys.stdout.isatty())
    writer.write(logs.tail(num_lines))
    clock = clock or SystemClock()
    while is_following:
        is_over = attach(folder) is None  # asked first: what was written before its end is read after it
        writer.write(logs.read_new())
        if is_over:
            return
        clock.sleep(POLL_S)


def is_service(word: str) -> bool:
    """Whether a word of the command line names a service, or a kind of services; else it names a run."""
    kind, dot, index = word.partition(".")
    return kind in KINDS and (not dot or index.isdigit())


class Logs:
    """The log files of a run, each read from its end on.

    Args:
        services: Names (`rollout.0`) or kinds (`rollout`); all if there are none.

    Raises:
        ConfigError: One of them has no log.
    """

    def __init__(self, folder: RunDir, services: Sequence[str]) -> None:
        self._folder = folder
        self._services = services
        self._files: dict[str, LogFile] = {}
        self._find()
        known = sorted({path.stem for path in folder.logs.glob("*.log")})
        for wanted in services:
            if not any(_is_of(name, [wanted]) for name in known):
                hint = f"There are: {', '.join(known)}" if known else "It has written none yet"
                raise ConfigError(f"run '{folder.path.name}' has no log of '{wanted}'", hint=hint)

    def tail(self, num_lines: int) -> list[Record]:
        """Return the newest `num_lines` lines of all, in records by time; read on from here."""
        records = list(heapq.merge(*(file.tail(num_lines) for file in self._files.values())))
        kept: list[Record] = []
        room = num_lines
        for record in reversed(records):
            if room <= 0:
                break
            kept.append(Record(record.time, record.service, record.lines[-room:]))
            room -= len(record.lines)
        return kept[::-1]

    def read_new(self) -> list[Record]:
        """Return what was written since the last call, by time."""
        self._find()
        return list(heapq.merge(*(file.read_new() for file in self._files.values())))

    def _find(self) -> None:
        for path in sorted(self._folder.logs.glob("*.log")):
            if path.stem not in self._files and (not self._services or _is_of(path.stem, self._services)):
                self._files[path.stem] = LogFile(path)


def _is_of(name: str, services: Sequence[str]) -> bool:
    return any(name == wanted or name.rpartition(".")[0] == wanted for wanted in services)


class LogFile:
    """One service's log; remembers how far it was read, and the time of the last record."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._service = path.stem
        self._position = 0
        self._time = ""
        self._rest = b""

    def tail(self, num_lines: int) -> list[Record]:
        """Return the last `num_lines` lines, and read on after them."""
        data = _read_end(self._path, num_lines)
        self._position = self._path.stat().st_size
        whole, newline, self._rest = data.rpartition(b"\n")
        lines = _decode(whole + newline)
        before = lines[: len(lines) - num_lines] if num_lines else lines
        self._time = next((line[:23] for line in reversed(before) if TIME.match(line)), "")
        return self._records(lines[len(before) :])

    def read_new(self) -> list[Record]:
        """Return what was added since; from the beginning if the file is shorter than it was."""
        try:
            size = self._path.stat().st_size
            if size < self._position:
                self._position, self._rest = 0, b""
            if size == self._position:
                return []
            with self._path.open("rb") as file:
                file.seek(self._position)
                data = file.read(size - self._position)
        except FileNotFoundError:
            return []
        self._position += len(data)
        whole, newline, self._rest = (self._rest + data).rpartition(b"\n")
        return self._records(_decode(whole + newline))

    def _records(self, lines: Sequence[str]) -> list[Record]:
        records: list[Record] = []
        group: list[str] = []
        for line in lines:
            if TIME.match(line):
                if group:
                    records.append(Record(self._time, self._service, tuple(group)))
                self._time, group = line[:23], []
            group.append(line)
        if group:
            records.append(Record(self._time, self._service, tuple(group)))
        return records


def _decode(data: bytes) -> list[str]:
    return data.decode(errors="replace").split("\n")[:-1] if data else []


def _read_end(path: Path, num_lines: int) -> bytes:
    """Return the end of a file that has at least `num_lines` lines and one before them, or all of it."""
    with path.open("rb") as file:
        position = file.seek(0, 2)
        blocks: list[bytes] = []
        num_found = 0
        while position > 0 and num_found <= num_lines + 1:
            size = min(BLOCK_BYTES, position)
            position -= size
            file.seek(position)
            blocks.append(file.read(size))
            num_found += blocks[-1].count(b"\n")
    data = b"".join(reversed(blocks))
    return data if position == 0 else data.partition(b"\n")[2]


class Writer:
    """Prints records with their service's name."""

    def __init__(self, *, as_json: bool, has_colors: bool) -> None:
        self._as_json = as_json
        self._has_colors = has_colors
        self._color_of: dict[str, int] = {}

    def write(self, records: Sequence[Record]) -> None:
        for record in records:
            for line in self._lines(record):
                print(line)
        sys.stdout.flush()

    def _lines(self, record: Record) -> Iterator[str]:
        if self._as_json:
            for line in record.lines:
                yield json.dumps({"time": record.time, "service": record.service, "line": line})
            return
        name = f"{record.service:<13} |"
        if self._has_colors:
            color = self._color_of.setdefault(record.service, COLORS[len(self._color_of) % len(COLORS)])
            name = f"\x1b[{color}m{name}\x1b[0m"
        for line in record.lines:
            yield f"{name} {printable(line)}"
