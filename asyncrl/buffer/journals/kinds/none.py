"""`buffer.journal: none`: nothing is kept. The buffer's death is the run's."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from asyncrl.buffer.journals.journal import Need, Recovery
from asyncrl.buffer.journals.kind import JournalKind, Scan
from asyncrl.buffer.ledger.events import Event
from asyncrl.core.config.tree import BufferSection
from asyncrl.core.errors import ConfigError
from asyncrl.core.obstacle import Obstacle, Tell
from asyncrl.core.runtime.interface import Runtime
from asyncrl.core.status.service import JournalStatus
from asyncrl.core.wire import Frame


class MemoryJournal:
    """Remembers nothing."""

    need = Need.NOTHING

    def __init__(self) -> None:
        self.counters: Counter[str] = Counter()

    def recover(self) -> Recovery:
        return Recovery(None, ())

    def append(self, ticket: int, attempt: int, frames: Sequence[Frame]) -> None:
        pass

    def holds(self, ticket: int, attempt: int) -> bool:
        return False

    def read(self, ticket: int, attempt: int) -> list[bytes] | None:
        return None

    def release(self, ticket: int) -> None:
        pass

    def is_recent(self, ticket: int) -> bool:
        return True

    def keep_only(self, tickets: Collection[int]) -> None:
        pass

    def commit(self, events: Sequence[Event], now: float) -> bool:
        return True

    def write_snapshot(self, values: Mapping[str, object]) -> None:
        pass

    def survey(self) -> bool:
        return True

    def begin_anew(self, values: Mapping[str, object]) -> bool:
        return True

    def wake_at(self) -> float:
        return math.inf

    def listen(self, call: Callable[[], None]) -> None:
        pass

    def tick(self, now: float) -> None:
        pass

    def status(self) -> JournalStatus:
        return JournalStatus()

    def obstacles(self) -> list[Obstacle]:
        return []

    def close(self) -> None:
        pass


class NoneKind(JournalKind):
    """No journal."""

    def open(
        self, section: BufferSection, run_dir: Path, tell: Tell, runtime: Runtime | None
    ) -> MemoryJournal:
        return MemoryJournal()

    def scan(self, section: BufferSection, run_dir: Path, *, is_whole: bool) -> AbstractContextManager[Scan]:
        raise ConfigError(f"run '{run_dir.name}' keeps no journal (buffer.journal: none)")


KIND = NoneKind(keeps_past=False)
