"""The journal in Redis: events in a Stream, payloads in a hash, a snapshot of the ledger, an owner.

Owns the keys `asyncrl:{<run>}:*`. Payloads are sent as they come in; a commit is one transaction behind
them, and one round trip. The stream is trimmed by MINID once a snapshot covers it, never by length.

Fencing: `owner` names the buffer that took over last, and every transaction watches it and the last
`turn`: an older buffer's transactions fail, and so does our own that a dead connection delivers late.

Away: what was not answered is kept and sent again. Wiped: an owner that is gone, or a last commit that is
not ours, means that Redis lost acknowledged data; then everything that the ledger knows is written
again (`Need.ALL`). Invariant: `commit` returns True only when Redis has carried out every transaction and
holds every payload.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from asyncrl.buffer.journals.journal import (
    EVENTS_PER_SNAPSHOT,
    Need,
    Recovery,
    pack_commit,
    pack_snapshot,
)
from asyncrl.buffer.journals.records import read_frames
from asyncrl.buffer.journals.redis.health import RedisHealth, check_settings, read_eviction
from asyncrl.buffer.journals.redis.link import Argument, LinkDown, RedisLink, Refusal, explain_refusal
from asyncrl.buffer.journals.redis.past import FORMAT, keys_of, read_past, refuse_newer
from asyncrl.buffer.journals.redis.payloads import RedisPayloads
from asyncrl.buffer.ledger.events import Event
from asyncrl.core.errors import ConfigError, DeadlineExceeded, FencedError, ServiceFailed
from asyncrl.core.obstacle import Obstacle, Tell, tell_nobody
from asyncrl.core.runtime.faults import fault_point, is_wanted
from asyncrl.core.runtime.interface import Runtime
from asyncrl.core.runtime.threads import ThreadRuntime
from asyncrl.core.status.service import RedisJournalStatus
from asyncrl.core.wire import Frame

READ_DEADLINE_S = 20.0
LOOK_EVERY_S = 1.0
_RIGHTS_HINT = "The user needs ~asyncrl:* +@read +@write +@transaction +@connection; docs/journals.md"


class RedisJournal:
    """See the module.

    Args:
        run: Names the run among all that share the Redis.
        url: Returns where Redis is; asked before every connection, and every second. `ServiceFailed`: it
            cannot be started there now.
        connect_deadline_s: Time limit of the first connection.
        tell: Told at once when Redis goes away, and when it is back.

    Raises:
        ConfigError: Redis cannot be reached in time, refuses the user, or would evict what it holds.
    """

    def __init__(
        self,
        url: Callable[[], str],
        run: str,
        runtime: Runtime | None = None,
        events_per_snapshot: int = EVENTS_PER_SNAPSHOT,
        connect_deadline_s: float = 30.0,
        on_close: Callable[[], None] = lambda: None,
        tell: Tell = tell_nobody,
    ) -> None:
        self.counters: Counter[str] = Counter()
        self.need = Need.NOTHING
        self._url = url
        self._on_close = on_close
        self._runtime = runtime or ThreadRuntime()
        self._health = RedisHealth(self._runtime, self.counters, tell)
        self._events_per_snapshot = events_per_snapshot
        self._keys = keys_of(run)
        self._watched = (self._keys["owner"], self._keys["turn"])
        self._commit = 0
        self._sent_commit = 0
        self._num_new_events = 0
        self._backlog: list[tuple[int, bytes, str, str]] = []
        self._payloads = RedisPayloads(self._keys["payloads"])
        self._next_look = -math.inf
        self._look = ("MGET", self._keys["owner"], self._keys["turn"])
        self._link, self._owner = self._take_over(connect_deadline_s)

    # Beginning

    def _take_over(self, deadline_s: float) -> tuple[RedisLink, bytes]:
        end = self._runtime.now() + deadline_s
        while True:
            try:
                link = RedisLink(self._url())
                link.connect()
                self._shows_settings = check_settings(link, self.counters)
                owner = self._become_owner(link)
                if owner is not None:
                    self._health.note_back(link.label)
                    return link, owner
            except Refusal as error:
                raise ConfigError(f"Redis at {link.label} refuses: {error}", hint=_RIGHTS_HINT) from None
            except LinkDown as error:
                refused = explain_refusal(link.label, error)
                if refused is not None:
                    raise refused from None
                if self._runtime.now() > end:
                    raise ConfigError(
                        f"Redis at {link.label} cannot be reached within {deadline_s:g} s: {error}",
                        hint="Start it, or check buffer.url",
                    ) from None
                self._health.note_away(link.label, error)
            self._runtime.sleep(0.05)

    def _become_owner(self, link: RedisLink) -> bytes | None:
        """Write a newer owner than the last; return it, None if another buffer came in between.

        Raises:
            ConfigError: The journal is of a newer form; nothing was written.
        """
        refuse_newer(link.call, self._keys, link.label)
        link.call("WATCH", *self._watched)
        last = link.call("GET", self._keys["owner"])
        owner = f"{_rank(last) + 1}:{self._runtime.new_id()[:16]}".encode()
        link.send("MULTI")
        link.send("SET", self._keys["owner"], owner)
        link.send("SETNX", self._keys["turn"], "0")
        link.send("SET", self._keys["format"], str(FORMAT))
        is_done = link.call("EXEC") is not None
        link.call("WATCH", *self._watched)
        return owner if is_done else None

    def recover(self) -> Recovery:
        """Return the snapshot and the events after it.

        Raises:
            CheckpointError: Something is missing or damaged.
        """
        past = read_past(self._ask, self._keys, self._link.label)
        events = [event for commit in past.commits for event in commit.events]
        self._commit = self._sent_commit = past.last_commit
        self._num_new_events = len(events)
        self._payloads.begin(self._ask("HKEYS", self._keys["payloads"]))
        return Recovery(past.values, events)

    # Payloads

    def append(self, ticket: int, attempt: int, frames: Sequence[Frame]) -> None:
        """Send a payload ahead; `commit` reads Redis' answer."""
        name = self._payloads.add(ticket, attempt, _rank(self._owner), frames)
        if self._link.is_up:
            try:
                self._payloads.send(self._link, name, ticket)
            except LinkDown as error:
                self._note_away(error)

    def holds(self, ticket: int, attempt: int) -> bool:
        return self._payloads.index.find(ticket, attempt) is not None

    def read(self, ticket: int, attempt: int) -> list[bytes] | None:
        """Return a payload, None if it is not there or damaged.

        Raises:
            DeadlineExceeded: Redis was away for too long.
        """
        name = self._payloads.index.find(ticket, attempt)
        if name is None:
            return None
        record = self._payloads.unwritten(name) or self._ask("HGET", self._keys["payloads"], name)
        frames = None if record is None else read_frames(record, ticket, attempt)
        if frames is None:
            self.counters["damaged_payloads"] += 1
            self._delete([self._payloads.index.remove_attempt(ticket, attempt)])
        return frames

    def _ask(self, *command: Argument) -> Any:
        """Read something, however often Redis goes away meanwhile."""
        end = self._runtime.now() + READ_DEADLINE_S
        while True:
            try:
                self._reconnect()
                return self._link.call(*command)
            except (*LinkDown, ServiceFailed) as error:
                self._note_away(error)
            if self._runtime.now() > end:
                raise DeadlineExceeded(f"Redis at {self._link.label} was away for {READ_DEADLINE_S:g} s")
            self._runtime.sleep(self._health.backoff_s)

    def release(self, ticket: int) -> None:
        self._delete(self._payloads.index.remove(ticket))

    def is_recent(self, ticket: int) -> bool:
        return True  # each payload is a key of its own

    def _delete(self, names: Sequence[str]) -> None:
        self._payloads.delete(names, self._runtime.now())

    def keep_only(self, tickets: Collection[int]) -> None:
        for ticket in [ticket for ticket in self._payloads.index.tickets() if ticket not in tickets]:
            self.release(ticket)

    # Commits

    def commit(self, events: Sequence[Event], now: float) -> bool:
        if events:
            number = self._backlog[-1][0] + 1 if self._backlog else self._commit + 1
            self._backlog.append((number, *pack_commit(events), repr(self._runtime.wall_ns() / 1e9)))
            self._num_new_events += len(events)
            if self.need is Need.NOTHING and self._num_new_events >= self._events_per_snapshot:
                self.need = Need.SNAPSHOT
        is_idle = self._link.is_up and not self._backlog and self._payloads.are_written
        return is_idle or self._work(self._write_commits)

    def wake_at(self) -> float:
        if self._health.is_away:
            return self._health.next_try
        if self._backlog or not self._payloads.are_written or self.need is Need.ALL or not self._link.is_up:
            return -math.inf
        return min(self._payloads.delete_at, self._next_look) if self._payloads.deletions else self._next_look

    def listen(self, call: Callable[[], None]) -> None: ...

    def tick(self, now: float) -> None:
        """Delete released payloads; check whether Redis is away, back, wiped or taken over."""
        if self._payloads.deletions or not self._link.is_up:
            self._work(self._write_commits)
        elif self._runtime.now() >= self._next_look:
            self._next_look = self._runtime.now() + LOOK_EVERY_S
            self._work(self._look_around)

    def _look_around(self) -> None:
        self._url()
        self._judge(self._link.call(*self._look))
        if self._shows_settings:
            self._health.eviction = read_eviction(self._link)

    def write_snapshot(self, values: Mapping[str, object]) -> None:
        def write() -> None:
            trim = ("XTRIM", self._keys["turns"], "MINID", "=", f"{self._commit + 1}-0")
            self._write_state(values, self._commit, [trim])

        self._work(write)

    def survey(self) -> bool:
        def look() -> None:
            self._payloads.begin(self._link.call("HKEYS", self._keys["payloads"]))

        return self._work(look, is_anew=True)

    def begin_anew(self, values: Mapping[str, object]) -> bool:
        commit = max(self._commit, self._sent_commit) + len(self._backlog)

        def write() -> None:
            self._write_payloads()
            own = ("SET", self._keys["owner"], self._owner)
            self._write_state(values, commit, [own, ("DEL", self._keys["turns"])])
            self._backlog.clear()

        return self._work(write, is_anew=True)

    def _work(self, work: Callable[[], None], is_anew: bool = False) -> bool:
        """Do something with Redis; return False, and try later, if it is away or refuses."""
        if not self._health.may_try:
            return False
        try:
            self._reconnect()
            if self.need is Need.ALL and not is_anew:
                return False
            work()
        except _Lost:
            return False
        except (*LinkDown, _Refused, ServiceFailed) as error:
            self._note_away(error)
            return False
        self._health.note_back(self._link.label)
        return True

    def _write_commits(self) -> None:
        """Send unwritten commits, in one transaction behind the payloads, and read the answers."""
        self._payloads.send_rest(self._link)
        commits, deletions = self._backlog, self._payloads.deletions
        number = commits[-1][0] if commits else self._commit
        commands: list[tuple[Argument, ...]] = [
            ("XADD", self._keys["turns"], f"{row}-0", "data", data, "digest", digest, "at", at)
            for row, data, digest, at in commits
        ]
        if deletions:
            commands.append(("HDEL", self._keys["payloads"], *deletions))
        self._run_transaction(number, commands)
        self._backlog, self._payloads.deletions = [], []
        self._refuse_unwritten()  # its events are there, but no reply is sent before the payload is

    def _write_payloads(self) -> None:
        self._payloads.send_rest(self._link)
        self._link.receive()
        self._refuse_unwritten()

    def _refuse_unwritten(self) -> None:
        if not self._payloads.are_written:
            raise _Refused(self._payloads.refusal)

    def _write_state(
        self, values: Mapping[str, object], commit: int, commands: list[tuple[Argument, ...]]
    ) -> None:
        data, digest = pack_snapshot(values)
        snapshot = ("turn", str(commit), "data", data, "digest", digest)
        fault_point("buffer.snapshotting", commit)
        self._run_transaction(commit, [*commands, ("HSET", self._keys["snapshot"], *snapshot)])
        self._num_new_events, self.need = 0, Need.NOTHING
        fault_point("buffer.snapshotted", commit)

    def _run_transaction(self, commit: int, commands: list[tuple[Argument, ...]]) -> None:
        """Carry the commands out, all or none, if this buffer still is the owner; then stand at `commit`.

        Raises:
            FencedError: It is not.
            _Refused: Redis did none of them.
        """
        seen: list[Any] = []
        refusals: list[Refusal] = []

        def note_refusal(reply: object) -> None:
            if isinstance(reply, Refusal):
                refusals.append(reply)

        inner = [("SET", self._keys["turn"], str(commit)), *commands]
        everything = [("MULTI",), *inner, ("EXEC",), ("WATCH", *self._watched), self._look]
        if is_wanted("redis.half_sent", commit):
            self._link.send_half(everything)
            fault_point("redis.half_sent", commit)
        self._sent_commit = commit
        handlers = [*[note_refusal] * (len(inner) + 1), seen.append, None, seen.append]
        self._link.send_all(everything, handlers)
        fault_point("redis.sent", commit)
        self._link.receive()
        results, state = seen
        if isinstance(results, Refusal):
            raise _Refused(str(refusals[0] if refusals else results))  # why, before that it did nothing
        if results is None:
            self._judge(state)
            raise _Lost
        self._commit = commit
        if any(isinstance(result, Refusal) for result in results):
            self._note_wiped(f"it did a part of commit {commit} only: {results}")
        self._judge(state)

    # Away and back

    def _reconnect(self) -> None:
        """Connect if the link is down, and compare Redis' state with the journal's.

        Raises:
            FencedError: Another buffer has taken over.
        """
        if self._link.is_up:
            return
        self._payloads.forget_sent()
        self._link = RedisLink(self._url())
        self._link.connect()
        self._link.send("WATCH", *self._watched)
        self._judge(self._link.call(*self._look))
        self._health.note_back(self._link.label)

    def _judge(self, state: Sequence[bytes | None]) -> None:
        """Compare Redis' owner and last commit with ours."""
        owner, commit = state[0], int(state[1] or -1)
        if owner != self._owner and _rank(owner) >= _rank(self._owner):
            self._link.close()
            raise FencedError(
                f"another buffer has taken over the journal in Redis at {self._link.label}",
                hint="One buffer serves a run; stop this one",
            )
        if self.need is Need.ALL:
            return
        if owner is not None and commit == self._sent_commit and commit > self._commit:
            self._commit = commit  # it was carried out, only the answer got lost
            self._backlog = [row for row in self._backlog if row[0] > commit]
        elif owner is None or commit != self._commit:
            self._note_wiped(f"it stands after commit {commit}, {self._commit} were acknowledged")

    def _note_wiped(self, why: str) -> None:
        self.need = Need.ALL
        self._health.note_loss(self._link.label, why)

    def _note_away(self, error: Exception) -> None:
        self._health.note_away(self._link.label, error)

    def status(self) -> RedisJournalStatus:
        return RedisJournalStatus(
            is_away=self._health.is_away,
            redis=self._link.label,
            backlog=len(self._backlog),
            wiped=self.counters["redis_wiped"],
            losses=tuple(self._health.losses),
        )

    def obstacles(self) -> list[Obstacle]:
        return self._health.obstacles(self._link.label)

    def close(self) -> None:
        self._link.close()
        self._on_close()


class _Lost(Exception):
    """The transaction failed because Redis lost the run's keys; `need` says so."""


class _Refused(Exception):
    """Note that Redis answers, but refuses commands: it is full, read-only, or loading."""


def _rank(owner: bytes | None) -> int:
    """Return the number in an owner's name; 0 for none."""
    return int(owner.split(b":")[0]) if owner else 0
