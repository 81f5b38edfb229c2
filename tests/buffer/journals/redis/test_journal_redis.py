"""Redis away, wiped, full, refusing, or taken over by another buffer."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from pathlib import Path

import pytest

from asyncrl.buffer.journals.journal import Need, pack_commit
from asyncrl.buffer.journals.redis.journal import RedisJournal
from asyncrl.buffer.journals.redis.link import RedisLink
from asyncrl.buffer.journals.redis.past import keys_of, read_living
from asyncrl.buffer.journals.redis.server import RedisServer
from asyncrl.buffer.ledger.census import take_census
from asyncrl.buffer.ledger.events import DataDescribed, Opened, VersionRegistered
from asyncrl.buffer.ledger.tickets import State
from asyncrl.buffer.service import BufferService
from asyncrl.buffer.store import ExperienceStore
from asyncrl.core.errors import CheckpointError, ConfigError, DeadlineExceeded, FencedError
from asyncrl.core.experience import encode_group
from asyncrl.core.obstacle import Cause
from asyncrl.core.rpc import Client
from asyncrl.core.runtime.threads import ThreadEvent, ThreadRuntime
from tests.buffer.journals.journal_parts import Place, begin, commit, kill, push, raw_link, wipe
from tests.buffer.journals.redis.redis_parts import Wire, administer, plain_redis, read_run
from tests.buffer.parts import GROUP_SIZE, SETTINGS, make_group, serving

RIGHTS = (
    "~asyncrl:* resetchannels -@all +ping +info +watch +multi +exec +get +mget +set +setnx +del "
    "+hset +hget +hgetall +hkeys +hdel +xadd +xrange +xtrim"
)


@pytest.fixture
def place(tmp_path: Path, own_redis: RedisServer) -> Place:
    return Place("redis", tmp_path, own_redis)


def key(place: Place, name: str) -> str:
    return f"asyncrl:{{{place.run}}}:{name}"


def open_store(journal: RedisJournal) -> ExperienceStore:
    return ExperienceStore(SETTINGS, journal, GROUP_SIZE, True, now=0.0)


def check_same_after_restart(place: Place, store: ExperienceStore) -> ExperienceStore:
    """Restart the buffer; nothing but the leases' deadlines may differ."""
    store.journal.close()
    again = place.open_store()
    for ticket in again.ledger.state.tickets.values():
        ticket.deadline = store.ledger.state.tickets[ticket.id].deadline
    assert again.ledger.state.as_values() == store.ledger.state.as_values()
    for ticket in again.ledger.state.tickets.values():
        if ticket.state in (State.STORED, State.RESERVED):
            frames = encode_group(make_group(ticket.id, ticket.attempt, ticket.versions[0]))
            assert again.journal.read(ticket.id, ticket.attempt) == frames
    return again


# Away


def test_while_redis_is_away_nothing_is_committed_and_afterwards_nothing_is_lost(
    place: Place, own_redis: RedisServer
) -> None:
    store = place.open_store()
    begin(store)
    push(store)
    commit(store)
    kill(own_redis)
    push(store)
    assert not store.commit(0.0)
    assert not store.is_committed
    assert store.journal.status().is_away is True
    store.ledger.open("successor")
    assert not store.commit(0.0)
    own_redis.ensure()
    commit(store)
    assert store.journal.status().is_away is False
    assert store.journal.counters["redis_away"] == 1
    check_same_after_restart(place, store).journal.close()


def test_leases_start_afresh_when_redis_is_back(place: Place, own_redis: RedisServer) -> None:
    store = place.open_store()
    begin(store)
    store.ledger.lease("a", 1, 1, 0.0)
    commit(store)
    kill(own_redis)
    store.ledger.open("successor")
    assert not store.commit(500.0)
    own_redis.ensure()
    while not store.commit(500.0):
        pass
    assert store.ledger.expire(500.0 + SETTINGS.lease_s - 0.1) == 0
    store.journal.close()


