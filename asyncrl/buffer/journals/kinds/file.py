"""`buffer.journal: file`: commits in SQLite and payloads in segments, in the run's folder."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from asyncrl.buffer.journals.kind import JournalKind, NewestGroups, Scan

if TYPE_CHECKING:
    from asyncrl.buffer.journals.journal import Journal
    from asyncrl.core.config.tree import BufferSection
    from asyncrl.core.obstacle import Tell
    from asyncrl.core.runtime.interface import Runtime


class FileKind(JournalKind):
    """The journal in files."""

    def open(self, section: BufferSection, run_dir: Path, tell: Tell, runtime: Runtime | None) -> Journal:
        from asyncrl.buffer.journals.file_journal import FileJournal

        return FileJournal(run_dir / "buffer", section.fsync, runtime=runtime)

    @contextlib.contextmanager
    def scan(self, section: BufferSection, run_dir: Path, *, is_whole: bool) -> Iterator[Scan]:
        from asyncrl.buffer.journals.event_database import read_commits, read_newest
        from asyncrl.buffer.journals.segment_payloads import SegmentPayloads

        folder = run_dir / "buffer"
        snapshot, commits = (None, read_commits(folder)) if is_whole else read_newest(folder)
        yield Scan(snapshot, commits, SegmentPayloads(folder / "payloads").find)

    def newest(self, section: BufferSection, run_dir: Path) -> NewestGroups:
        from asyncrl.buffer.journals.segment_payloads import SegmentPayloads

        return SegmentPayloads(run_dir / "buffer" / "payloads").newest


KIND = FileKind(keeps_past=True)
