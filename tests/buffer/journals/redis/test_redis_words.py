"""Obstacles of the Redis journal, refused writes and changed settings, told in Redis' own words."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from asyncrl.buffer.journals.redis.journal import LOOK_EVERY_S, RedisJournal
from asyncrl.buffer.store import ExperienceStore
from asyncrl.core.obstacle import Cause
from tests.buffer.journals.journal_parts import begin, commit, push
from tests.buffer.journals.redis.redis_parts import administer, plain_redis
from tests.buffer.parts import GROUP_SIZE, SETTINGS
from tests.runtimes import ManualRuntime


def open_store(journal: RedisJournal) -> ExperienceStore:
    return ExperienceStore(SETTINGS, journal, GROUP_SIZE, True, now=0.0)


def test_what_redis_says_later_is_told_and_logged_too(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with plain_redis(tmp_path) as url:
        administer(url, ("CONFIG", "SET", "requirepass", "first"))
        user_url, later_url = (url.replace("://", f"://:{word}@") for word in ("first", "second"))
        store = open_store(RedisJournal(lambda: user_url, "run"))
        begin(store)
        commit(store)
        administer(user_url, ("CONFIG", "SET", "requirepass", "second"))
        administer(later_url, ("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"))
        store.ledger.open("successor")
        commit_until(store, lambda: "invalid username-password pair" in store.journal.obstacles()[0].reason)
        assert len([one for one in caplog.messages if " is away (" in one]) == 2, "the broken link, and why"
        administer(later_url, ("CONFIG", "SET", "requirepass", "first"))
        commit(store)
        assert store.journal.obstacles() == []


def test_a_redis_that_became_a_replica_is_told_with_its_words(tmp_path: Path) -> None:
    words = "You can't write against a read only replica"
    with plain_redis(tmp_path) as url:
        store = open_store(RedisJournal(lambda: url, "run"))
        begin(store)
        commit(store)
        administer(url, ("REPLICAOF", "127.0.0.1", "1"))
        push(store)
        commit_until(store, lambda: words in "".join(one.reason for one in store.journal.obstacles()))
        administer(url, ("REPLICAOF", "NO", "ONE"))
        commit(store)
        assert store.journal.obstacles() == [] and store.journal.counters["redis_wiped"] == 0


def commit_until(store: ExperienceStore, claim: Callable[[], bool]) -> None:
    end = time.monotonic() + 60.0
    while store.commit(0.0) or not claim():
        assert time.monotonic() < end, store.journal.obstacles()
        time.sleep(0.01)


def test_a_redis_that_is_told_to_evict_in_mid_run_is_told_until_it_does_not(tmp_path: Path) -> None:
    policy = ("CONFIG", "SET", "maxmemory-policy")
    with plain_redis(tmp_path, "--maxmemory", "100mb", "--maxmemory-policy", "noeviction") as url:
        clock = ManualRuntime()
        journal = RedisJournal(lambda: url, "run", clock)
        administer(url, (*policy, "allkeys-lru"))
        clock.advance(LOOK_EVERY_S)
        journal.tick(0.0)
        (found,) = journal.obstacles()
        assert found.cause is Cause.JOURNAL_EVICTS and "(allkeys-lru)" in found.reason
        administer(url, (*policy, "noeviction"))
        clock.advance(LOOK_EVERY_S)
        journal.tick(0.0)
        assert journal.obstacles() == []
        journal.close()
