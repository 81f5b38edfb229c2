"""State of the buffer after its process was killed or its files were harmed."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import shutil
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from asyncrl.buffer.journals.file_journal import FileJournal
from asyncrl.buffer.journals.segments import SegmentFolder
from asyncrl.buffer.ledger.census import take_census
from asyncrl.buffer.ledger.events import Checkpointed, Opened
from asyncrl.buffer.ledger.tickets import State
from asyncrl.buffer.store import ExperienceStore
from asyncrl.core.errors import AsyncrlError, CheckpointError, ConfigError, DeadlineExceeded, WireError
from asyncrl.core.experience import encode_group
from asyncrl.core.rpc import Client
from asyncrl.core.runtime.threads import ThreadRuntime
from tests.buffer.parts import make_group, make_store

REPOSITORY = Path(__file__).parents[3]


def push(store: ExperienceStore, version: int = 1) -> int:
    (grant,) = store.ledger.lease("a", version, 1, 0.0)
    assert (
        store.push("a", grant.ticket, grant.attempt, encode_group(make_group(grant.ticket, grant.attempt)))
        == "stored"
    )
    store.commit(0.0)
    return grant.ticket


def start(store: ExperienceStore) -> int:
    store.ledger.describe_data(100, "digest")
    token = store.ledger.open("learner")
    store.ledger.register_version(token, 0)
    return token


def reopen(folder: Path, store: ExperienceStore) -> ExperienceStore:
    store.commit(0.0)
    store.journal.close()
    return make_store(folder)


def test_leases_survive_a_restart_with_a_fresh_deadline(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    start(store)
    store.ledger.lease("a", 1, 1, 0.0)
    store.commit(0.0)
    store.journal.close()
    again = ExperienceStore(store.ledger.settings, FileJournal(tmp_path), 2, True, now=500.0)
    assert again.ledger.expire(509.9) == 0
    assert again.push("a", 1, 1, encode_group(make_group(1))) == "stored"
    again.journal.close()


def flip_byte(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def newest_segment(folder: Path) -> Path:
    return max(path for path in folder.rglob("*.segment") if path.stat().st_size)


def test_a_payload_flipped_while_running_is_found_at_fetch(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    token = start(store)
    tickets = [push(store), push(store)]
    store = reopen(tmp_path, store)
    store.ledger.reserve(token, 0, 0.0)
    flip_byte(newest_segment(tmp_path), 60)
    payloads, lost = store.fetch(tickets)
    assert (len(payloads), lost) == (1, [1])
    assert store.ledger.reserve(token, 0, 0.0) is None, "the batch waits for the ticket's next attempt"
    store.journal.close()


@pytest.mark.parametrize("cut_bytes", [1, 30, 300])
def test_a_torn_tail_is_cut_and_counted(tmp_path: Path, cut_bytes: int) -> None:
    folder = SegmentFolder(tmp_path)
    folder.append(1, 1, [b"x" * 200, b""])
    folder.append(2, 1, [b"y" * 300])
    folder.close()
    path = newest_segment(tmp_path)
    whole = path.stat().st_size
    os.truncate(path, whole - cut_bytes)
    again = SegmentFolder(tmp_path)
    assert again.read(1, 1) == [b"x" * 200, b""]
    assert again.read(2, 1) is None
    assert again.counters["torn_tails"] == 1
    again.append(2, 2, [b"z"])
    again.close()
    last = SegmentFolder(tmp_path)
    assert (last.read(2, 2), last.counters["torn_tails"]) == ([b"z"], 0)
    last.close()


def test_a_segment_is_deleted_whole_once_nothing_in_it_is_needed(tmp_path: Path) -> None:
    folder = SegmentFolder(tmp_path, segment_bytes=500)
    for ticket in range(1, 7):
        folder.append(ticket, 1, [b"x" * 200])
    assert len(list(tmp_path.iterdir())) == 4  # three full ones and the active one
    folder.release(1)
    assert len(list(tmp_path.iterdir())) == 4
    folder.release(2)
    assert len(list(tmp_path.iterdir())) == 3
    assert folder.read(3, 1) == [b"x" * 200]
    folder.close()
    again = SegmentFolder(tmp_path, segment_bytes=500)
    again.keep_only({6})
    assert again.read(6, 1) is not None
    assert again.read(5, 1) is None
    again.close()


def test_one_journal_has_one_process(tmp_path: Path) -> None:
    journal = FileJournal(tmp_path)
    with pytest.raises(ConfigError, match="cannot be opened"):
        FileJournal(tmp_path)
    journal.close()
    FileJournal(tmp_path).close()


@pytest.mark.parametrize("fsync", ["everysec", "always", "never"])
def test_every_fsync_policy_restores_what_was_committed(tmp_path: Path, fsync: str) -> None:
    journal = FileJournal(tmp_path, fsync)  # type: ignore[arg-type]
    journal.append(1, 1, [b"x"])
    journal.commit([Opened(1, "learner")], 0.0)
    journal.tick(0.0)
    journal.close()
    again = FileJournal(tmp_path, fsync)  # type: ignore[arg-type]
    assert list(again.recover().events) == list(again.events()) == [Opened(1, "learner")]
    assert again.read(1, 1) == [b"x"]
    again.close()


def test_a_journal_of_an_older_version_is_read_and_goes_on(tmp_path: Path) -> None:
    journal = FileJournal(tmp_path)
    journal.commit([Opened(1, "learner")], 0.0)
    journal.close()
    with contextlib.closing(sqlite3.connect(tmp_path / "events.sqlite")) as database:
        database.executescript(
            "ALTER TABLE turns DROP COLUMN time_s; DROP TABLE snapshots; PRAGMA user_version=0"
        )
    again = FileJournal(tmp_path)
    assert list(again.recover().events) == [Opened(1, "learner")]
    before = time.time()
    again.commit([Opened(2, "learner")], 0.0)
    first, second = again.commits()
    assert first.time_s is None
    assert second.time_s is not None and before <= second.time_s <= time.time()
    again.close()


@pytest.mark.parametrize("change", ["data = x'00'", "digest = 'x'"])
def test_an_altered_event_is_refused(tmp_path: Path, change: str) -> None:
    journal = FileJournal(tmp_path)
    journal.commit([Opened(1, "learner")], 0.0)
    journal.close()
    with contextlib.closing(sqlite3.connect(tmp_path / "events.sqlite")) as database:
        database.execute(f"UPDATE turns SET {change}")
        database.commit()
    again = FileJournal(tmp_path)
    with pytest.raises(CheckpointError, match="damaged"):
        again.recover()
    again.close()


def test_a_damaged_header_costs_its_own_record_and_no_other(tmp_path: Path) -> None:
    folder = SegmentFolder(tmp_path)
    for ticket in (1, 2, 3):
        folder.append(ticket, 1, [b"x" * 200])
    folder.close()
    flip_byte(newest_segment(tmp_path), 252 + 5)
    again = SegmentFolder(tmp_path)
    assert [again.holds(ticket, 1) for ticket in (1, 2, 3)] == [True, False, True]
    assert again.read(3, 1) == [b"x" * 200]
    assert (again.counters["damaged_headers"], again.counters["torn_tails"]) == (1, 0)
    again.close()


def test_a_damaged_snapshot_is_passed_over(tmp_path: Path) -> None:
    journal = FileJournal(tmp_path)
    for token in (1, 2):
        journal.commit([Opened(token, "learner")], 0.0)
        journal.write_snapshot({"token": token})
    journal.close()
    for left in ({"token": 1}, None):
        with contextlib.closing(sqlite3.connect(tmp_path / "events.sqlite")) as database:
            newest = "SELECT MAX(turn) FROM snapshots WHERE digest != 'x'"
            database.execute(f"UPDATE snapshots SET digest = 'x' WHERE turn = ({newest})")
            database.commit()
        again = FileJournal(tmp_path)
        past = again.recover()
        assert past.snapshot == left
        assert list(past.events)[-1] == Opened(2, "learner")
        again.close()


# A power cut, played with copies of what was on the disk


class SlowDisk:
    """Counts as on the disk what a sync found there; takes its time, and fails while the power is off."""

    def __init__(self, folder: Path, disk: Path, sync_s: float) -> None:
        self.folder, self.disk, self.sync_s = folder, disk, sync_s
        self.num_syncs = 0
        self.is_off = False
        self.lock = threading.Lock()

    def sync(self, descriptor: int) -> None:
        path = Path(f"/proc/self/fd/{descriptor}").resolve()
        size = path.stat().st_size
        time.sleep(self.sync_s)
        target = self.disk / path.relative_to(self.folder)
        with self.lock:
            if self.is_off:
                raise OSError(errno.EIO, "I/O error")
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes()[:size])
            self.num_syncs += 1


@pytest.mark.parametrize(("fsync", "may_lose"), [("always", False), ("everysec", True)])
def test_a_power_cut_costs_what_was_committed_in_the_last_two_syncs(
    tmp_path: Path, fsync: str, may_lose: bool
) -> None:
    live, disk = tmp_path / "live", tmp_path / "disk"
    slow = SlowDisk(live, disk, sync_s=0.2)
    journal = FileJournal(live, fsync, sync=slow.sync)  # type: ignore[arg-type]
    shutil.copy(live / "events.sqlite", disk / "events.sqlite") if disk.exists() else shutil.copytree(
        live, disk
    )
    acknowledged: dict[int, float] = {}

    def commit() -> None:
        ticket = len(acknowledged) + 1
        journal.append(ticket, 1, [b"x" * 100])
        assert journal.commit([Opened(ticket, "learner")], 0.0)
        if fsync == "always":  # SQLite has synced its log itself
            shutil.copy(live / "events.sqlite-wal", disk / "events.sqlite-wal")
        acknowledged[ticket] = time.monotonic()
        journal.tick(0.0)

    end = time.monotonic() + 60.0
    while slow.num_syncs < 4:
        assert time.monotonic() < end
        commit()
        time.sleep(0.02)
    with slow.lock:
        slow.is_off = True
    if may_lose:
        commit()  # is surely on no disk
    cut, unsynced_s = time.monotonic(), journal.status().unsynced_s
    image = tmp_path / "image"
    shutil.copytree(disk, image)
    slow.is_off = False
    journal.close()
    again = FileJournal(image)
    known = {event.token for event in again.events()}
    lost = [ticket for ticket in acknowledged if ticket not in known or again.read(ticket, 1) is None]
    again.close()
    assert bool(lost) == may_lose
    window_s = max((cut - acknowledged[ticket] for ticket in lost), default=0.0)
    assert window_s <= unsynced_s, f"{len(lost)} groups, the oldest {window_s:.2f} s old"


def test_a_checkpoint_is_on_the_disk_when_it_is_acknowledged_for_older_ones_are_removed_then(
    tmp_path: Path,
) -> None:
    live, disk = tmp_path / "live", tmp_path / "disk"
    journal = FileJournal(live, "everysec", sync=SlowDisk(live, disk, sync_s=0.0).sync)
    shutil.copytree(live, disk)
    journal.append(1, 1, [b"payload"])
    assert journal.commit([Opened(1, "learner")], 0.0)
    assert journal.commit([Checkpointed(1, 4, "digest", (4,))], 0.0)
    assert journal.commit([Opened(2, "learner")], 0.0), "no checkpoint: it may be lost"
    image = tmp_path / "image"
    shutil.copytree(disk, image)
    journal.close()
    again = FileJournal(image)
    assert list(again.events()) == [Opened(1, "learner"), Checkpointed(1, 4, "digest", (4,))]
    assert again.read(1, 1) == [b"payload"]
    again.close()


def test_a_checkpoint_whose_sync_fails_is_not_acknowledged_until_one_has_worked(tmp_path: Path) -> None:
    live, disk = tmp_path / "live", tmp_path / "disk"
    real, failures = SlowDisk(live, disk, sync_s=0.0).sync, [OSError(errno.EIO, "I/O error")] * 2

    def sync(descriptor: int) -> None:
        if failures:
            raise failures.pop()
        real(descriptor)

    journal = FileJournal(live, "everysec", sync=sync)
    shutil.copytree(live, disk)
    journal.append(1, 1, [b"payload"])
    assert not journal.commit([Checkpointed(1, 4, "digest", (4,))], 0.0)
    assert "does not sync" in journal.obstacles()[0].sentence
    end = time.monotonic() + 60.0
    while not journal.commit([], 0.0):
        assert time.monotonic() < end
        time.sleep(0.01)
    assert not failures and journal.counters["failed_syncs"] == 2
    assert journal.obstacles() == []
    image = tmp_path / "image"
    shutil.copytree(disk, image)
    journal.close()
    again = FileJournal(image)
    assert list(again.events()) == [Checkpointed(1, 4, "digest", (4,))]
    assert again.read(1, 1) == [b"payload"]
    again.close()


def test_a_sync_that_fails_is_said_counted_and_tried_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    failures = [OSError("no space left"), OSError("no space left")]

    def sync(descriptor: int) -> None:
        if failures:
            raise failures.pop()

    journal = FileJournal(tmp_path, sync=sync)
    journal.commit([Opened(1, "learner")], 0.0)
    end = time.monotonic() + 60.0
    while journal.status().unsynced_s > 0.0:
        journal.tick(0.0)
        assert time.monotonic() < end
        time.sleep(0.01)
    assert journal.counters["failed_syncs"] == 2
    assert "could not be synced" in caplog.text
    journal.close()


# kill -9


@contextlib.contextmanager
def served(folder: Path, fault: str = "") -> Iterator[tuple[subprocess.Popen[str], Client]]:
    environment = {**os.environ, "ASYNCRL_FAULT": fault, "PYTHONPATH": str(REPOSITORY)}
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.buffer.journals.pushing_process", str(folder)],
        cwd=REPOSITORY,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    client = Client(ThreadRuntime(), process.stdout.readline().strip())
    try:
        yield process, client
    finally:
        client.close()
        process.kill()
        process.wait(60.0)
        process.stdout.close()


def call_until_death(
    process: subprocess.Popen[str], client: Client, op: str, frames: Sequence[bytes] = (), **args: Any
) -> dict[str, Any] | None:
    """Call until there is an answer; return None once the service is dead."""
    while process.poll() is None:
        with contextlib.suppress(DeadlineExceeded):
            return client.call(op, frames, 0.5, **args).args
    return None


def push_until_death(process: subprocess.Popen[str], client: Client) -> list[int]:
    """Push groups one by one; return those that the service acknowledged."""
    acknowledged: list[int] = []
    while len(acknowledged) < 40:
        lease = call_until_death(process, client, "lease", replica="a", version=1, want=1, wait_s=0.0)
        if lease is None:
            break
        ticket, attempt = lease["grants"][0]["ticket"], lease["grants"][0]["attempt"]
        frames = encode_group(make_group(ticket, attempt))
        answer = call_until_death(
            process, client, "push", frames, replica="a", ticket=ticket, attempt=attempt
        )
        if answer is None:
            break
        assert answer["result"] in ("stored", "duplicate")
        acknowledged.append(ticket)
    return acknowledged


@pytest.mark.parametrize("fault", ["buffer.appended@12", "buffer.committed@23", "buffer.sent@20"])
def test_a_killed_buffer_loses_no_acknowledged_push(tmp_path: Path, fault: str) -> None:
    with served(tmp_path, fault) as (process, client):
        wait = {"deadline_s": 60.0}
        client.call("describe_data", **wait, num_prompts=100, digest="d")
        token = client.call("open", **wait, holder="learner").args["token"]
        client.call("register_version", **wait, token=token, step=0)
        acknowledged = push_until_death(process, client)
        assert process.wait(60.0) == -9
    assert 0 < len(acknowledged) < 40
    with served(tmp_path) as (_, client):
        status = client.call("status", deadline_s=60.0).args
        assert status["residue"] == 0
        assert status["stored_groups"] - len(acknowledged) in (0, 1)
        assert status["pending"]["leased"] <= 1
        batch = client.call("reserve", token=token, step=0, wait_s=0.0).args["tickets"]
        tickets = [row["ticket"] for row in batch]
        assert tickets == acknowledged[:2]
        reply = client.call("fetch", token=token, tickets=tickets)
        assert (reply.args["lost"], reply.frames[:7]) == ([], encode_group(make_group(tickets[0])))
        with pytest.raises(AsyncrlError):
            client.call("reserve", token=token - 1, step=0, wait_s=0.0)


# What may come in


def refuse(store: ExperienceStore, change: dict[str, object], frames: list[bytes] | None = None) -> None:
    (grant,) = store.ledger.lease("a", 1, 1, 0.0)
    frames = frames or encode_group(
        make_group(**{"ticket": grant.ticket, "attempt": grant.attempt, **change})
    )  # type: ignore[arg-type]
    with pytest.raises(WireError):
        store.push("a", grant.ticket, grant.attempt, frames)
    ticket = store.ledger.state.tickets[grant.ticket]
    assert (ticket.state, ticket.attempt, ticket.num_failures) == (State.ISSUED, 2, 1)
    assert store.counters["malformed"] == 1


@pytest.mark.parametrize(
    "change",
    [
        {"ticket": 2},
        {"attempt": 2},
        {"version": 9},
        {"rewards": (0.0,)},
        {"rewards": (0.0, 1.0, 2.0)},
        {"rewards": (0.0, float("nan"))},
        {"num_tokens": 0},
        {"num_tokens": 1000},
    ],
    ids=str,
)
def test_a_malformed_group_fails_its_attempt(change: dict[str, object]) -> None:
    store = make_store()
    start(store)
    refuse(store, change)


@pytest.mark.parametrize("frames", [[b""], [b"\xc1"] * 7, [b"\x80"] * 7], ids=["few", "garbage", "empty map"])
def test_garbage_fails_its_attempt(frames: list[bytes]) -> None:
    store = make_store()
    start(store)
    refuse(store, {}, frames)


@pytest.mark.parametrize(
    "mask", [b"\x00" * 5, b"\x02" + b"\x01" * 4], ids=["nothing sampled", "beyond 0 and 1"]
)
def test_a_mask_without_a_sampled_token_fails_its_attempt(mask: bytes) -> None:
    store = make_store()
    start(store)
    frames = encode_group(make_group(1))
    frames[3] = mask + b"\x01" * 5
    refuse(store, {}, frames)


def test_an_empty_prompt_fails_its_attempt() -> None:
    store = make_store()
    start(store)
    frames = encode_group(make_group(1))
    frames[1] = b""
    refuse(store, {}, frames)


def test_a_group_whose_rewards_are_all_equal_is_dropped_and_its_prompt_given_up() -> None:
    store = make_store()
    start(store)
    (grant,) = store.ledger.lease("a", 1, 1, 0.0)
    assert (
        store.push("a", grant.ticket, 1, encode_group(make_group(grant.ticket, rewards=(1.0, 1.0))))
        == "dropped"
    )
    census = take_census(store.ledger.state)
    assert (census.dropped, census.given_up, store.ledger.state.held_bytes) == ({"zero_variance": 1}, 1, 0)


def test_constant_groups_are_stored_where_the_algorithm_wants_them() -> None:
    store = make_store(drops_constant_groups=False)
    start(store)
    (grant,) = store.ledger.lease("a", 1, 1, 0.0)
    assert (
        store.push("a", grant.ticket, 1, encode_group(make_group(grant.ticket, rewards=(1.0, 1.0))))
        == "stored"
    )


def test_a_record_that_the_disk_refused_half_way_harms_none_of_those_after_it(tmp_path: Path) -> None:
    folder = SegmentFolder(tmp_path)
    folder.append(1, 1, [b"a" * 1000])
    size = next(tmp_path.glob("*.segment")).stat().st_size
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 500, before[1]))  # the kernel writes half of it
    try:
        with pytest.raises(OSError, match="File too large"):
            folder.append(2, 1, [b"b" * 1000])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    folder.append(3, 1, [b"c" * 1000])
    assert folder.read(3, 1) == [b"c" * 1000]
    folder.close()
    again = SegmentFolder(tmp_path)
    assert [again.read(ticket, 1) for ticket in (1, 2, 3)] == [[b"a" * 1000], None, [b"c" * 1000]]
    assert not again.counters
    again.close()


def test_a_segment_that_cannot_be_begun_leaves_the_old_one_at_work(tmp_path: Path) -> None:
    folder = SegmentFolder(tmp_path, segment_bytes=500)
    tmp_path.joinpath("00000002.segment").write_bytes(b"")  # in the way
    with pytest.raises(FileExistsError):
        folder.append(1, 1, [b"a" * 1000])
    tmp_path.joinpath("00000002.segment").unlink()
    folder.append(2, 1, [b"b" * 1000])
    assert folder.read(1, 1) == [b"a" * 1000] and folder.read(2, 1) == [b"b" * 1000]
    folder.close()


def test_a_group_pushed_after_its_carried_work_was_found_lost_stays(tmp_path: Path) -> None:
    store = make_store(tmp_path, memory_bytes=1 << 26)
    start(store)
    (grant,) = store.ledger.lease("a", 1, 1, 0.0)
    store.store_partial("a", grant.ticket, 1, encode_group(make_group(grant.ticket, 1)))
    store.commit(0.0)
    store.ledger.lease("a", 1, 1, 0.0)
    store.commit(0.0)
    store._payloads.clear()  # as after a restart
    store.journal.release(grant.ticket)  # as if its record were damaged
    assert store.fetch_partial("a", grant.ticket, 2) is None
    assert store.push("a", grant.ticket, 2, encode_group(make_group(grant.ticket, 2))) == "stored"
    assert store.commit(0.0)
    assert store.journal.holds(grant.ticket, 2)
    store.journal.close()


def test_a_partial_rollout_that_is_damaged_while_the_buffer_is_away_is_generated_again(
    tmp_path: Path,
) -> None:
    store = make_store(tmp_path, memory_bytes=1 << 26)
    start(store)
    (grant,) = store.ledger.lease("a", 1, 1, 0.0)
    store.store_partial("a", grant.ticket, 1, encode_group(make_group(grant.ticket, 1)))
    store.commit(0.0)
    store.journal.close()
    newest_segment(tmp_path).unlink()
    again = make_store(tmp_path, memory_bytes=1 << 26)
    assert again.counters["lost_partials"] == 1
    (grant,) = again.ledger.lease("a", 1, 1, 0.0)
    assert again.fetch_partial("a", grant.ticket, grant.attempt) is None
    again.journal.close()