def test_a_turn_whose_answer_was_lost_counts_once(place: Place, own_redis: RedisServer) -> None:
    wire = Wire(own_redis.url)
    store = open_store(RedisJournal(lambda: wire.url, place.run))
    begin(store)
    commit(store)
    wire.lose_answers()
    push(store)
    assert not store.commit(0.0)
    commit(store)
    assert store.journal.counters["redis_wiped"] == 0
    check_same_after_restart(place, store).journal.close()
    wire.close()


def test_a_payload_is_read_once_redis_is_back(place: Place, own_redis: RedisServer) -> None:
    wire = Wire(own_redis.url)
    store = open_store(RedisJournal(lambda: wire.url, place.run))
    begin(store)
    ticket = push(store)
    commit(store)
    wire.lose_answers()
    assert store.journal.read(ticket, 1) == encode_group(make_group(ticket))
    store.journal.close()
    wire.close()


def test_a_service_answers_nobody_while_redis_is_away_and_goes_on_afterwards(
    place: Place, own_redis: RedisServer
) -> None:
    store = place.open_store()
    begin(store)
    commit(store)
    with serving(store) as service:
        client = Client(ThreadRuntime(), service.status().address)
        lease = {"replica": "a", "version": 1, "want": 2, "wait_s": 0.0}
        assert len(client.call("lease", **lease).args["grants"]) == 2
        kill(own_redis)
        named = {"replica": "a", "attempt": 1, "deadline_s": 0.5}
        for ticket in (1, 2):
            with pytest.raises(DeadlineExceeded):
                client.call("push", encode_group(make_group(ticket)), ticket=ticket, **named)
        assert service.status().journal.is_away is True
        own_redis.ensure()
        named["deadline_s"] = 20.0
        answers = [
            client.call("push", encode_group(make_group(ticket)), ticket=ticket, **named).args["result"]
            for ticket in (1, 2)
        ]
        assert answers == ["duplicate", "duplicate"]
        status = client.call("status").args
        assert (status["stored_groups"], status["residue"]) == (2, 0)
        assert status["reissues"] == {}
        client.close()
    again = place.open_store()
    assert again.ledger.state.counts[State.STORED] == 2
    again.journal.close()


def test_a_service_that_was_taken_over_ends_with_an_error(place: Place) -> None:
    store = place.open_store()
    begin(store)
    commit(store)
    service = BufferService(store, ThreadRuntime())
    successor = place.open_store()
    client = Client(ThreadRuntime(), service.status().address)

    def open_late() -> None:
        with contextlib.suppress(DeadlineExceeded):
            client.call("open", deadline_s=1.0, holder="late")

    thread = threading.Thread(target=open_late)
    thread.start()
    with pytest.raises(FencedError, match="another buffer has taken over"):
        service.run(ThreadEvent())
    assert service.status().state == "FAILED"
    thread.join(60.0)
    successor.journal.close()


# Full


def test_while_redis_is_full_nothing_is_committed_and_afterwards_nothing_is_lost(tmp_path: Path) -> None:
    with plain_redis(tmp_path, "--maxmemory-policy", "noeviction") as url:
        store = open_store(RedisJournal(lambda: url, "run"))
        begin(store)
        commit(store)
        administer(url, ("CONFIG", "SET", "maxmemory", "1"))
        push(store)
        assert not store.commit(0.0)
        assert not store.commit(0.0)
        (found,) = store.journal.obstacles()
        assert found.cause is Cause.JOURNAL_AWAY and "'maxmemory'" in found.reason, "Redis' own words"
        administer(url, ("CONFIG", "SET", "maxmemory", "0"))
        commit(store)
        assert store.journal.obstacles() == []
        assert store.journal.counters["redis_wiped"] == 0
        again = open_store(RedisJournal(lambda: url, "run"))
        assert again.ledger.state.counts[State.STORED] == 1
        assert again.journal.read(1, 1) == encode_group(make_group(1))


