"""Kernel of this machine, for the reconciler: processes that were stopped, killed or left, and memory.

Invariant: the reconciler learns of processes from the launcher and this module only, so that a simulated
kernel can replace it.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from asyncrl.control.machine import processes
from asyncrl.control.machine.oom import OomKills
from asyncrl.control.machine.process_limit import RefusedProcesses


class Kernel(Protocol):
    """The processes of one run on this machine."""

    def look(self, now: float) -> None:
        """Take in the kernel's counts of time `now`, in seconds that only rise."""

    def recent(self, now: float) -> str:
        """Return why a process may have died or not begun a moment ago, empty if the kernel says nothing."""

    def stopped_services(self, run_id: str) -> set[str]:
        """Return the services of which a process is stopped, with SIGSTOP or by a debugger."""

    def end_service(self, run_id: str, name: str, others: Collection[int]) -> list[int]:
        """Kill the remaining processes of a service, and of `others`; return those that are still alive."""

    def remove_segments(self, run_id: str, name: str) -> None:
        """Remove the shared memory that a service was killed with."""


class LinuxKernel:
    """The kernel, by `/proc`, the control groups and `/dev/shm`."""

    def __init__(self) -> None:
        self.oom_kills, self.refused = OomKills(), RefusedProcesses()

    def look(self, now: float) -> None:
        self.oom_kills.look(now)
        self.refused.look(now)

    def recent(self, now: float) -> str:
        return "; ".join(filter(None, (self.oom_kills.recent(now), self.refused.recent(now))))

    def stopped_services(self, run_id: str) -> set[str]:
        return processes.stopped_services(run_id)

    def end_service(self, run_id: str, name: str, others: Collection[int]) -> list[int]:
        return processes.end_service(run_id, name, others)

    def remove_segments(self, run_id: str, name: str) -> None:
        processes.remove_segments(run_id, name)
