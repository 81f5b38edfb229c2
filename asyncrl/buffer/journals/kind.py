"""Contract of a kind of journal: its facts, opening it for the buffer, and reading its past.

Owns the lookup by name. A kind is one module of `kinds`, and nothing else names it. Reading changes nothing,
and a buffer may be at work on the journal meanwhile: what is read is what was committed when reading began.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from asyncrl.core.obstacle import Tell, tell_nobody
from asyncrl.core.variants import JOURNALS, JournalFacts, journal_facts
from asyncrl.core.wire import Frame

if TYPE_CHECKING:
    from asyncrl.buffer.journals.journal import Commit, Journal
    from asyncrl.core.config.tree import BufferSection
    from asyncrl.core.experience import Group
    from asyncrl.core.runtime.interface import Runtime

PayloadKey = tuple[int, int]
"""A ticket and an attempt."""
FindPayloads = Callable[[Collection[PayloadKey]], Mapping[PayloadKey, Sequence[Frame]]]
"""Lookup of payloads: the frames of those that are stored and undamaged."""
NewestGroups: TypeAlias = "Callable[[], list[Group]]"
"""Reader of the newest stored groups, the newest first. A second call reads what is new."""
NUM_NEWEST = 6


@dataclass(frozen=True)
class Scan:
    """Committed contents of a journal.

    Attributes:
        snapshot: Of the ledger before the first of the commits; None if they begin with the run.
        commits: All commits after it, in order.
        find_payloads: Of use while the scan is open.
    """

    snapshot: Mapping[str, object] | None
    commits: Sequence[Commit]
    find_payloads: FindPayloads


class JournalKind(JournalFacts, ABC):
    """One value of `buffer.journal`. `section` is the run's buffer section, `run_dir` the run's folder."""

    def check(self, section: BufferSection, run_dir: Path) -> None:
        """Check that the journal can be used from here, now. Raises ConfigError if it cannot."""

    @abstractmethod
    def open(self, section: BufferSection, run_dir: Path, tell: Tell, runtime: Runtime | None) -> Journal:
        """Open the journal for the one buffer that writes there, see `open_journal`."""

    @abstractmethod
    def scan(self, section: BufferSection, run_dir: Path, *, is_whole: bool) -> AbstractContextManager[Scan]:
        """Read the past.

        Args:
            is_whole: From the beginning, where the journal has kept it; otherwise from its newest snapshot.

        Raises:
            ConfigError: It keeps none, or cannot be reached.
            CheckpointError: It is damaged.
        """

    def newest(self, section: BufferSection, run_dir: Path) -> NewestGroups | None:
        """Return a reader of the newest groups, None if there are none. It raises as `scan`."""
        return None


def journal_kind(name: str) -> JournalKind:
    """Return the kind that `buffer.journal` names."""
    found = journal_facts(name)
    assert isinstance(found, JournalKind), f"{JOURNALS}.{name} is one"
    return found


def open_journal(
    section: BufferSection, run_dir: Path, tell: Tell = tell_nobody, runtime: Runtime | None = None
) -> Journal:
    """Open the journal of the run in `run_dir`.

    Args:
        tell: Called with the obstacles that the opening waits for.
        runtime: Of the process; a reader needs none.

    Raises:
        ConfigError: It cannot be opened or reached.
    """
    return journal_kind(section.journal).open(section, run_dir.absolute(), tell, runtime)
