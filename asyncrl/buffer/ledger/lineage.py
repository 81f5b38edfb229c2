"""Step that each version number counts as, across the lineages of a run (pure).

A resume begins a new lineage. Its first steps are an ordered replay: the same groups in the same
order make the same weights, so the abandoned steps count as if they had never been abandoned. The
replay may break, when a payload is lost or another group is dropped: there the lineages fork. The lag of a
token that the old branch sampled beyond the fork is the steps back to the fork plus the steps since it.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field
from typing import NamedTuple

NO_FORK = 1 << 62


class VersionRun(NamedTuple):
    """Version numbers of one lineage, each a step later than the one before.

    Attributes:
        first: The first number; the run ends where the next one begins.
        step: Of the first number.
    """

    first: int
    lineage: int
    step: int


@dataclass
class VersionBook:
    """Version numbers, and where each lineage left the one before.

    A run that publishes after every step takes one `VersionRun` for each of its lives, however long.

    Attributes:
        runs: In the order of their numbers.
        last_number: The newest version's; numbers begin at 1.
        forks: For each lineage but the current one, the step at which its successor left it.
    """

    runs: list[VersionRun] = field(default_factory=list)
    last_number: int = 0
    forks: list[int] = field(default_factory=list)

    @property
    def lineage(self) -> int:
        return len(self.forks)

    def __contains__(self, number: int) -> bool:
        """Tell whether a version of this number was registered."""
        return 0 < number <= self.last_number

    def register(self, number: int, step: int) -> None:
        """Record a version of the current lineage; numbers rise by one."""
        assert number == self.last_number + 1, "version numbers rise by one"
        self.last_number = number
        if not self.runs or self._locate(number) != (self.lineage, step):
            self.runs.append(VersionRun(number, self.lineage, step))

    def begin_lineage(self) -> None:
        """Leave the current lineage; until `fork`, the new one replays it."""
        self.forks.append(NO_FORK)

    def fork(self, step: int) -> None:
        """Record that the weights after step index `step` differ from the abandoned lineage's."""
        if self.forks:
            self.forks[-1] = min(self.forks[-1], step)

    def step_of(self, number: int) -> int:
        """Return the step whose weights version `number` is, in its own lineage."""
        return self._locate(number)[1]

    def is_abandoned(self, number: int) -> bool:
        """Whether a resume has left the lineage that registered version `number`."""
        return self._locate(number)[0] < self.lineage

    def counted_step(self, number: int) -> int:
        """Return the step to subtract for a token of version `number`; below its own step beyond a fork."""
        lineage, step = self._locate(number)
        distance = 0
        for fork in self.forks[lineage:]:
            if step > fork:
                distance += step - fork
                step = fork
        return step - distance

    def lowest_step(self, versions: tuple[int, int]) -> int:
        """Return the lowest counted step of the numbers from `versions[0]` to `versions[1]`.

        Within a run counted steps rise up to a fork and fall beyond it, so its ends are enough.
        """
        low, high = versions
        ends = {low, high}
        for run in self.runs[self._find(low) + 1 : self._find(high) + 1]:
            ends |= {run.first - 1, run.first}
        return min(map(self.counted_step, ends))

    def _find(self, number: int) -> int:
        """Return the index of the run of version `number`."""
        if number >= self.runs[-1].first:  # nearly always
            return len(self.runs) - 1
        return bisect.bisect_right(self.runs, number, key=_first_of) - 1

    def _locate(self, number: int) -> tuple[int, int]:
        """Return lineage and step of version `number`."""
        assert number in self, f"version {number} was never registered"
        run = self.runs[self._find(number)]
        return run.lineage, run.step + number - run.first


def _first_of(run: VersionRun) -> int:
    return run.first
