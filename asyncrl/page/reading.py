"""Reads what a page shows beyond the snapshot out of the run's folder, a little at a time.

Owns how much is read: of metrics a sample of what was there before and then what is new, of the journal
the newest payloads. It changes nothing, and needs neither the ledger's events nor the learner.
Invariant: a look costs about the same after a week as after an hour.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from asyncrl.buffer.composition import expand_variables, run_key
from asyncrl.buffer.journals.records import HEADER_BYTES, read_frames, read_header
from asyncrl.buffer.journals.redis.past import asking, keys_of
from asyncrl.buffer.journals.redis.server import RedisServer
from asyncrl.control.rows.row_files import lines_of, older_files
from asyncrl.core.config.tree import Config
from asyncrl.core.errors import ConfigError, WireError
from asyncrl.core.experience import Group, decode_group
from asyncrl.core.metrics.metric import Row

log = logging.getLogger(__name__)

WHOLE_FILE_BYTES = 8 << 20
"""Of metrics, that are read in one go: two thousand steps or more."""
NUM_SAMPLES, NUM_SAMPLED_FILES = 400, 20
NUM_GROUPS = 6
NUM_SEGMENTS = 2
"""The newest files that the first look goes through; they are of 64 MiB."""


class RowTail:
    """The rows of a growing `metrics.jsonl`. Of long files the first `read` gives a sample."""

    def __init__(self, path: Path, whole_file_bytes: int = WHOLE_FILE_BYTES) -> None:
        self._path = path
        self._whole_file_bytes = whole_file_bytes
        self._inode = self._offset = 0

    def read(self) -> list[Row]:
        """Return whole rows that were added since the last call, oldest first.

        Rows that were added right before their file was compressed may be missing.
        """
        try:
            found = self._path.stat()
        except FileNotFoundError:
            return []
        sampled = list(self._sample_older()) if not self._inode else []
        if found.st_ino != self._inode:  # the rows before were compressed
            self._inode, self._offset = found.st_ino, 0
        size = found.st_size
        if size < self._offset:  # a torn line was cut at a restart
            self._offset = size
        with self._path.open("rb") as file:
            if size - self._offset > self._whole_file_bytes:
                sampled += self._sample(file, size)
            file.seek(self._offset)
            data = file.read(size - self._offset)
        end = data.rfind(b"\n") + 1
        self._offset += end
        return [row for line in [*sampled, *data[:end].splitlines()] if (row := _parse(line)) is not None]

    def _sample_older(self) -> Iterator[bytes]:
        """Yield lines that are spread over compressed files, of a few of which all bytes are read."""
        files = older_files(self._path)
        for path in files[:: 1 + len(files) // NUM_SAMPLED_FILES]:
            lines = list(lines_of(path))
            yield from lines[:: 1 + len(lines) // (NUM_SAMPLES // NUM_SAMPLED_FILES)]

    def _sample(self, file: BinaryIO, size: int) -> Iterator[bytes]:
        """Yield lines that are spread over what is not read, and leave the newest part to be read whole."""
        start = size - self._whole_file_bytes // 4
        for number in range(NUM_SAMPLES):
            file.seek(self._offset + (start - self._offset) * number // NUM_SAMPLES)
            file.readline()  # the rest of a line
            yield file.readline()
        file.seek(start)
        self._offset = start + len(file.readline())


def _parse(line: bytes) -> Row | None:
    try:
        row = json.loads(line)
    except ValueError:  # a write that was torn by a crash
        return None
    return row if isinstance(row, dict) else None


class FilePayloads:
    """The newest groups in the segments of a file journal. It goes on where it stopped."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._path: Path | None = None
        self._offset = 0
        self._places: deque[tuple[Path, int, int, int, int]] = deque(maxlen=NUM_GROUPS)

    def newest(self) -> list[Group]:
        """Return them, the newest first."""
        paths = sorted(self._folder.glob("*.segment"))
        for path in paths[-NUM_SEGMENTS:] if self._path is None else paths:
            if self._path is None or path > self._path:
                self._path, self._offset = path, 0
            if path == self._path:
                with contextlib.suppress(FileNotFoundError):  # nobody needs that segment any more
                    self._scan(path)
        groups = (self._read(*place) for place in reversed(self._places))
        return [group for group in groups if group is not None]

    def _scan(self, path: Path) -> None:
        with path.open("rb", buffering=0) as file:
            while (header := read_header(os.pread(file.fileno(), HEADER_BYTES, self._offset))) is not None:
                num_bytes = HEADER_BYTES + header.body_bytes
                self._places.append((path, self._offset, num_bytes, header.ticket, header.attempt))
                self._offset += num_bytes

    def _read(self, path: Path, offset: int, num_bytes: int, ticket: int, attempt: int) -> Group | None:
        try:
            with path.open("rb", buffering=0) as file:
                record = os.pread(file.fileno(), num_bytes, offset)
        except FileNotFoundError:  # nobody needs that segment any more
            return None
        return _group_of(record, ticket, attempt)


class RedisPayloads:
    """The newest groups, by ticket, in the run's hash of payloads."""

    def __init__(self, config: Config, folder: Path) -> None:
        self._config = config
        self._folder = folder

    def newest(self) -> list[Group]:
        """Return them, the newest first. Raises ConfigError where Redis does not answer."""
        key = keys_of(run_key(self._folder))["payloads"]
        with asking(self._url()) as (ask, _):
            names = sorted((tuple(map(int, name.split(b":"))) for name in ask("HKEYS", key)), reverse=True)
            found = [(name, ask("HGET", key, ":".join(map(str, name)))) for name in names[:NUM_GROUPS]]
        groups = (_group_of(record, name[0], name[1]) for name, record in found if record is not None)
        return [group for group in groups if group is not None]

    def _url(self) -> str:
        section = self._config.buffer
        if section.redis_url is not None:
            return expand_variables(section.redis_url)
        server = RedisServer(self._folder.absolute() / "buffer" / "redis", section.fsync)
        if server.pid is None:
            raise ConfigError("the run's Redis does not run")
        return server.url


def _group_of(record: bytes, ticket: int, attempt: int) -> Group | None:
    frames = read_frames(record, ticket, attempt)
    try:
        return None if frames is None else decode_group(frames)
    except WireError:  # of an older asyncrl
        return None
