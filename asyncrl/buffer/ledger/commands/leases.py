"""Ledger commands of replicas about their leases: grants, renewals, failures, returns (pure).

Owns admission and the check of pushed groups. `Ledger` adds the commands of the learner, and states
the rules.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Sequence

from asyncrl.buffer.ledger import events as ev
from asyncrl.buffer.ledger.evaluations import EvaluationOrders
from asyncrl.buffer.ledger.orders import BLOCK, PromptOrder, Source, ticket_seed
from asyncrl.buffer.ledger.state import LedgerState
from asyncrl.buffer.ledger.tickets import (
    GIVEN_UP_LOST_LEASES,
    DropReason,
    Grant,
    LedgerSettings,
    PartialLoss,
    PartialRollout,
    Reissue,
    State,
    Ticket,
)
from asyncrl.buffer.rules.breaker import SourceBreaker
from asyncrl.buffer.rules.placement import WINDOW, Placement
from asyncrl.core.errors import DataError, LedgerError
from asyncrl.core.staleness import is_admissible, max_open_tickets
from asyncrl.core.states import FAILURES, Reason

MAX_SOURCES = 64
"""Of one run's prompts."""
MAX_HELD = 1024
"""Issued tickets of sources that get no leases; beyond it the oldest are dropped."""


class LeaseCommands:
    """Commands about leases. Each raises before it changes anything, or succeeds whole."""

    def __init__(self, settings: LedgerSettings) -> None:
        self.settings = settings
        self.max_lag = settings.max_lag
        self.state = LedgerState(settings)
        self.breaker = SourceBreaker(lambda: self.state)
        self._begin()

    def _begin(self) -> None:
        """Set up attributes that are no state: independent of the events, or derived from them."""
        self.evaluations = EvaluationOrders(self.state, self._emit)
        self._events: list[ev.Event] = []
        self._order: PromptOrder | None = None
        self._homes: dict[int, str] = {}  # of tickets with agents' sessions, the replica that had them last
        self.placement = Placement(self.settings.lease_s)
        self._judge_all_again()

    def _judge_all_again(self) -> None:
        """Forget which stored groups were found in bound: lags are others now, after a resume say."""
        self._judged_step = -1
        self._unjudged: list[int] = []

    def drain_events(self) -> list[ev.Event]:
        """Return the events since the last call; the journal must have them before anyone is answered."""
        drained, self._events = self._events, []
        return drained

    @property
    def has_news(self) -> bool:
        """Whether there are events that were not drained yet."""
        return bool(self._events)

    def _emit(self, event: ev.Event) -> None:
        self.state.apply(event)
        self._events.append(event)

    def describe_data(self, num_prompts: int, digest: str, sources: Sequence[tuple[int, float]] = ()) -> None:
        """Set the description of the data, or check that it is the same.

        Args:
            sources: (prompts, weight) of each source, if there are several.

        Raises:
            DataError: Other data than the run began with, or sources that cannot be.
        """
        state = self.state
        if num_prompts < 1:
            raise DataError("the training data holds no prompt")
        several = _check_sources(num_prompts, sources)
        if not state.num_prompts:
            self._emit(ev.DataDescribed(num_prompts, digest, several))
        elif (num_prompts, digest, several) != (state.num_prompts, state.data_digest, state.sources):
            raise DataError(
                f"the training data has {_describe(num_prompts, several)} and digest {digest}, but the run "
                f"began with {_describe(state.num_prompts, state.sources)} and digest {state.data_digest}",
                hint="Use the same data, weights, filters and curriculum everywhere, or start a new run",
            )

    def tighten(self, max_lag: int) -> None:
        """Admit under another bound from now on, at most the configured one, until the next start.

        Raises:
            LedgerError: It is not between 0 and the configured bound.
        """
        if not 0 <= max_lag <= self.settings.max_lag:
            raise LedgerError(f"a bound of {max_lag} is not between 0 and {self.settings.max_lag}")
        self.max_lag = max_lag

    def lease(self, replica: str, version: int, want: int, now: float) -> list[Grant]:
        """Grant up to `want` leases to a replica that serves `version`; oldest tickets first.

        With `shares_prefixes` it is at most its share of a step, and of the oldest those that suit its cache.

        Raises:
            DataError: The data is not described yet.
            LedgerError: The version was never registered.
        """
        if not self.state.num_prompts:
            raise DataError("no replica has described the training data yet", hint="Call describe_data first")
        served_step = self._served_step(version)
        if self.settings.shares_prefixes:
            self.placement.see(replica, now)
            want = min(want, self.placement.share(self.settings.groups_per_step))
        grants: list[Grant] = []
        while served_step is not None and len(grants) < want:
            if (found := self._admit(replica, served_step, now)) is None:
                break
            ticket, position = self._choose(replica, version, *found, served_step, now)
            is_away = self.settings.keeps_sessions and self._homes.pop(ticket.id, "") != replica
            if ticket.partial and (is_away or not _may_go_on(self.state, ticket.partial, position)):
                why = PartialLoss.LOST if is_away else PartialLoss.STALE
                self._emit(ev.PartialDropped(ticket.id, why.value))
            self._emit(ev.Leased(ticket.id, replica, now + self.settings.lease_s, position, version))
            self.breaker.note_lease(ticket.source, (ticket.id, ticket.attempt))
            grants.append(self._grant(ticket))
        return grants

    def _served_step(self, version: int) -> int | None:
        """Return the step that the replica's weights count as, None if it has loaded none yet.

        Nor has it any while it serves a lineage that a resume left: the restored weights, of an earlier step,
        are on their way, and the rest of its answers would be older than was promised.
        """
        if version and version not in self.state.versions:
            raise LedgerError(f"version {version} was never registered")
        if not version or self.state.versions.is_abandoned(version):  # restored weights come in mid-answer
            return None
        return self.state.versions.counted_step(version)

    def _admit(self, replica: str, served_step: int, now: float) -> tuple[Ticket, int] | None:
        """Apply the rules; issue a ticket if none waits. Return the next one to lease, and its position."""
        state, settings = self.state, self.settings
        first, position = state.next_positions()
        others = [number for number, home in self._homes.items() if home != replica]
        kept = [one for one in others if one in state.tickets and now < state.tickets[one].deadline]
        ticket = self.breaker.next_issued(now, kept)
        if ticket is None:
            is_let = self.breaker.may_lease_any(now) and self._may_issue()
        else:
            is_let = self._lacks_stored or not ticket.is_new  # new: issued ahead, or held for its source
            position = position if ticket.is_new else max(first, min(position, ticket.position))
        has_memory = state.memory_bytes + settings.max_group_bytes <= settings.memory_bytes
        if not (is_let and has_memory and self._is_in_bound(position, served_step)):
            return None
        return ticket or self._issue_new(position, now), position

    def _is_in_bound(self, position: int, served_step: int) -> bool:
        """Apply rule (b)."""
        return is_admissible(position, self.settings.groups_per_step, served_step, self.max_lag)

    def _choose(
        self, replica: str, version: int, oldest: Ticket, position: int, served_step: int, now: float
    ) -> tuple[Ticket, int]:
        """Return the ticket to lease, the oldest or one near it that suits the cache, and its position.

        Behind older ones that wait, it must be in bound too.
        """
        state, heap = self.state, self.state.issued_heap
        is_placed = self.settings.shares_prefixes and state.sources and oldest.is_new
        if not is_placed or self.breaker.is_open(oldest.source):  # a probe
            return oldest, position
        within = min(WINDOW, self.settings.groups_per_step)
        while len(heap) - len(self.breaker.held()) < within and self._may_issue():
            self._issue_new(position, now)  # placed when it is leased
        near = [state.tickets[number] for number in sorted(heap) if 0 <= number - oldest.id < within]
        near = [one for one in near if self.breaker.may_lease(one.source, now)]
        placed = [(one, state.next_positions(older)[1]) for older, one in enumerate(near)]
        placed = [one for one in placed if one[0].is_new and self._is_in_bound(one[1], served_step)]
        return placed[self.placement.place(replica, version, [one.source for one, _ in placed])]

    def _may_issue(self) -> bool:
        settings, state = self.settings, self.state
        limit = max_open_tickets(settings.groups_per_step, self.max_lag)
        is_room = state.num_open - len(self.breaker.held()) < min(limit, state.paced_open_tickets or limit)
        is_room = is_room or state.num_unplaced < state.num_missing
        return is_room and self._lacks_stored

    @property
    def _lacks_stored(self) -> bool:
        """Rule (c)."""
        return self.state.counts[State.STORED] < self.settings.ready_batches * self.settings.groups_per_step

    def _issue_new(self, position: int, now: float) -> Ticket:
        """Issue tickets up to one of a source that may be leased; the others are held until theirs may."""
        state, settings = self.state, self.settings
        if self._order is None:
            sources = tuple(Source(*one) for one in state.sources) or (Source(state.num_prompts),)
            self._order = PromptOrder(settings.run_seed, sources, settings.is_shuffled, settings.is_ascending)
        ticket = None
        while ticket is None or not self.breaker.may_lease(ticket.source, now):
            self._emit(ev.Issued(state.num_issued + 1, *self._order.at(state.num_drawn), position, 0, 0))
            ticket = state.tickets[state.num_issued]
        for number in self.breaker.held()[:-MAX_HELD]:
            self._emit(ev.Dropped(number, DropReason.INFRASTRUCTURE.value, True))
        return ticket

    def _grant(self, ticket: Ticket) -> Grant:
        seed = ticket_seed(self.settings.run_seed, ticket.id)
        prompt = (ticket.source, ticket.pass_number, ticket.index)
        return Grant(ticket.id, ticket.attempt, *prompt, seed, ticket.partial_attempt)

    def renew(self, replica: str, held: Sequence[tuple[int, int]], now: float) -> list[tuple[int, int]]:
        """Extend leases; return the (ticket, attempt) pairs that the replica does not hold any more."""
        self.placement.see(replica, now, asks=False)
        kept = {pair[0] for pair in held if self.holds_lease(replica, *pair)}
        lost = [pair for pair in held if not self.holds_lease(replica, *pair)]
        if kept:
            self._emit(ev.Renewed(tuple(sorted(kept)), now + self.settings.lease_s))
        return lost

    def holds_lease(self, replica: str, ticket: int, attempt: int) -> bool:
        """Tell whether this replica may push this attempt."""
        found = self.state.tickets.get(ticket)
        if found is None or found.state is not State.LEASED:
            return False
        return found.attempt == attempt and found.replica == replica

    def fail(
        self, replica: str, ticket: int, attempt: int, cause: str = "", said: str = "", now: float = 0.0
    ) -> bool:
        """Count an attempt that failed by `cause` (`messages.Fail`); return False if it is not held."""
        if not self.holds_lease(replica, ticket, attempt):
            return False
        found = self.state.tickets[ticket]
        last = DropReason(cause) if cause in FAILURES else DropReason.POISON
        if cause == Reason.INFRASTRUCTURE:
            self.breaker.fail(found.source, (ticket, attempt), said, now)
        self._give_back(found, Reissue.FAILED, last)
        return True

    def release(self, replica: str, held: Sequence[tuple[int, int]]) -> int:
        """Take back the leases that a draining replica returns; return how many it held."""
        released = [pair[0] for pair in dict.fromkeys(held) if self.holds_lease(replica, *pair)]
        for ticket in released:
            self._give_back(self.state.tickets[ticket], Reissue.RELEASED)
        return len(released)

    def keep_only(self, replica: str, held: Collection[tuple[int, int]]) -> int:
        """Take back what a replica does not know that it holds: the answer with the grant was lost.

        Args:
            held: All (ticket, attempt) pairs that the replica works on.

        Returns:
            How many were taken back.
        """
        tickets = [self.state.tickets[number] for number in sorted(self.state.leases.get(replica, ()))]
        unknown = [ticket for ticket in tickets if (ticket.id, ticket.attempt) not in held]
        for ticket in unknown:
            self._give_back(ticket, Reissue.RELEASED)
        return len(unknown)

    def deregister(self, replica: str) -> None:
        """Take back all that a replica holds; the same name may lease again."""
        self.placement.forget(replica)
        for ticket in sorted(self.state.leases.get(replica, ())):
            self._give_back(self.state.tickets[ticket], Reissue.DEREGISTERED)
        self.evaluations.free(replica)

    @property
    def next_expiry(self) -> float:
        """Time from which `expire` may have work; infinite without leases."""
        deadlines = self.state.deadlines
        return deadlines[0][0] if deadlines else math.inf

    def expire(self, now: float) -> int:
        """Take back the leases whose deadline has passed; return how many."""
        state, num_expired = self.state, 0
        while state.deadlines and state.deadlines[0][0] <= now:
            _, number, attempt = heapq.heappop(state.deadlines)
            ticket = state.tickets.get(number)
            if ticket is None or ticket.state is not State.LEASED or ticket.attempt != attempt:
                continue
            if ticket.deadline > now:
                heapq.heappush(state.deadlines, (ticket.deadline, number, attempt))
                continue
            self._give_back(ticket, Reissue.EXPIRED)
            num_expired += 1
        return num_expired

    def restart(self, now: float) -> None:
        """Give every lease a fresh deadline after the service came back.

        Leases stay: their replicas are likely alive and half way through long answers, and a lease
        whose holder is gone, or whose grant was never sent, expires one `lease_s` later.
        """
        self._emit(ev.Restarted(now + self.settings.lease_s))

    def _give_back(self, ticket: Ticket, reason: Reissue, last: DropReason = DropReason.POISON) -> None:
        limit = 1 if last is DropReason.NOT_RETRYABLE else self.settings.max_attempts
        has_failed = reason is Reissue.FAILED and ticket.num_failures + 1 >= limit
        is_lost = reason in (Reissue.EXPIRED, Reissue.DEREGISTERED)
        has_killed = is_lost and ticket.num_lost_leases + 1 >= GIVEN_UP_LOST_LEASES * limit
        if has_failed or has_killed:
            self._emit(ev.Dropped(ticket.id, last.value, True))
        else:
            if self.settings.keeps_sessions and ticket.partial and reason is not Reissue.FAILED:
                self._homes[ticket.id] = ticket.replica
            self._emit(ev.Reissued(ticket.id, reason.value))


