"""The played disk of the journal: what a power cut leaves, and what a disk that is away takes."""

from __future__ import annotations

import random

from asyncrl.buffer.ledger.events import Opened, VersionRegistered
from tests.simulation.parts.journal import Disk, SimulatedJournal


def journal_on(disk: Disk, *, is_always_synced: bool) -> SimulatedJournal:
    return SimulatedJournal(disk, is_always_synced=is_always_synced, events_per_snapshot=100)


def test_a_power_cut_leaves_what_was_synced_and_a_killed_process_everything() -> None:
    disk = Disk()
    journal = journal_on(disk, is_always_synced=False)
    journal.append(1, 1, [b"old"])
    journal.commit([Opened(1, "a")], 0.0)
    journal.tick(0.0)
    journal.append(2, 1, [b"new"])
    journal.commit([VersionRegistered(1, 0)], 0.5)
    again = journal_on(disk, is_always_synced=False)
    assert list(again.recover().events) == [Opened(1, "a"), VersionRegistered(1, 0)]
    assert again.read(2, 1) == [b"new"]
    kept = set()
    for seed in range(20):
        copy = Disk(list(disk.turns), [], dict(disk.payloads), disk.num_synced, set(disk.synced))
        copy.cut_power(random.Random(seed))
        assert (1, 1) in copy.payloads
        kept.add((len(copy.turns), (2, 1) in copy.payloads))
    assert kept == {(1, False), (1, True), (2, False), (2, True)}


def test_a_journal_that_is_away_makes_nothing_durable_until_it_is_back() -> None:
    disk = Disk(is_away=True)
    journal = journal_on(disk, is_always_synced=True)
    assert not journal.commit([Opened(1, "a")], 0.0)
    assert disk.turns == []
    disk.is_away = False
    assert journal.commit([], 1.0)
    assert len(disk.turns) == 1
