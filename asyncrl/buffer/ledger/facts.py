"""The facts that the ledger's events determine, and the indexes that follow from them (pure).

Owns the fields and their first values. Must never change them: events do (`ledger.state`), and a snapshot
that is read (`ledger.snapshot`).
"""

from __future__ import annotations

from collections import Counter, deque

from asyncrl.buffer.ledger.lineage import VersionBook
from asyncrl.buffer.ledger.tickets import Checkpoint, Evaluation, LedgerSettings, State, Ticket


class Facts:
    """All that the ledger knows.

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
        paced_open_tickets: While a step trains, how many tickets may be open; 0 for no such limit.
        replay_sizes: How many groups a step that a resume rewound had.
        held_bytes, carry_bytes: Bytes of payloads that count against memory; of carried work alone.
        floor_step: Steps below it are folded; no resume goes there.
        refused_steps: Trained steps some of whose groups were dropped: a replay cuts the others into other
            minibatches, and makes other weights.
        note: What the last resume with a note said.
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
        self.carry_bytes = 0
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