def _may_go_on(state: LedgerState, partial: PartialRollout, position: int) -> bool:
    """Apply rule (b) to a partial rollout."""
    oldest, settings = state.versions.lowest_step(partial.versions), state.settings
    return is_admissible(position, settings.groups_per_step, oldest, settings.max_lag)


def _check_sources(num_prompts: int, sources: Sequence[tuple[int, float]]) -> tuple[tuple[int, float], ...]:
    """Return the sources where there are several. Raises DataError if they cannot be."""
    several = tuple((count, float(weight)) for count, weight in sources)
    are_right = all(count >= 1 and weight > 0 for count, weight in several)
    are_right &= math.isfinite(BLOCK * sum(weight for _, weight in several))
    is_whole = not several or sum(count for count, _ in several) == num_prompts
    if len(several) > MAX_SOURCES or not are_right or not is_whole:
        raise DataError(
            f"sources of {[count for count, _ in several][:MAX_SOURCES]} prompts do not make {num_prompts}",
            hint=f"Up to {MAX_SOURCES} sources, each with prompts and a weight over 0, of a finite sum",
        )
    return several if len(several) > 1 else ()


def _describe(num_prompts: int, sources: Sequence[tuple[int, float]]) -> str:
    parts = ", ".join(f"{count} of weight {weight:g}" for count, weight in sources)
    return f"{num_prompts} prompts ({parts})" if parts else f"{num_prompts} prompts"
