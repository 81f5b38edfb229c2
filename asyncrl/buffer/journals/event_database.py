"""Commits and snapshots of a file journal, in SQLite (write-ahead log).

Owns the tables and their format. A commit is a row; old commits are packed, 256 in a block, which takes a
third to a quarter of the bytes. Invariant: each commit is in one of the two tables, whenever a reader looks.
"""

from __future__ import annotations

import contextlib
import sqlite3
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import msgpack
import xxhash

from asyncrl.buffer.journals.journal import Commit, pack_snapshot, unpack_commit, unpack_snapshot
from asyncrl.core.errors import CheckpointError, ConfigError, NoJournal
from asyncrl.core.runtime.faults import fault_point

EVENTS = "events.sqlite"
FORMAT = 3
"""Of the database, as its `user_version`. 1, with no number, may lack times; 2 has no blocks."""
BLOCK_COMMITS = 256
BLOCK_BYTES = 1 << 18
"""Most bytes of a block before it is packed, unless its first commit alone has more: 4 ms of work."""
_KEPT_SNAPSHOTS = 2
_TABLES = """
CREATE TABLE IF NOT EXISTS turns (id INTEGER PRIMARY KEY, digest TEXT, data BLOB, time_s REAL);
CREATE TABLE IF NOT EXISTS blocks (last INTEGER PRIMARY KEY, digest TEXT, data BLOB);
CREATE TABLE IF NOT EXISTS snapshots (turn INTEGER PRIMARY KEY, digest TEXT, data BLOB);
"""
"""A commit is a row of `turns`, as it was named when the first of these files were written."""


class _Row(NamedTuple):
    number: int
    time_s: float | None
    digest: str
    data: bytes


class EventDatabase:
    """Database of the one buffer that writes the journal.

    Args:
        synchronous: SQLite's setting: when a commit is forced to the disk.

    Raises:
        ConfigError: It cannot be written, or a newer asyncrl has written it.
        CheckpointError: It is malformed.
    """

    def __init__(self, path: Path, synchronous: str, block_commits: int = BLOCK_COMMITS) -> None:
        self._block_commits = block_commits
        self._database = _open_database(path, synchronous)
        extent = "SELECT COALESCE(MIN(id), 1), COALESCE(MAX(id), 0) FROM turns"
        try:
            self._first, self._last = self._database.execute(extent).fetchone()
        except sqlite3.DatabaseError as error:
            self._database.close()
            raise _unreadable(error) from error
        self._pack_at = self._first + 2 * block_commits - 1

    def append(self, digest: str, data: bytes, time_s: float) -> None:
        """Commit these events. Raises sqlite3.OperationalError if the disk does not take it."""
        row = (digest, data, time_s)
        added = self._database.execute("INSERT INTO turns (digest, data, time_s) VALUES (?, ?, ?)", row)
        self._last = added.lastrowid or self._last

    def commits(self, after: int = 0) -> Iterator[Commit]:
        """Yield the commits after commit `after`.

        Raises:
            CheckpointError: A checksum does not fit, or the database is malformed.
        """
        return _read_commits(self._database, after)

    def newest_snapshot(self, counters: Counter[str]) -> tuple[int, dict[str, object] | None]:
        """Return the newest whole snapshot and the commit that it was made after; 0 and None without one."""
        return _newest_snapshot(self._database, counters)

    def pack(self) -> None:
        """Pack the oldest commits in a block, once there are commits for two.

        Raises:
            sqlite3.OperationalError: As `append`; the next try is when as many commits have come again.
        """
        if self._last < self._pack_at:
            return
        self._pack_at = self._last + self._block_commits
        query = "SELECT id, time_s, digest, data FROM turns ORDER BY id LIMIT ?"
        found = self._database.execute(query, (self._block_commits,)).fetchall()
        rows = _limited([_Row(*row) for row in found])
        last = rows[-1].number
        block = zlib.compress(msgpack.packb([(row.number, row.time_s, row.data) for row in rows]))
        with self._transaction():
            row = (last, _digest(row.digest for row in rows), block)
            self._database.execute("INSERT INTO blocks VALUES (?, ?, ?)", row)
            fault_point("buffer.packing", last)
            self._database.execute("DELETE FROM turns WHERE id <= ?", (last,))
        self._first = last + 1
        self._pack_at = self._first + 2 * self._block_commits - 1

    def write_snapshot(self, values: Mapping[str, object]) -> None:
        """Keep a snapshot of the ledger as it stands after the last commit. Raises as `append`."""
        data, digest = pack_snapshot(values)
        with self._transaction():
            row = (self._last, digest, data)
            self._database.execute("INSERT OR REPLACE INTO snapshots VALUES (?, ?, ?)", row)
            fault_point("buffer.snapshotting", self._last)
            kept = "SELECT turn FROM snapshots ORDER BY turn DESC LIMIT ?"
            self._database.execute(f"DELETE FROM snapshots WHERE turn NOT IN ({kept})", (_KEPT_SNAPSHOTS,))
        fault_point("buffer.snapshotted", self._last)

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        self._database.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._database.execute("COMMIT")
        except BaseException:  # an interrupt too: what is committed next is no part of it
            if self._database.in_transaction:
                self._database.execute("ROLLBACK")
            raise

    def close(self, *, is_synced: bool) -> None:
        """Close it; `is_synced`: after its log has been brought into it."""
        if is_synced:
            with contextlib.suppress(sqlite3.OperationalError):  # without room the log stays as long as it is
                self._database.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
        self._database.close()


def read_commits(folder: Path) -> list[Commit]:
    """Return all commits of the journal in `folder`, whether or not a buffer is at work on it; write nothing.

    Raises:
        CheckpointError: There is none, or it is damaged.
    """
    with _reading(folder) as database:
        return list(_read_commits(database, 0))


