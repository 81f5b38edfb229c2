"""Stores, groups and a running service for the tests of the buffer."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from asyncrl.buffer.journals.file_journal import FileJournal
from asyncrl.buffer.journals.journal import Journal
from asyncrl.buffer.journals.kinds.none import MemoryJournal
from asyncrl.buffer.service import BufferService
from asyncrl.buffer.store import ExperienceStore
from asyncrl.core.experience import Group, Trajectory
from asyncrl.core.runtime.threads import ThreadEvent, ThreadRuntime
from asyncrl.core.staleness import Span
from tests.buffer.ledger.parts.ledger_runs import SETTINGS

GROUP_SIZE = 2


def make_group(
    ticket: int,
    attempt: int = 1,
    version: int = 1,
    rewards: tuple[float, ...] = (0.0, 1.0),
    num_tokens: int = 5,
) -> Group:
    trajectories = tuple(
        Trajectory(
            response_ids=np.arange(num_tokens, dtype=np.int32),
            loss_mask=np.ones(num_tokens, dtype=np.uint8),
            logprobs=np.full(num_tokens, -0.5, dtype=np.float32),
            spans=(Span(version, 0, num_tokens),) if num_tokens else (),
            reward=reward,
            finish_reason="stop",
            reward_parts={"exact_match": reward},
        )
        for reward in rewards
    )
    return Group(ticket, attempt, np.array([1, 2, 3], dtype=np.int32), trajectories)


def make_store(
    folder: Path | None = None, drops_constant_groups: bool = True, **changes: object
) -> ExperienceStore:
    """A store over a file journal in `folder`, or one that remembers nothing."""
    journal: Journal = MemoryJournal() if folder is None else FileJournal(folder)
    settings = replace(SETTINGS, **changes)
    return ExperienceStore(settings, journal, GROUP_SIZE, drops_constant_groups, now=0.0)


@contextlib.contextmanager
def serving(store: ExperienceStore, runtime: ThreadRuntime | None = None) -> Iterator[BufferService]:
    """Run the service in a thread."""
    service = BufferService(store, runtime or ThreadRuntime())
    stop = ThreadEvent()
    thread = threading.Thread(target=service.run, args=(stop,), daemon=True)
    thread.start()
    try:
        yield service
    finally:
        stop.set()
        thread.join(timeout=60.0)
        assert not thread.is_alive(), "the service did not stop"
