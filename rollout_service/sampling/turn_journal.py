"""Journal of a group's turns: what its episodes have brought about stands at the buffer before they go on.

Owns the order of one attempt's records and the calls that bring them to the buffer; episodes whose entries
come while such a call is out share the next one. Invariant: once `flush` has returned, every entry that was
noted before it is durable as the buffer's journal is, or `is_full` says that it is not. The lease is the
fencing token: an attempt that has lost it is refused, before it makes another call.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence

from asyncrl.core.errors import LedgerError, WireError
from asyncrl.core.runtime.faults import fault_point
from asyncrl.core.wire import Frame
from rollout_service.engine.protocol import Completion
from rollout_service.environments.protocol import EnvironmentFailed, Observation, Step, plain
from rollout_service.sampling import turn_records as records
from rollout_service.sampling.turn_records import AnyEntry, Forked, Said, Turn

log = logging.getLogger(__name__)

Send = Callable[[int, tuple[int, int], bytes], Awaitable[str]]
"""(number, versions, record) -> `stored`, `duplicate`, `full` or `late`."""


class LeaseLost(LedgerError):
    """Another attempt has the ticket, or the record's fate is unknown: nothing more may be done."""


class Journal:
    """The records of one attempt at a ticket, of whatever its entries are.

    Args:
        send: Adds a record at the buffer; None keeps all entries here alone.
        past: The records of earlier attempts.

    Attributes:
        is_full: The buffer has no room: nothing is recorded any more.
    """

    def __init__(self, ticket: int, attempt: int, send: Send | None, past: Sequence[Frame] = ()) -> None:
        self.ticket, self.attempt = ticket, attempt
        self.is_full = False
        self._send, self._number = send, len(past)
        self._versions: tuple[int, int] | None = None
        self._noted: list[bytes] = []
        self._lock = asyncio.Lock()
        self._is_unsure = False

    def _cover(self, spans: Iterable[tuple[int, int, int]]) -> None:
        """Take in the versions of tokens that are recorded."""
        numbers = [version for version, _, _ in spans] + list(self._versions or ())
        self._versions = min(numbers), max(numbers)

    async def flush(self) -> None:
        """Return once all that was noted is at the buffer.

        Raises:
            LeaseLost: The buffer refuses it; or an earlier call had no answer.
            AsyncrlError: It cannot be reached.
        """
        async with self._lock:
            if self._is_unsure:
                raise LeaseLost(f"ticket {self.ticket}: an earlier record of its turns had no answer")
            if self._send is None or self.is_full or not self._noted:
                return
            noted, self._noted = self._noted, []
            assert self._versions is not None, "nothing comes about before a turn is said"
            self._is_unsure = True
            result = await self._send(self._number + 1, self._versions, records.join(noted))
            if result == "late":
                raise LeaseLost(f"attempt {self.attempt} at ticket {self.ticket} has lost its lease")
            self._is_unsure = False
            self._number += 1
            self.is_full = result == "full"
            if self.is_full:
                log.warning("ticket %d: the buffer has no room for more turns", self.ticket)


class TurnJournal(Journal):
    """The journal of a group's episodes. If earlier records cannot be read, all of them begin anew."""

    def __init__(self, ticket: int, attempt: int, send: Send | None, past: Sequence[Frame] = ()) -> None:
        super().__init__(ticket, attempt, send, past)
        self._turns: dict[int, list[Turn]] = {}
        try:
            for entry in records.decode(past):
                self._take(entry)
        except WireError as error:
            log.warning("ticket %d begins anew: %s", ticket, error)
            self._turns.clear()

    def episode(self, sample: int) -> EpisodeRecord:
        """Return the record of one sample's episode."""
        key = self.ticket, self.attempt, sample
        return EpisodeRecord(key, self, self._turns.setdefault(sample, []))

    def note(self, entry: AnyEntry) -> None:
        """Take in an entry for the next `flush`. Raises EnvironmentFailed: it cannot be written."""
        try:
            self._noted.append(records.encode(entry))
        except (TypeError, ValueError, OverflowError) as error:
            raise EnvironmentFailed(f"an observation cannot be recorded: {type(error).__name__}") from error
        self._take(entry)

    def _take(self, entry: AnyEntry) -> None:
        turns = self._turns.setdefault(entry.sample, [])
        if isinstance(entry, Forked):
            turns[:] = records.forked(self._turns.get(entry.origin, ()), entry.turn)
            return
        records.add(turns, entry)
        if isinstance(entry, Said):
            self._cover(entry.spans)


class EpisodeRecord:
    """The turns of one episode: those of earlier attempts, and its own as they come.

    Args:
        key: (ticket, attempt, sample), None in an evaluation.
        journal: None keeps the turns here alone.

    Attributes:
        turns: As they are; see `turn_records.Turn`.
        environment_seed: Of a fork: that of the sample whose turns it shares.
    """

    def __init__(
        self, key: tuple[int, int, int] | None, journal: TurnJournal | None, turns: list[Turn] | None = None
    ) -> None:
        self.key = key
        self.turns: list[Turn] = [] if turns is None else turns
        self.environment_seed: int | None = None
        self._journal = journal

    @property
    def is_full(self) -> bool:
        """Whether there is a journal, and it takes nothing more."""
        return self._journal is not None and self._journal.is_full

    @property
    def place(self) -> tuple[int, int]:
        """(sample, turn) of the present turn."""
        return (self.key[2] if self.key is not None else 0), len(self.turns) - 1

    def say(self, completion: Completion, opening: Observation) -> None:
        """Note a turn of the model."""
        sample, last = self.place
        attempt = self.key[1] if self.key is not None else 0
        opened = plain(opening) if not self.turns else ""
        self.note(records.said(sample, last + 1, attempt, completion, opened))
        routed = records.routed(sample, last + 1, completion.experts)
        if routed is not None:
            self.note(routed)

    def step(self, step: Step) -> None:
        """Note the environment's answer to the present turn."""
        self.note(records.Stepped(*self.place, plain(step.observation), step.is_done))

    def note(self, entry: AnyEntry) -> None:
        """Note anything."""
        if self._journal is not None:
            self._journal.note(entry)
        else:
            assert not isinstance(entry, Forked), "only samples of a group fork"
            records.add(self.turns, entry)

    def fork(self, origin: EpisodeRecord, num_turns: int) -> None:
        """Begin with the first turns of another sample of the group, which are shared from now on."""
        assert self.key is not None and origin.key is not None, "only samples of a group fork"
        if num_turns:
            self.note(Forked(self.key[2], num_turns, origin.key[2]))

    def forget(self) -> None:
        """Begin anew: the next turn is the first, and takes the place of all that is recorded."""
        self.turns.clear()

    def pass_point(self, name: str, *place: int) -> None:
        """Pass a fault point at the present turn: its place begins with ticket, sample and turn."""
        fault_point(name, None if self.key is None else self.key[0], *self.place, *place)

    async def flush(self) -> None:
        """See `TurnJournal.flush`."""
        if self._journal is not None:
            await self._journal.flush()
