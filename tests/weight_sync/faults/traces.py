"""Resources of processes, read from /proc: states, descriptors, threads, memory, segments."""

from __future__ import annotations

import os
import time
from dataclasses import astuple, dataclass
from pathlib import Path

from weight_sync.memory import segments
from weight_sync.memory.publisher_state import SUFFIX as LEGACY


@dataclass(frozen=True)
class Holdings:
    """What one process holds."""

    num_descriptors: int
    num_threads: int
    num_children: int
    resident_bytes: int


def state_of(pid: int) -> str:
    """Return the letter of a process's state, see proc(5); X if it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]
    except OSError:
        return "X"


def holdings_of(pid: int) -> Holdings:
    """Return what the process holds now."""
    tasks = Path(f"/proc/{pid}/task")
    children = [(task / "children").read_text().split() for task in tasks.iterdir()]
    status = Path(f"/proc/{pid}/status").read_text().splitlines()
    resident_kib = next(int(line.split()[1]) for line in status if line.startswith("RssAnon:"))
    return Holdings(
        num_descriptors=len(os.listdir(f"/proc/{pid}/fd")),
        num_threads=len(children),
        num_children=sum(map(len, children)),
        resident_bytes=resident_kib << 10,
    )


def descriptors_of(pid: int) -> list[str]:
    """Return what the process's descriptors stand for, sockets with their number."""
    links = []
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            links.append(os.readlink(entry))
        except OSError:  # closed meanwhile
            continue
    return sorted(links)


def settled_holdings_of(pid: int) -> Holdings:
    """Return the least that the process holds within a second: threads that are about to end do not count."""
    samples = []
    for _ in range(20):
        samples.append(holdings_of(pid))
        time.sleep(0.05)
    return Holdings(*(min(column) for column in zip(*map(astuple, samples), strict=True)))


def num_segments(shm_prefix: str, party: str) -> int:
    """Return how many segments the party has in shared memory."""
    found = segments.find(f"{shm_prefix}{party}-")
    return len([path for path in found if not path.endswith(LEGACY)])
