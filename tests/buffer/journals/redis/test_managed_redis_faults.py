"""The private Redis of a run is stopped, starved, damaged and robbed of its files while the journal works."""

from __future__ import annotations

import math
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from asyncrl.buffer.journals.kind import open_journal
from asyncrl.buffer.journals.redis.server import RedisServer
from asyncrl.buffer.store import ExperienceStore
from asyncrl.control.machine.processes import pids_of_run, pids_of_service
from asyncrl.control.roster import RUN_VARIABLE
from asyncrl.core.config.tree import BufferSection
from asyncrl.core.errors import ServiceFailed
from asyncrl.core.experience import encode_group
from asyncrl.core.obstacle import Cause
from asyncrl.core.service import SERVICE_VARIABLE
from tests.buffer.journals.journal_parts import begin, commit, kill, push, wipe
from tests.buffer.parts import GROUP_SIZE, SETTINGS, make_group
from tests.small_disk import fill

MANAGED = BufferSection(journal="redis", url="managed", fsync="always")
GARBAGE = b"\0garbage" * 8


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def server(run_dir: Path) -> RedisServer:
    """The run's server as another process sees it."""
    return RedisServer(run_dir / "buffer" / "redis")


@pytest.fixture
def store(run_dir: Path) -> Iterator[ExperienceStore]:
    """The store of a run with one stored group."""
    with closing(open_journal(MANAGED, run_dir)) as journal:
        store = ExperienceStore(SETTINGS, journal, GROUP_SIZE, True, now=0.0)
        begin(store)
        push(store)
        commit(store)
        yield store


def turn_until(store: ExperienceStore, claim: Callable[[], bool]) -> None:
    """Work as the buffer's commits do until `claim` holds."""
    end = time.monotonic() + 60.0
    while not claim():
        assert time.monotonic() < end, store.journal.obstacles()
        store.commit(0.0)
        store.journal.tick(0.0)
        time.sleep(0.01)


def reason(store: ExperienceStore) -> str:
    return "; ".join(one.reason for one in store.journal.obstacles() if one.cause is Cause.JOURNAL_AWAY)


def damage(server: RedisServer) -> bytes:
    """Put garbage into the middle of the append-only file; return what it was."""
    path = server._folder / "appendonly.aof"
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2] + GARBAGE + whole[len(whole) // 2 :])
    return whole


@pytest.mark.parametrize(("removed", "is_wiped"), [("", 1), ("appendonly.aof", 1), ("server.json", 0)])
def test_a_server_whose_files_were_removed_is_replaced_and_gets_all_again(
    store: ExperienceStore, server: RedisServer, run_dir: Path, removed: str, is_wiped: int
) -> None:
    pid, path = server.pid, server._folder / removed
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    turn_until(store, lambda: server.pid not in {None, pid})
    commit(store)
    assert len(store.journal.status().losses) == is_wiped
    kill(server)
    store.ledger.open("successor")
    commit(store)
    assert (store.journal.counters["redis_wiped"], store.counters["lost_payloads"]) == (is_wiped, 0)
    snapshot = store.ledger.state.as_values()
    store.journal.close()
    with closing(open_journal(MANAGED, run_dir)) as journal:
        again = ExperienceStore(SETTINGS, journal, GROUP_SIZE, True, now=0.0)
        assert again.ledger.state.as_values() == snapshot


def test_a_partial_rollout_that_was_only_in_a_wiped_redis_is_generated_again(
    store: ExperienceStore, server: RedisServer
) -> None:
    (grant,) = store.ledger.lease("a", 1, 1, 0.0)
    assert store.store_partial("a", grant.ticket, 1, encode_group(make_group(grant.ticket))) == "stored"
    commit(store)
    store._payloads.clear()  # as after a restart
    wipe(server)
    store.ledger.open("successor")
    commit(store)
    assert (store.counters["lost_partials"], store.counters["lost_payloads"]) == (1, 1)
    assert store.ledger.state.tickets[grant.ticket].partial is None


def test_a_server_that_cannot_read_its_file_says_so_until_it_can(
    store: ExperienceStore, server: RedisServer
) -> None:
    kill(server)
    whole = damage(server)
    push(store)
    turn_until(store, lambda: "Bad file format reading the append only file" in reason(store))
    (server._folder / "appendonly.aof").write_bytes(whole)
    commit(store)
    assert (reason(store), store.journal.counters["redis_wiped"]) == ("", 0)


def test_a_journal_whose_server_cannot_read_its_file_is_not_opened(
    store: ExperienceStore, server: RedisServer, run_dir: Path
) -> None:
    store.journal.close()
    damage(server)
    with pytest.raises(ServiceFailed, match=r"ends at once: .*Bad file format .*redis-check-aof"):
        open_journal(MANAGED, run_dir)


def test_a_server_that_is_stopped_is_waited_for(
    store: ExperienceStore, server: RedisServer, run_dir: Path
) -> None:
    pid = server.pid
    assert pid is not None
    known = RedisServer(run_dir / "buffer" / "redis")
    known.ensure()
    os.kill(pid, signal.SIGSTOP)
    push(store)
    turn_until(store, lambda: "Timeout" in reason(store))
    assert not store.commit(0.0)
    check = threading.Thread(target=known.ensure, kwargs={"patience_s": math.inf}, daemon=True)
    check.start()
    check.join(60.0)
    assert not check.is_alive(), "one that answered once is not waited for by the commits of the buffer"
    os.kill(pid, signal.SIGCONT)
    commit(store)
    assert (server.pid, store.journal.counters["redis_wiped"]) == (pid, 0)


def test_a_full_disk_is_waited_for(small_disk: Path) -> None:
    run_dir = small_disk / "run"
    with closing(open_journal(MANAGED, run_dir)) as journal:
        store = ExperienceStore(SETTINGS, journal, GROUP_SIZE, True, now=0.0)
        begin(store)
        commit(store)
        fill(small_disk / "ballast")
        turn_until(store, lambda: store.ledger.open("next") and "No space left" in reason(store))
        (small_disk / "ballast").unlink()
        commit(store)
        assert journal.counters["redis_wiped"] == 0


def test_a_removed_run_folder_is_not_made_again(store: ExperienceStore, run_dir: Path) -> None:
    shutil.rmtree(run_dir)
    turn_until(store, lambda: "No such file or directory" in reason(store))
    assert not run_dir.exists()


def test_a_torn_record_of_the_server_is_as_good_as_none(
    store: ExperienceStore, server: RedisServer, run_dir: Path
) -> None:
    store.journal.close()
    (server._folder / "server.json").write_text("{")
    with closing(open_journal(MANAGED, run_dir)) as journal:
        again = ExperienceStore(SETTINGS, journal, GROUP_SIZE, True, now=0.0)
        assert again.ledger.state.as_values() == store.ledger.state.as_values()


def test_the_server_is_a_process_of_the_run_and_outlives_the_buffer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(RUN_VARIABLE, "0123abcd")
    monkeypatch.setenv(SERVICE_VARIABLE, "buffer.0")
    server = RedisServer(tmp_path)
    server.ensure()
    try:
        assert server.pid in pids_of_run("0123abcd")
        assert server.pid not in pids_of_service("0123abcd", "buffer.0")
    finally:
        server.stop()
