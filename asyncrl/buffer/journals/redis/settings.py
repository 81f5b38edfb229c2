"""Settings of a Redis that a journal depends on: it evicts no keys, and keeps an append-only file."""

from __future__ import annotations

import logging
from collections import Counter

from asyncrl.buffer.journals.redis.link import RedisLink, Refusal
from asyncrl.core.errors import ConfigError

log = logging.getLogger(__name__)

HINT = "Set its maxmemory-policy to noeviction"


def check_settings(link: RedisLink, counters: Counter[str]) -> bool:
    """Return whether Redis shows its settings; warn if its data would be lost with its process.

    Raises:
        ConfigError: It evicts keys.
    """
    try:
        facts = _read(link, "default")
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
    return _eviction_of(_read(link, "memory"))


def _read(link: RedisLink, section: str) -> dict[str, str]:
    text = link.call("INFO", section).decode()
    return dict(line.split(":", 1) for line in text.splitlines() if ":" in line)


def _eviction_of(facts: dict[str, str]) -> str:
    policy = facts.get("maxmemory_policy", "noeviction")
    return policy if facts.get("maxmemory", "0") != "0" and policy != "noeviction" else ""
