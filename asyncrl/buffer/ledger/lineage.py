"""Which step a version number counts as (pure).

A resume begins a new lineage. Its first steps are an ordered replay: the same groups in the same
order make the same weights, so the abandoned steps count as if they had never been abandoned. The
replay may break, when a payload is lost or another group is dropped: there the lineages fork, and a
token that the old branch sampled beyond the fork is as old as the way back to the fork and forth.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field

NO_FORK = 1 << 62


@dataclass
class VersionBook:
    """Version numbers, and where each lineage left the one before.

    Attributes:
        registered: number -> (lineage, step).
        forks: For each lineage but the current one, the step at which its successor left it.
        firsts: The first number of each lineage that registered one, but of the first of them.
    """

    registered: dict[int, tuple[int, int]] = field(default_factory=dict)
    forks: list[int] = field(default_factory=list)
    firsts: list[int] = field(default_factory=list)

    @property
    def lineage(self) -> int:
        return len(self.forks)

    @property
    def last_number(self) -> int:
        return len(self.registered)

    def register(self, number: int, step: int) -> None:
        """Record a version of the current lineage; numbers rise by one."""
        assert number == self.last_number + 1, "version numbers rise by one"
        if self.registered and self.registered[number - 1][0] != self.lineage:
            self.firsts.append(number)
        self.registered[number] = (self.lineage, step)

    def begin_lineage(self) -> None:
        """Leave the current lineage; until `fork`, the new one replays it."""
        self.forks.append(NO_FORK)

    def fork(self, step: int) -> None:
        """Record that the weights after step index `step` differ from the abandoned lineage's."""
        if self.forks:
            self.forks[-1] = min(self.forks[-1], step)

    def is_abandoned(self, number: int) -> bool:
        """Whether a resume has left the lineage that registered version `number`."""
        return self.registered[number][0] < self.lineage

    def counted_step(self, number: int) -> int:
        """Return the step to subtract for a token of version `number`; below its own step beyond a fork."""
        lineage, step = self.registered[number]
        distance = 0
        for fork in self.forks[lineage:]:
            if step > fork:
                distance += step - fork
                step = fork
        return step - distance

    def lowest_step(self, versions: tuple[int, int]) -> int:
        """Return the lowest counted step of the numbers from `versions[0]` to `versions[1]`.

        Within a lineage counted steps rise up to a fork and fall beyond it, so its ends are enough.
        """
        low, high = versions
        begin, end = bisect.bisect_right(self.firsts, low), bisect.bisect_right(self.firsts, high)
        ends = {low, high}
        for first in self.firsts[begin:end]:
            ends |= {first - 1, first}
        return min(map(self.counted_step, ends))