def test_a_group_whose_payload_is_refused_is_not_committed_though_its_event_is_there(tmp_path: Path) -> None:
    with plain_redis(tmp_path) as url:
        administer(url, ("ACL", "SETUSER", "buffer", "on", ">secret", *RIGHTS.split()))
        user_url = url.replace("://", "://buffer:secret@")
        store = open_store(RedisJournal(lambda: user_url, "run"))
        begin(store)
        commit(store)
        administer(url, ("ACL", "SETUSER", "buffer", "-hset"))
        push(store)
        assert not store.commit(0.0)
        administer(url, ("ACL", "SETUSER", "buffer", "+hset"))
        commit(store)
        again = open_store(RedisJournal(lambda: user_url, "run"))
        assert again.ledger.state.counts[State.STORED] == 1
        assert again.journal.read(1, 1) == encode_group(make_group(1))


def test_a_redis_that_evicts_is_refused(tmp_path: Path) -> None:
    with plain_redis(tmp_path, "--maxmemory", "100mb", "--maxmemory-policy", "allkeys-lru") as url:
        with pytest.raises(ConfigError, match="evicts keys when it is full"):
            RedisJournal(lambda: url, "run")


def test_a_redis_without_an_append_only_file_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with plain_redis(tmp_path) as url:
        RedisJournal(lambda: url, "run").close()
    assert "no append-only file" in caplog.text


# Wiped


@pytest.fixture
def filled(place: Place) -> ExperienceStore:
    """Two trained groups, two reserved ones and one stored."""
    store = place.open_store()
    token = begin(store)
    push(store), push(store)
    commit(store)
    store.ledger.reserve(token, 0, 0.0)
    store.ledger.trained(token, 0)
    store.ledger.register_version(token, 1)
    push(store), push(store)
    store.ledger.reserve(token, 1, 0.0)
    push(store)
    commit(store)
    return store


def test_a_wiped_redis_gets_ledger_and_payloads_from_memory(
    place: Place, own_redis: RedisServer, filled: ExperienceStore, caplog: pytest.LogCaptureFixture
) -> None:
    wipe(own_redis)
    filled.ledger.lease("a", 2, 1, 0.0)
    commit(filled)
    assert "lost acknowledged data" in caplog.text
    assert filled.journal.counters["redis_wiped"] == filled.journal.status().wiped == 1
    assert filled.journal.need is Need.NOTHING
    assert filled.counters["lost_payloads"] == 0
    counts = filled.ledger.state.counts
    assert (counts[State.RESERVED], counts[State.STORED], counts[State.TRAINED]) == (2, 1, 2)
    push_after = filled.push("a", 6, 1, encode_group(make_group(6)))
    commit(filled)
    assert push_after == "stored"
    again = check_same_after_restart(place, filled)
    again.resume(again.ledger.open("successor"), 0)  # the trained payloads were nowhere else
    assert again.ledger.state.reissues["lost"] == 2
    assert take_census(again.ledger.state).residue == 0
    again.journal.close()