def read_newest(folder: Path) -> tuple[dict[str, object] | None, list[Commit]]:
    """Return the newest whole snapshot and the commits after it, as `read_commits` does all of them.

    Raises:
        CheckpointError: As `read_commits`.
    """
    with _reading(folder) as database:
        commit, values = _newest_snapshot(database, Counter())
        return values, list(_read_commits(database, commit))


@contextlib.contextmanager
def _reading(folder: Path) -> Iterator[sqlite3.Connection]:
    path = folder / EVENTS
    if not path.is_file():
        raise NoJournal(f"there is no journal {path}", hint="Did the run ever start?")
    try:
        with contextlib.closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as database:
            _refuse_newer(database, path)
            yield database
    except sqlite3.Error as error:
        raise CheckpointError(f"the journal {path} cannot be read: {error}") from error


def _read_commits(database: sqlite3.Connection, after: int) -> Iterator[Commit]:
    try:
        for row in _read_rows(database, after):
            yield Commit(row.number, row.time_s, unpack_commit(row.number, row.data, row.digest))
    except sqlite3.DatabaseError as error:
        raise _unreadable(error) from error


def _unreadable(error: sqlite3.DatabaseError) -> CheckpointError:
    return CheckpointError(f"the journal cannot be read: {error}", hint="Restore its folder")


def _read_rows(database: sqlite3.Connection, after: int) -> Iterator[_Row]:
    # A journal that is only read stays as it is, so it may be of an older format.
    time_s = "time_s" if "time_s" in _columns(database, "turns") else "NULL"
    query = f"SELECT id AS number, {time_s}, digest, data, FALSE FROM turns WHERE id > :after"
    if _columns(database, "blocks"):  # one query: a buffer that packs meanwhile moves no commit past a reader
        query = f"{query} UNION ALL SELECT last, NULL, digest, data, TRUE FROM blocks WHERE last > :after"
    for last, time_s, digest, data, is_block in database.execute(
        f"{query} ORDER BY number", {"after": after}
    ):
        rows = _unpack(last, digest, data) if is_block else [_Row(last, time_s, digest, data)]
        yield from (row for row in rows if row.number > after)


def _unpack(last: int, digest: str, block: bytes) -> list[_Row]:
    try:
        found = msgpack.unpackb(zlib.decompress(block))
    except zlib.error:
        found = []
    rows = [_Row(number, time_s, xxhash.xxh3_64_hexdigest(data), data) for number, time_s, data in found]
    if _digest(row.digest for row in rows) != digest:
        what = f"the block of commits up to {last} of the journal is damaged: its checksum does not fit"
        raise CheckpointError(what, hint="Restore the journal")
    return rows


def _digest(digests: Iterable[str]) -> str:
    """Return the digest of a block, which is that of its commits' own, so that earlier damage is found."""
    return xxhash.xxh3_64_hexdigest("".join(digests).encode())


def _limited(rows: list[_Row]) -> list[_Row]:
    """Return the first of the rows, at least one, whose data stay within `BLOCK_BYTES`."""
    size = 0
    for index, row in enumerate(rows):
        size += len(row.data)
        if size > BLOCK_BYTES and index:
            return rows[:index]
    return rows


def _newest_snapshot(
    database: sqlite3.Connection, counters: Counter[str]
) -> tuple[int, dict[str, object] | None]:
    query = "SELECT turn, digest, data FROM snapshots ORDER BY turn DESC"
    for commit, digest, data in database.execute(query).fetchall():
        try:
            return commit, unpack_snapshot(data, digest)
        except CheckpointError:  # an older one, or all the events, tell the same
            counters["damaged_snapshots"] += 1
    return 0, None


def _open_database(path: Path, synchronous: str) -> sqlite3.Connection:
    try:
        # The server's thread is the only user; it need not be the thread that built the service.
        database = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=1.0)
        _refuse_newer(database, path)
        database.execute("PRAGMA journal_mode=WAL").fetchall()
        database.execute(f"PRAGMA synchronous={synchronous}")
        database.executescript(_TABLES)
        _bring_up_to_date(database)
        with contextlib.closing(database.execute("BEGIN IMMEDIATE")):
            database.execute("COMMIT")
    except sqlite3.Error as error:
        raise ConfigError(
            f"the journal {path} cannot be opened: {error}",
            hint="Give the user who runs this the right to write there",
        ) from error
    return database


def _refuse_newer(database: sqlite3.Connection, path: Path) -> None:
    """Raise ConfigError, and leave the journal alone, if a newer asyncrl has written it."""
    (found,) = database.execute("PRAGMA user_version").fetchone()
    if found > FORMAT:
        database.close()
        raise ConfigError(
            f"the journal {path} is of format {found}, this asyncrl reads up to {FORMAT}",
            hint="A newer asyncrl wrote it: use that one, or newer; for a new run choose another run.name",
        )


def _bring_up_to_date(database: sqlite3.Connection) -> None:
    """Change an older journal to the current format, at once or not at all."""
    if database.execute("PRAGMA user_version").fetchone() == (FORMAT,):
        return
    database.execute("BEGIN IMMEDIATE")
    if "time_s" not in _columns(database, "turns"):
        database.execute("ALTER TABLE turns ADD COLUMN time_s REAL")
    database.execute(f"PRAGMA user_version={FORMAT}")
    database.execute("COMMIT")


def _columns(database: sqlite3.Connection, table: str) -> set[str]:
    """Return the names of a table's columns; none if there is no such table."""
    return {row[1] for row in database.execute(f"PRAGMA table_info({table})")}
