"""Health of a Redis that holds a journal: its settings, the times that it is away, the data that it lost.

Owns the words in which all of that is told, and the pauses between the attempts to reach it.
"""

from __future__ import annotations

import logging
from collections import Counter, deque

from asyncrl.buffer.journals.redis.link import RedisLink, Refusal, explain_refusal
from asyncrl.core.errors import ConfigError
from asyncrl.core.obstacle import Cause, Obstacle, Tell
from asyncrl.core.runtime.interface import Runtime

log = logging.getLogger(__name__)

BACKOFF_S = (0.05, 2.0)
"""The first wait for a Redis that is away, and the longest; each is twice the one before."""
LOSSES_TOLD = 8  # the newest
HINT = "Set its maxmemory-policy to noeviction"


class RedisHealth:
    """State of one Redis as its journal sees it.

    Args:
        counters: `redis_away` and `redis_wiped` count here.
        tell: Told at once when Redis goes away, and when it is back.

    Attributes:
        next_try: Time of the next attempt to reach it, in the runtime's seconds, while it is away.
        backoff_s: The pause before the attempt after that.
        eviction: The policy by which it evicts keys, empty if it evicts none.
        losses: Its losses of data, the newest last.
    """

    def __init__(self, runtime: Runtime, counters: Counter[str], tell: Tell) -> None:
        self._runtime = runtime
        self._counters = counters
        self._tell = tell
        self._away_since: float | None = None
        self._away_reason = ""
        self._reasons_logged: set[str] = set()
        self.backoff_s = BACKOFF_S[0]
        self.next_try = 0.0
        self.eviction = ""
        self.losses: deque[str] = deque(maxlen=LOSSES_TOLD)

    @property
    def is_away(self) -> bool:
        return self._away_since is not None

    @property
    def may_try(self) -> bool:
        """Whether Redis is there, or it is time to try again."""
        return not self.is_away or self._runtime.now() >= self.next_try

    def note_away(self, label: str, error: Exception) -> None:
        """Note that it cannot be reached, or refuses commands."""
        now = self._runtime.now()
        explained = explain_refusal(label, error)
        self._away_reason = explained.message if explained else str(error) or type(error).__name__
        if self._away_since is None:
            self._away_since = now
            self._counters["redis_away"] += 1
            self._reasons_logged.clear()
        if self._away_reason not in self._reasons_logged:  # the first is often only that the link broke
            self._reasons_logged.add(self._away_reason)
            log.warning("Redis at %s is away (%s): the buffer waits for it", label, self._away_reason)
        self.next_try = now + self.backoff_s
        self.backoff_s = min(2 * self.backoff_s, BACKOFF_S[1])
        self._tell(self.obstacles(label))

    def note_back(self, label: str) -> None:
        """Note that it performs commands again."""
        self.backoff_s = BACKOFF_S[0]
        if self._away_since is not None:
            away_s = self._runtime.now() - self._away_since
            log.warning("Redis at %s is back after %.1f s", label, away_s)
            self._away_since = None
            self._tell([])

    def note_loss(self, label: str, why: str) -> None:
        """Note that it has lost acknowledged data."""
        self._counters["redis_wiped"] += 1
        loss = (
            f"Redis at {label} lost acknowledged data ({why}): the ledger and the payloads in "
            "memory are written again, groups whose payload is lost are generated again"
        )
        self.losses.append(loss)
        log.error("%s", loss)

    def obstacles(self, label: str) -> list[Obstacle]:
        """Return why the journal is away, or may lose data. Any thread may ask."""
        where = f"Redis at {label}"
        if self.is_away:
            what = f"{where} is away, and what is not journalled is not done: {self._away_reason}"
            return [Obstacle("", Cause.JOURNAL_AWAY, what)]
        what = f"{where} evicts keys when it is full ({self.eviction}), the journal's too. {HINT}"
        return [Obstacle("", Cause.JOURNAL_EVICTS, what)] if self.eviction else []


def check_settings(link: RedisLink, counters: Counter[str]) -> bool:
    """Return whether Redis shows its settings; warn if its data would be lost with its process.

    Raises:
        ConfigError: It evicts keys.
    """
    try:
        facts = _read_info(link, "default")
    except Refusal as error:
        log.warning("Redis at %s does not show its settings (%s): unchecked", link.label, error)
        return False
    if policy := _eviction_of(facts):
        raise ConfigError(f"Redis at {link.label} evicts keys when it is full ({policy})", hint=HINT)
    if facts.get("aof_enabled") == "0":
        counters["redis_without_aof"] = 1
        log.warning("Redis at %s has no append-only file: its data is lost when its process ends", link.label)
    return True


def read_eviction(link: RedisLink) -> str:
    """Return the policy by which Redis evicts keys, empty if it evicts none.

    Raises:
        Refusal: It does not say.
    """
    return _eviction_of(_read_info(link, "memory"))


def _read_info(link: RedisLink, section: str) -> dict[str, str]:
    text = link.call("INFO", section).decode()
    return dict(line.split(":", 1) for line in text.splitlines() if ":" in line)


def _eviction_of(facts: dict[str, str]) -> str:
    policy = facts.get("maxmemory_policy", "noeviction")
    return policy if facts.get("maxmemory", "0") != "0" and policy != "noeviction" else ""
