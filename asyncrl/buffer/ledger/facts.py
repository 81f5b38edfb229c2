"""The facts that the ledger's events determine, and the indexes that follow from them (pure).

Owns the fields and their first values. Must never change them: events do (`ledger.state`), and a snapshot
that is read (`ledger.snapshot`).
"""

from __future__ import annotations

import bisect
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import NamedTuple

from asyncrl.buffer.ledger.tickets import Checkpoint, Evaluation, LedgerSettings, State, Ticket

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

    A run that publishes after every step takes one `VersionRun` for each of its starts, however long.

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
        """Return the step of version `number`'s weights, in its own lineage."""
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


class Facts:
    """State of the ledger.

    Attributes:
        counts, dropped_reasons, num_given_up: Kept with each event, and in no snapshot: they follow from the
            tickets and from those folded away.
        sources: (prompts, weight) of each source of prompts, empty for a single one.
        tickets: Every ticket that is not yet folded into the `folded_*` counters.
        issued_heap: Ids of ISSUED tickets, oldest first. stored: Ids of STORED ones.
        leases: Ids of LEASED tickets, by replica.
        leased_by_version: Under policy `wait`, ids of LEASED tickets by `Ticket.version`.
        deadlines: (deadline, ticket, attempt) of leases, a heap; entries of ended leases are skipped.
        by_step: Tickets reserved or trained, by step, in the order in which they were reserved.
        parts: Ids that one event reserved, by step, where its batch was not reserved at once.
        paced_open_tickets: Limit of open tickets while a step trains; 0 for none.
        replay_sizes: Number of groups of each step that a resume rewound.
        held_bytes, partial_bytes: Bytes of payloads that count against memory; of partial rollouts alone.
        floor_step: Steps below it are folded; no resume goes there.
        refused_steps: Trained steps some of whose groups were dropped: a replay cuts the others into other
            minibatches, and makes other weights.
        note: The note of the last resume that had one.
        freed, released: Tickets whose payload left memory, or is not needed any more at all; the
            store drains both.
    """

    def __init__(self, settings: LedgerSettings) -> None:
        self.settings = settings
        self.num_prompts = 0
        self.data_digest = ""
        self.sources: tuple[tuple[int, float], ...] = ()
        self.token = 0
        self.holder = ""
        self.is_resumed = False
        self.versions = VersionBook()
        self.tickets: dict[int, Ticket] = {}
        self.num_issued = 0
        self.num_drawn = 0
        self.counts = dict.fromkeys(State, 0)
        self.issued_heap: list[int] = []
        self.stored: set[int] = set()
        self.leased_by_version: dict[int, set[int]] = {}
        self.leases: dict[str, set[int]] = {}
        self.deadlines: list[tuple[float, int, int]] = []
        self.by_step: dict[int, list[Ticket]] = {}
        self.parts: dict[int, list[tuple[int, ...]]] = {}
        self.replay_sizes: dict[int, int] = {}
        self.steps_trained = 0
        self.paced_open_tickets = 0
        self.acked_steps = 0
        self.last_reserved = -1
        self.floor_step = 0
        self.refused_steps: set[int] = set()
        self.note: dict[str, float] = {}
        self.checkpoints: dict[int, Checkpoint] = {}
        self.held_bytes = 0
        self.held_tokens = 0
        self.partial_bytes = 0
        self.dropped: deque[Ticket] = deque()
        self.dropped_reasons: Counter[str] = Counter()
        self.num_given_up = 0
        self.folded_trained = 0
        self.folded_given_up = 0
        self.folded_dropped: Counter[str] = Counter()
        self.reissues: Counter[str] = Counter()
        self.num_evaluations = 0
        self.evaluations: dict[int, Evaluation] = {}
        self.freed: list[int] = []
        self.released: list[int] = []
