"""`buffer.journal: redis`: streams on a Redis that is there, or on a private one beside the buffer."""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from asyncrl.buffer.journals.kind import JournalKind, NewestGroups, Scan

if TYPE_CHECKING:
    from asyncrl.buffer.journals.journal import Journal
    from asyncrl.core.config.tree import BufferSection
    from asyncrl.core.obstacle import Tell
    from asyncrl.core.runtime.interface import Runtime


class RedisKind(JournalKind):
    """The journal in Redis, which keeps the newest snapshot and what came after it."""

    def check(self, section: BufferSection, run_dir: Path) -> None:
        from asyncrl.buffer.journals.redis.place import check_redis

        check_redis(section, run_dir)

    def open(self, section: BufferSection, run_dir: Path, tell: Tell, runtime: Runtime | None) -> Journal:
        from asyncrl.buffer.journals.redis.place import open_redis

        return open_redis(section, run_dir, tell, runtime)

    def scan(self, section: BufferSection, run_dir: Path, *, is_whole: bool) -> AbstractContextManager[Scan]:
        from asyncrl.buffer.journals.redis.place import scan_redis

        return scan_redis(section, run_dir)

    def newest(self, section: BufferSection, run_dir: Path) -> NewestGroups:
        from asyncrl.buffer.journals.redis.place import read_newest

        return partial(read_newest, section, run_dir)


KIND = RedisKind(keeps_past=True, takes_url=True)