def test_a_redis_that_goes_away_before_it_is_refilled_is_refilled_when_it_is_back(
    place: Place, own_redis: RedisServer, filled: ExperienceStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    wipe(own_redis)
    filled.journal.tick(0.0)
    assert filled.journal.need is Need.ALL
    kill(own_redis)
    with monkeypatch.context() as refilling:
        refilling.delattr(RedisJournal, "begin_anew")
        assert not filled.commit(0.0), "what it holds is not known"
    own_redis.ensure()
    commit(filled)
    assert filled.counters["lost_payloads"] == 0
    check_same_after_restart(place, filled).journal.close()


def test_an_idle_buffer_notices_that_redis_was_wiped(place: Place, filled: ExperienceStore) -> None:
    assert place.server is not None
    wipe(place.server)
    filled.journal.tick(0.0)
    assert filled.journal.need is Need.ALL
    commit(filled)
    check_same_after_restart(place, filled).journal.close()


def test_an_idle_buffer_notices_that_it_was_taken_over(place: Place, filled: ExperienceStore) -> None:
    successor = place.open()
    with pytest.raises(FencedError):
        filled.journal.tick(0.0)
    successor.close()


def test_prompts_whose_payload_was_only_in_a_wiped_redis_are_issued_again(
    place: Place, own_redis: RedisServer, filled: ExperienceStore
) -> None:
    filled.journal.close()
    store = place.open_store()
    kill(own_redis)
    for path in own_redis._folder.glob("appendonly*"):
        path.unlink()
    own_redis.ensure()  # a fresh server at the same address
    store.ledger.open("successor")
    commit(store)
    state = store.ledger.state
    assert state.reissues["lost"] == store.counters["lost_payloads"] == 3
    assert (state.counts[State.ISSUED], state.counts[State.TRAINED]) == (3, 2)
    assert take_census(state).residue == 0
    check_same_after_restart(place, store).journal.close()


def test_a_redis_that_lost_its_last_turns_gets_them_again(
    place: Place, own_redis: RedisServer, filled: ExperienceStore
) -> None:
    kill(own_redis)
    own_redis.ensure()
    with raw_link(own_redis.url) as link:  # as after a power cut
        ((last, _),) = link.call("XREVRANGE", key(place, "turns"), "+", "-", "COUNT", "1")
        link.call("XDEL", key(place, "turns"), last)
        link.call("SET", key(place, "turn"), str(int(last.split(b"-")[0]) - 1))
        link.call("HDEL", key(place, "payloads"), "5:1:1")
    filled.ledger.open("successor")
    commit(filled)
    assert filled.journal.counters["redis_wiped"] == 1
    (loss,) = filled.journal.status().losses
    assert "lost acknowledged data (it stands after commit" in loss
    assert filled.counters["lost_payloads"] == 0
    check_same_after_restart(place, filled).journal.close()


def test_wiped_while_away_and_wiped_again(
    place: Place, own_redis: RedisServer, filled: ExperienceStore
) -> None:
    kill(own_redis)
    filled.ledger.lease("a", 2, 1, 0.0)
    assert not filled.commit(0.0)
    own_redis.ensure()
    wipe(own_redis)
    commit(filled)
    wipe(own_redis)
    filled.ledger.open("successor")
    commit(filled)
    check_same_after_restart(place, filled).journal.close()


def test_a_journal_that_lacks_turns_is_refused(place: Place, own_redis: RedisServer) -> None:
    journal = place.open()
    for token in (1, 2, 3):
        journal.commit([Opened(token, "learner")], 0.0)
    journal.close()
    with raw_link(own_redis.url) as link:
        link.call("XDEL", key(place, "turns"), "2-0")
    again = place.open()
    with pytest.raises(CheckpointError, match="lacks commit 2 of 3"):
        again.recover()
    again.close()


# Taken over


def test_an_older_buffer_is_fenced_by_its_successor(place: Place) -> None:
    old = place.open_store()
    begin(old)
    push(old)
    commit(old)
    new = place.open_store()
    old.ledger.open("late")
    with pytest.raises(FencedError, match="another buffer has taken over"):
        old.commit(0.0)
    assert new.ledger.state.token == 1
    new.ledger.open("successor")
    commit(new)
    check_same_after_restart(place, new).journal.close()


def test_an_older_buffer_is_fenced_after_its_connection_was_cut(place: Place, own_redis: RedisServer) -> None:
    old = place.open_store()
    begin(old)
    commit(old)
    kill(own_redis)
    own_redis.ensure()
    new = place.open_store()
    old.ledger.open("late")
    with pytest.raises(FencedError):
        commit(old)
    new.journal.close()


def test_a_fenced_buffer_cannot_change_a_payload_of_its_successor(place: Place) -> None:
    old = place.open_store()
    begin(old)
    old.ledger.lease("a", 1, 1, 0.0)
    commit(old)
    new = place.open_store()
    assert new.push("a", 1, 1, encode_group(make_group(1, num_tokens=3))) == "stored"
    commit(new)
    old.push("a", 1, 1, encode_group(make_group(1, num_tokens=4)))
    with pytest.raises(FencedError):
        old.commit(0.0)
    new.journal.close()
    again = place.open_store()
    assert again.journal.read(1, 1) == encode_group(make_group(1, num_tokens=3))
    again.journal.close()


# Keys


def test_the_stream_is_trimmed_by_what_a_snapshot_covers(place: Place, own_redis: RedisServer) -> None:
    journal = place.open()
    with raw_link(own_redis.url) as link:
        for token in (1, 2):
            journal.commit([Opened(token, "learner")], 0.0)
        assert link.call("XLEN", key(place, "turns")) == 2
        journal.write_snapshot({})
        assert link.call("XLEN", key(place, "turns")) == 0
        journal.commit([Opened(3, "learner")], 0.0)
        assert link.call("XLEN", key(place, "turns")) == 1
    journal.close()


def test_payloads_that_are_not_needed_leave_redis(place: Place, own_redis: RedisServer) -> None:
    journal = place.open()
    for ticket in (1, 2, 3):
        journal.append(ticket, 1, [b"x"])
    journal.commit([Opened(1, "learner")], 0.0)
    journal.release(2)
    journal.tick(0.0)
    with raw_link(own_redis.url) as link:
        assert sorted(link.call("HKEYS", key(place, "payloads"))) == [b"1:1:1", b"3:1:1"]
    journal.close()


def test_two_runs_share_a_redis(own_redis: RedisServer) -> None:
    journals = [RedisJournal(lambda: own_redis.url, name) for name in ("one", "two")]
    for token, journal in enumerate(journals, 1):
        journal.append(1, 1, [bytes([token])])
        assert journal.commit([Opened(token, "learner")], 0.0)
    for token, journal in enumerate(journals, 1):
        assert journal.read(1, 1) == [bytes([token])]
        journal.close()


def test_whoever_looks_at_a_journal_takes_nothing_over(place: Place, own_redis: RedisServer) -> None:
    before = time.time()
    journal = place.open()
    journal.commit([Opened(1, "learner")], 0.0)
    past = read_run(own_redis.url, place.run)
    (commit,) = past.commits
    assert (commit.number, commit.events, past.values) == (1, [Opened(1, "learner")], None)
    assert commit.time_s is not None and before <= commit.time_s <= time.time()
    journal.write_snapshot({"any": 1})
    assert journal.commit([Opened(2, "learner")], 0.0)
    past = read_run(own_redis.url, place.run)
    assert (past.values, past.last_commit, len(past.commits)) == ({"any": 1}, 2, 1)
    journal.close()


def test_whoever_looks_while_a_snapshot_trims_the_stream_looks_again(
    place: Place, own_redis: RedisServer
) -> None:
    journal = place.open()
    for token in (1, 2):
        journal.commit([Opened(token, "learner")], 0.0)
    with raw_link(own_redis.url) as link:

        def ask(*command: str) -> object:
            if command[0] == "XRANGE" and not journal.counters["trimmed"]:
                journal.counters["trimmed"] += 1
                journal.write_snapshot({"any": 1})
                journal.commit([Opened(3, "learner")], 0.0)
            return link.call(*command)

        past = read_living(ask, keys_of(place.run), "here")
    assert (past.values, past.last_commit, len(past.commits)) == ({"any": 1}, 3, 1)
    journal.close()


def test_whoever_looks_at_a_journal_that_lacks_turns_is_not_told_to_remove_it(
    place: Place, own_redis: RedisServer
) -> None:
    journal = place.open()
    for token in (1, 2, 3):
        journal.commit([Opened(token, "learner")], 0.0)
    with raw_link(own_redis.url) as link:
        link.call("XDEL", key(place, "turns"), "2-0")
    with pytest.raises(CheckpointError, match="lacks commit 2 of 3") as caught:
        read_run(own_redis.url, place.run)
    assert "remove" not in caught.value.hint
    journal.close()


def test_whoever_looks_with_a_wrong_password_is_told_by_a_config_error(own_redis: RedisServer) -> None:
    with pytest.raises(ConfigError, match="refuses the user or the password"):
        read_run(own_redis.url.replace("asyncrl:", "asyncrl:x"), "run")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_run("redis://127.0.0.1:1/0", "run")


# Users


def test_a_user_with_the_documented_rights_is_enough(tmp_path: Path) -> None:
    with plain_redis(tmp_path) as url:
        administer(url, ("ACL", "SETUSER", "buffer", "on", ">secret", *RIGHTS.split()))
        user_url = url.replace("://", "://buffer:secret@")
        store = open_store(RedisJournal(lambda: user_url, "run", events_per_snapshot=2))
        begin(store)
        push(store)
        commit(store)
        store.journal.release(1)
        store.journal.tick(0.0)
        administer(url, ("FLUSHALL",))
        push(store)
        commit(store)
        assert store.journal.counters["redis_wiped"] == 1
        again = open_store(RedisJournal(lambda: user_url, "run"))
        assert again.ledger.state.num_issued == 2


@pytest.mark.parametrize(
    ("user", "problem"),
    [("buffer:wrong", "refuses the user or the password"), ("nothing:secret", "refuses: ")],
)
def test_a_user_that_redis_refuses_is_a_config_error_without_the_password(
    tmp_path: Path, user: str, problem: str
) -> None:
    with plain_redis(tmp_path) as url:
        administer(url, ("ACL", "SETUSER", "nothing", "on", ">secret", "-@all", "+ping"))
        with pytest.raises(ConfigError, match=problem) as caught:
            RedisJournal(lambda: url.replace("://", f"://{user}@"), "run")
    assert user.split(":")[1] not in str(caught.value)


def test_a_redis_that_is_not_there_is_a_config_error_without_the_password() -> None:
    with pytest.raises(ConfigError, match=r"cannot be reached within 0\.1 s") as caught:
        RedisJournal(lambda: "redis://user:secret@127.0.0.1:1/0", "run", connect_deadline_s=0.1)
    assert "secret" not in str(caught.value)


def test_the_password_is_in_no_log(
    place: Place, own_redis: RedisServer, filled: ExperienceStore, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    password = own_redis.url.split(":")[2].split("@")[0]
    assert len(password) > 30
    kill(own_redis)
    filled.ledger.open("successor")
    filled.commit(0.0)
    own_redis.ensure()
    wipe(own_redis)
    commit(filled)
    assert "is back" in caplog.text and password not in caplog.text
    assert password not in str(filled.journal.status())
    filled.journal.close()


def test_a_turn_that_a_dead_connection_delivers_late_is_refused(place: Place, own_redis: RedisServer) -> None:
    journal = RedisJournal(lambda: own_redis.url, "late")
    journal.recover()
    assert journal.commit([DataDescribed(5, "d")], 0.0)
    dead, keys = journal._link, journal._keys
    data, digest = pack_commit([Opened(1, "learner")])
    journal._link, journal._sent_commit = (
        RedisLink(own_redis.url),
        2,
    )  # commit 2 was given up
    assert journal.commit([Opened(1, "learner")], 0.0)
    assert journal.commit([VersionRegistered(1, 0)], 0.0)
    seen: list[object] = []
    commit = ("XADD", keys["turns"], "2-0", "data", data, "digest", digest, "at", "0")
    dead.send_all(
        [("MULTI",), ("SET", keys["turn"], "2"), commit, ("EXEC",)], [None, None, None, seen.append]
    )
    dead.receive()
    assert seen == [None]
    journal.close()
    after = RedisJournal(lambda: own_redis.url, "late")
    assert list(after.recover().events)[-1] == VersionRegistered(1, 0)
    after.close()
