"""The limit of processes and threads of this container, as the kernel counts them (control groups, `pids`).

Whoever is refused a process for it fails in words that name no limit: "Resource temporarily unavailable", or
"can't start new thread". The counts say that it was this one. Linux only; without control groups there is no
limit, and nothing is told.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

RECENT_S = 60.0
"""Age limit of a refusal: Ray retries to start a process, so the waiting caller notices late."""
LIMIT, USED, REFUSED = "pids.max", "pids.current", "pids.events"


@dataclass(frozen=True)
class ProcessLimit:
    """A group's limit.

    Attributes:
        file: Where it stands.
        most, used: Processes and threads that there may be, and are.
    """

    file: Path
    most: int
    used: int


def find_limit(root: Path = Path("/")) -> ProcessLimit | None:
    """Return the limit that leaves this process the fewest new ones, None if there is none.

    Args:
        root: Of the file system.
    """
    found = (_limit_of(folder) for folder in _groups(root))
    return min((one for one in found if one), key=lambda one: one.most - one.used, default=None)


class RefusedProcesses:
    """Looks at how many processes and threads were refused since this was made."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._before = self._seen = self._count()
        self._risen_at = -RECENT_S

    def look(self, now: float) -> None:
        """Take in the count of time `now`, in seconds that only rise."""
        found = self._count()
        if found > self._seen:
            self._risen_at = now
        self._seen = found

    def recent(self, now: float) -> str:
        """Return a sentence if one was refused within `RECENT_S`, else nothing."""
        return self.total() if now - self._risen_at < RECENT_S else ""

    def total(self) -> str:
        """Return a sentence if one was refused since this was made, else nothing."""
        num_refused, limit = self._count() - self._before, find_limit(self._root)
        if num_refused <= 0 or limit is None:
            return ""
        return (
            f"the kernel has refused {num_refused} times to start a process or thread: this container may "
            f"have {limit.most} ({limit.file})"
        )

    def _count(self) -> int:
        return sum(_number_in(folder / REFUSED, "max") or 0 for folder in _groups(self._root))


def _limit_of(folder: Path) -> ProcessLimit | None:
    most, used = _number_in(folder / LIMIT), _number_in(folder / USED)
    return None if most is None or used is None else ProcessLimit(folder / LIMIT, most, used)


def _groups(root: Path) -> Iterator[Path]:
    """Yield the folders of this process's group and of those above it, of either version."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for _, controllers, path in (line.split(":", 2) for line in lines if line.count(":") >= 2):
        if controllers and "pids" not in controllers.split(","):
            continue
        mount = root / "sys/fs/cgroup" / ("pids" if controllers else "")
        own = mount / path.lstrip("/")
        yield from (folder for folder in (own, *own.parents) if folder.is_relative_to(mount))


def _number_in(path: Path, name: str = "") -> int | None:
    """Return the number in a file, on the line of `name` if one is given; None if none can be read."""
    try:
        words = [line.split() for line in path.read_text().splitlines()]
        found = next((line[1:] if name else line for line in words if not name or line[:1] == [name]), [])
        return int(found[0])
    except (OSError, ValueError, IndexError):
        return None
