"""Ledger commands of replicas about their results: whole groups, partial rollouts, finished turns (pure).

Each raises before it changes anything, or succeeds whole.
"""

from __future__ import annotations

from collections.abc import Collection

from asyncrl.buffer.ledger import events as ev
from asyncrl.buffer.ledger.commands.leases import LeaseCommands
from asyncrl.buffer.ledger.state import LedgerState
from asyncrl.buffer.ledger.tickets import (
    PAYLOAD_STATES,
    DropReason,
    PartialLoss,
    Reissue,
    State,
    Ticket,
    with_record,
)
from asyncrl.core.errors import LedgerError

MAX_RECORDS = 1 << 16
"""Of the turns of one ticket's samples."""


class ReplicaCommands(LeaseCommands):
    """All commands of replicas."""

    def judge_push(self, replica: str, ticket: int, attempt: int) -> str:
        """Return `accepted`, `duplicate` (this attempt was stored before) or `late` (it lost its lease).

        Raises:
            LedgerError: The ticket was never issued, or this attempt of it was never leased.
        """
        if self.holds_lease(replica, ticket, attempt):
            return "accepted"
        if not 1 <= ticket <= self.state.num_issued:
            raise LedgerError(f"ticket {ticket} was never issued")
        found = self.state.tickets.get(ticket)
        if found is None:
            return "late"
        if attempt > found.attempt or (attempt == found.attempt and found.state is State.ISSUED):
            raise LedgerError(f"attempt {attempt} at ticket {ticket} was never leased")
        is_duplicate = attempt == found.attempt and found.state in PAYLOAD_STATES
        return "duplicate" if is_duplicate else "late"

    def take_in(
        self,
        ticket: int,
        num_tokens: int,
        num_bytes: int,
        numbers: Collection[int],
        *,
        is_masked: bool = False,
        has_zero_variance: bool = False,
    ) -> str:
        """Store an accepted group, or drop one that would train nothing; return `stored` or `dropped`.

        Args:
            numbers: Of the versions that sampled it. is_masked: No token of it may be trained.
            has_zero_variance: All of its rewards are equal, and such groups are not wanted.

        Raises:
            LedgerError: As `store`.
        """
        self.breaker.succeed(_check_leased(self.state, ticket).source)
        if is_masked:
            self.drop_masked(ticket)
        elif has_zero_variance:
            self.drop_zero_variance(ticket)
        else:
            self.store(ticket, num_tokens, num_bytes, (min(numbers), max(numbers)))
            return "stored"
        return "dropped"

    def store(self, ticket: int, num_tokens: int, num_bytes: int, versions: tuple[int, int]) -> None:
        """Store an accepted group; `versions` are the lowest and the highest number that sampled it.

        Raises:
            LedgerError: The ticket is not leased, or a version was never registered.
        """
        _check_leased(self.state, ticket)
        _check_payload(self.state, num_bytes, versions)
        self._emit(ev.Stored(ticket, num_tokens, num_bytes, versions))
        if self.settings.policy == "drop":
            self._unjudged.append(ticket)

    def store_partial(
        self,
        replica: str,
        ticket: int,
        attempt: int,
        num_tokens: int,
        num_bytes: int,
        versions: tuple[int, int],
    ) -> str:
        """Take back a lease with the work done so far, which the ticket's next attempt may go on from.

        Returns:
            `stored`; `released`, if it finds no room beside the whole groups; or `late`.

        Raises:
            LedgerError: A version was never registered.
        """
        if not self.holds_lease(replica, ticket, attempt):
            return "late"
        _check_payload(self.state, num_bytes, versions)
        found = self.state.tickets[ticket]
        if not _has_room(self.state, found, num_bytes):
            self._give_back(found, Reissue.RELEASED)
            return "released"
        self._emit(ev.PartialStored(ticket, num_tokens, num_bytes, versions))
        return "stored"

    def store_turns(
        self, replica: str, ticket: int, attempt: int, number: int, num_bytes: int, versions: tuple[int, int]
    ) -> str:
        """Keep one more record of the turns that a leased attempt has finished, for those after it.

        Returns:
            `stored`; `duplicate`, if it is there; `full`, if it finds no room; or `late`.

        Raises:
            LedgerError: A version was never registered, or the record does not follow the last one.
        """
        if not self.holds_lease(replica, ticket, attempt):
            return "late"
        found = self.state.tickets[ticket]
        num_records = found.partial.num_records if found.partial is not None else 0
        if number <= num_records and found.partial_attempt == attempt:
            return "duplicate"
        if number != num_records + 1:
            raise LedgerError(f"record {number} of ticket {ticket} does not follow record {num_records}")
        whole = with_record(found, number, num_bytes, versions).num_bytes
        is_too_much = number > MAX_RECORDS or whole > self.settings.max_group_bytes
        is_too_much |= self.state.memory_bytes + num_bytes > self.settings.memory_bytes
        if is_too_much or not _has_room(self.state, found, whole):
            return "full"
        _check_payload(self.state, num_bytes, versions)
        self._emit(ev.TurnsStored(ticket, number, num_bytes, versions))
        return "stored"

    def lose_partial(self, ticket: int) -> None:
        """Forget a partial rollout whose payload is missing or damaged: the ticket starts from its prompt."""
        found = self.state.tickets.get(ticket)
        if found is None or found.partial is None:
            raise LedgerError(f"ticket {ticket} has no partial rollout")
        self._emit(ev.PartialDropped(ticket, PartialLoss.LOST.value))

    def drop_zero_variance(self, ticket: int) -> None:
        """Drop an accepted group whose rewards are all equal; its prompt is given up."""
        _check_leased(self.state, ticket)
        self._emit(ev.Dropped(ticket, DropReason.ZERO_VARIANCE.value, True))

    def drop_masked(self, ticket: int) -> None:
        """Drop an accepted group of which no token may be trained; its prompt is given up."""
        _check_leased(self.state, ticket)
        self._emit(ev.Dropped(ticket, DropReason.MASKED.value, True))

    def lose_payload(self, ticket: int) -> None:
        """Issue a stored or reserved ticket again, because its payload is missing or damaged."""
        found = self.state.tickets.get(ticket)
        if found is None or found.state not in (State.STORED, State.RESERVED):
            raise LedgerError(f"ticket {ticket} is neither stored nor reserved: it has no payload to lose")
        self._emit(ev.Reissued(ticket, Reissue.LOST.value))
        self._judge_all_again()


def _check_leased(state: LedgerState, ticket: int) -> Ticket:
    found = state.tickets.get(ticket)
    if found is None or found.state is not State.LEASED:
        raise LedgerError(f"ticket {ticket} is not leased")
    return found


def _check_payload(state: LedgerState, num_bytes: int, versions: tuple[int, int]) -> None:
    assert num_bytes <= state.settings.max_group_bytes, "checked where groups come in"
    for number in versions:
        if number not in state.versions:
            raise LedgerError(f"version {number} was never registered")


def _has_room(state: LedgerState, ticket: Ticket, num_bytes: int) -> bool:
    """Tell whether a partial rollout, in place of the ticket's present one, fits beside whole groups."""
    before, settings = ticket.partial, state.settings
    others = state.partial_bytes - (before.num_bytes if before is not None else 0)
    return others + num_bytes <= settings.memory_bytes - settings.needed_bytes
