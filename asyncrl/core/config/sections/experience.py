"""Configuration sections between rollout and learner: the bound on lag, and the experience buffer."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from asyncrl.core.config.sections.section import Count, NonNegative, Seconds, Section, refuse
from asyncrl.core.variants import JournalName


class StalenessSection(Section):
    """The bound on lag, per token, and the treatment of a token beyond it.

    `policy`: `mask` trains the rest of its group; `drop` drops the group and issues its prompt again;
    `wait` lets a step wait for groups in flight that it would push over the bound, at most `max_wait_s`.
    """

    max_lag: NonNegative = 4
    """[steps] Largest lag of a trained token; 0 is synchronous training."""
    policy: Literal["mask", "drop", "wait"] = "mask"
    """Treatment of a token beyond `max_lag`."""
    max_wait_s: Seconds = 30.0
    """[s] Longest wait of a step with `policy: wait`."""
    ready_batches: Count = 1
    """[batches] Complete batches in the buffer at which no more prompts are leased."""


REDIS_URL = re.compile(r"(rediss?://.+|\$\{[A-Za-z_][A-Za-z0-9_]*\})")
MANAGED = "managed"
"""Stands for the URL of a private server."""


def check_url(url: str | None) -> str | None:
    """Raise ValueError unless `url` can name a Redis."""
    if url is None or url == MANAGED or REDIS_URL.fullmatch(url):
        return url
    raise refuse(
        "a Redis URL, ${NAME}, or managed",
        "Write redis://user:${PASSWORD}@host:6379/0, rediss:// for TLS, or managed for a private server",
    )


class BufferSection(Section):
    """The experience buffer.

    `journal: redis` needs a `url`, in which `${NAME}` is replaced from the environment; `url: managed`
    starts a private server beside the buffer. `fsync` applies to files and to the private server; other
    servers have their own setting.
    """

    journal: JournalName = "file"
    """The durable log of groups and events."""
    url: Annotated[str | None, AfterValidator(check_url)] = None
    """The Redis of `journal: redis`. For example: managed,
    "rediss://buffer:${REDIS_PASSWORD}@redis.example:6379/0"
    """
    fsync: Literal["everysec", "always", "never"] = "everysec"
    """Times at which the journal is synced to disk."""
    memory_bytes: Annotated[int, Field(ge=1 << 20)] = 1 << 30
    """[bytes] Most memory of groups that are stored and not yet trained."""
    lease_s: Seconds = 60.0
    """[s] Time after which a lease that was not renewed expires."""
    max_attempts: Count = 3
    """[attempts] Attempts at a group before it is given up, or trained masked if it was only too old."""

    @property
    def redis_url(self) -> str | None:
        """The URL of a Redis that is there; None where the buffer starts one."""
        return None if self.url == MANAGED else self.url
