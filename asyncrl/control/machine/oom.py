"""The kernel's counts of processes that it has killed for want of memory, here and on the whole machine.

What a service died of that was killed without a word can only be guessed from them: a count that has risen a
moment ago says that something was killed so, not what.
"""

from __future__ import annotations

from pathlib import Path

RECENT_S = 60.0
"""Age limit of a kill: an engine may notice late that its core was killed."""
OWN, MACHINE = "its container", "this machine"


class OomKills:
    """Looks at the counts; `recent` says in a sentence whether one has risen.

    Args:
        root: Of the file system.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._seen = self._read()
        self._risen: dict[str, float] = {}

    def look(self, now: float) -> None:
        """Take in the counts of time `now`, in seconds that only rise."""
        found = self._read()
        self._risen |= {where: now for where, count in found.items() if count > self._seen.get(where, count)}
        self._seen = found

    def recent(self, now: float) -> str:
        """Return a sentence if a process was killed within `RECENT_S`, else nothing."""
        for where in (OWN, MACHINE):
            if now - self._risen.get(where, -RECENT_S) < RECENT_S:
                return f"the kernel has just killed a process of {where} for want of memory (oom_kill)"
        return ""

    def _read(self) -> dict[str, int]:
        counts = {MACHINE: _count_in(self._root / "proc/vmstat")}
        counts[OWN] = next(
            (count for path in self._of_group() if (count := _count_in(path)) is not None), None
        )
        return {where: count for where, count in counts.items() if count is not None}

    def _of_group(self) -> list[Path]:
        """Return where the counts of this process's control group may be, of either version."""
        try:
            lines = (self._root / "proc/self/cgroup").read_text().splitlines()
        except OSError:
            return []
        found, mount = [], self._root / "sys/fs/cgroup"
        for _, controllers, path in (line.split(":", 2) for line in lines if line.count(":") >= 2):
            if not controllers:
                found += [mount / path.lstrip("/") / "memory.events", mount / "memory.events"]
            elif "memory" in controllers.split(","):
                name = "memory.oom_control"
                found += [mount / "memory" / path.lstrip("/") / name, mount / "memory" / name]
        return found


def _count_in(path: Path) -> int | None:
    """Return the number on the line `oom_kill` of a file, None if there is none to be read."""
    try:
        words = (line.split() for line in path.read_text().splitlines())
        return next((int(line[1]) for line in words if line[:1] == ["oom_kill"]), None)
    except (OSError, ValueError, IndexError):
        return None
