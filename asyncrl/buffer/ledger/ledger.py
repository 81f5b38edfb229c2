"""The ledger: who may generate what, what is trained when, and what became of every prompt (pure).

Owns the rules. Time and facts come in as arguments, events come out of `drain_events`; there is no
clock, no I/O and no logging. A command checks, then emits events; `LedgerState.apply` is the only
thing that changes state, so `replay` of the events makes the same ledger.

    ISSUED -> LEASED -> STORED -> RESERVED(step) -> TRAINED(step) -> ACKED        any open one -> DROPPED
    LEASED -> ISSUED   expired, retired, released, failed, revoked: the next attempt, same prompt
    STORED, RESERVED -> ISSUED   its payload is lost
    RESERVED, TRAINED, ACKED from step s on -> RESERVED   resume at s: same steps, same order

Position. A ticket's position is the number of groups that go before it: those that the trained steps
used up, and the open ones. A step uses up `groups_per_step` places also where some of its groups
were dropped as stale. A ticket that is leased again keeps its position, but moves forward if older
ones were dropped, and is never placed before the next step, which is its turn if it is late.

Admission. (a) open tickets stay below `(max_lag + 1) * groups_per_step`; (b) the position is within
`max_lag` of the version that the replica serves; (c) fewer than `ready_batches` batches are stored;
(d) the largest group fits in memory. (a) and (c) gate new tickets only.

Liveness. Nobody waits for ever: if a batch is complete, the learner goes on. Otherwise fewer than a
batch is stored, so (c) is open. If something is leased, it is pushed or expires. If nothing is, fewer
than a batch goes before the oldest ISSUED ticket, so (b) holds at the newest version; with none
ISSUED, fewer than a batch is open, so (a) and (b) hold for a new one. Memory holds two batches of the
largest groups, at most one of them reserved, so (d) holds.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Mapping, Sequence

from asyncrl.buffer.ledger import events as ev
from asyncrl.buffer.ledger.evaluations import EvaluationOrders
from asyncrl.buffer.ledger.orders import PromptOrder, ticket_seed
from asyncrl.buffer.ledger.state import LedgerState
from asyncrl.buffer.ledger.tickets import (
    GIVEN_UP_LOST_LEASES,
    PAYLOAD_STATES,
    Checkpoint,
    DropReason,
    Grant,
    LedgerSettings,
    Reissue,
    State,
    Ticket,
)
from asyncrl.errors import DataError, FencedError, LedgerError
from asyncrl.versions import is_admissible, max_open_tickets

SOURCE = 0
"""The one source of prompts."""


class Ledger:
    """Commands on the ledger. Each raises before it changes anything, or succeeds whole.

    >>> ledger = Ledger(LedgerSettings(0, 1, 0, 1, 1 << 20, 1 << 10, lease_s=60.0, max_attempts=3))
    >>> ledger.describe_data(num_prompts=5, digest="d")
    >>> token = ledger.open("learner")
    >>> number = ledger.register_version(token, step=0)
    >>> [grant.ticket for grant in ledger.lease("replica", number, want=2, now=0.0)]
    [1]
    """

    def __init__(self, settings: LedgerSettings) -> None:
        self.settings = settings
        self.max_lag = settings.max_lag
        self.state = LedgerState(settings)
        self.evaluations = EvaluationOrders(self.state, self._emit)
        self._events: list[ev.Event] = []
        self._order: PromptOrder | None = None

    @classmethod
    def replay(cls, settings: LedgerSettings, events: Iterable[ev.Event]) -> Ledger:
        """Return the ledger that these events made."""
        ledger = cls(settings)
        for event in events:
            ledger.state.apply(event)
        ledger.state.freed.clear()
        ledger.state.released.clear()
        return ledger

    @property
    def has_begun(self) -> bool:
        """Whether anything ever happened to it."""
        return bool(self.state.num_prompts or self.state.token)

    def drain_events(self) -> list[ev.Event]:
        """Return the events since the last call; the journal must have them before anyone is answered."""
        drained, self._events = self._events, []
        return drained

    def _emit(self, event: ev.Event) -> None:
        self.state.apply(event)
        self._events.append(event)

    # Replicas

    def describe_data(self, num_prompts: int, digest: str) -> None:
        """Set the number of prompts, or check that it is the same.

        Raises:
            DataError: Another number or digest than the run began with.
        """
        state = self.state
        if num_prompts < 1:
            raise DataError("the training data holds no prompt")
        if not state.num_prompts:
            self._emit(ev.DataDescribed(num_prompts, digest))
        elif (num_prompts, digest) != (state.num_prompts, state.data_digest):
            raise DataError(
                f"the training data has {num_prompts} prompts and digest {digest}, but the run began with "
                f"{state.num_prompts} prompts and digest {state.data_digest}",
                hint="Use the same data file everywhere, or start a new run",
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

        Raises:
            DataError: The data is not described yet.
            LedgerError: The version was never registered.
        """
        if not self.state.num_prompts:
            raise DataError("no replica has described the training data yet", hint="Call describe_data first")
        served_step = self._served_step(version)
        grants: list[Grant] = []
        while served_step is not None and len(grants) < want:
            position = self._admit(served_step)
            if position is None:
                break
            number = self.state.issued_heap[0]
            self._emit(ev.Leased(number, replica, now + self.settings.lease_s, position))
            grants.append(self._grant(self.state.tickets[number]))
        return grants

    def _served_step(self, version: int) -> int | None:
        """Return the step that the replica's weights count as, None if it has loaded none yet."""
        if version == 0:
            return None
        if version not in self.state.versions.registered:
            raise LedgerError(f"version {version} was never registered")
        return self.state.versions.counted_step(version)

    def _admit(self, served_step: int) -> int | None:
        """Apply the rules; issue a ticket if none waits. Return the position of the next one to lease."""
        state, settings = self.state, self.settings
        next_position = settings.groups_per_step * state.steps_trained
        position = next_position + state.num_open - state.counts[State.ISSUED]
        if state.issued_heap:
            position = min(position, state.tickets[state.issued_heap[0]].position)
            position = max(position, next_position)
        elif not self._may_issue():
            return None
        if not is_admissible(position, settings.groups_per_step, served_step, self.max_lag):
            return None
        if state.memory_bytes + settings.max_group_bytes > settings.memory_bytes:
            return None
        if not state.issued_heap:
            self._issue_new(position)
        return position

    def _may_issue(self) -> bool:
        settings, state = self.settings, self.state
        is_room = state.num_open < max_open_tickets(settings.groups_per_step, self.max_lag)
        return is_room and state.counts[State.STORED] < settings.ready_batches * settings.groups_per_step

    def _issue_new(self, position: int) -> None:
        state = self.state
        if self._order is None:
            self._order = PromptOrder(self.settings.run_seed, state.num_prompts, self.settings.is_shuffled)
        pass_number, index = self._order.at(state.num_drawn)
        self._emit(ev.Issued(state.num_issued + 1, SOURCE, pass_number, index, position, 0, 0))

    def _grant(self, ticket: Ticket) -> Grant:
        seed = ticket_seed(self.settings.run_seed, ticket.id)
        return Grant(ticket.id, ticket.attempt, ticket.source, ticket.pass_number, ticket.index, seed)

    def renew(self, replica: str, held: Sequence[tuple[int, int]], now: float) -> list[tuple[int, int]]:
        """Extend leases; return the (ticket, attempt) pairs that the replica does not hold any more."""
        kept = {pair for pair in held if self.holds_lease(replica, *pair)}
        if kept:
            tickets = tuple(sorted(ticket for ticket, _ in kept))
            self._emit(ev.Renewed(tickets, now + self.settings.lease_s))
        return [pair for pair in held if pair not in kept]

    def holds_lease(self, replica: str, ticket: int, attempt: int) -> bool:
        """Tell whether this replica may push this attempt."""
        found = self.state.leases.get(replica, {}).get(ticket)
        return found is not None and found.attempt == attempt

    def judge_push(self, replica: str, ticket: int, attempt: int) -> str:
        """Return `welcome`, `duplicate` (this attempt was stored before) or `late` (it lost its lease).

        Raises:
            LedgerError: The ticket was never issued, or this attempt of it was never leased.
        """
        if self.holds_lease(replica, ticket, attempt):
            return "welcome"
        if not 1 <= ticket <= self.state.num_issued:
            raise LedgerError(f"ticket {ticket} was never issued")
        found = self.state.tickets.get(ticket)
        if found is None:
            return "late"
        if attempt > found.attempt or (attempt == found.attempt and found.state is State.ISSUED):
            raise LedgerError(f"attempt {attempt} at ticket {ticket} was never leased")
        is_duplicate = attempt == found.attempt and found.state in PAYLOAD_STATES
        return "duplicate" if is_duplicate else "late"

    def store(self, ticket: int, num_tokens: int, num_bytes: int, versions: tuple[int, int]) -> None:
        """Store a welcome group; `versions` are the lowest and the highest number that sampled it.

        Raises:
            LedgerError: The ticket is not leased, or a version was never registered.
        """
        self._leased(ticket)
        assert num_bytes <= self.settings.max_group_bytes, "checked where groups come in"
        for number in versions:
            if number not in self.state.versions.registered:
                raise LedgerError(f"version {number} was never registered")
        self._emit(ev.Stored(ticket, num_tokens, num_bytes, versions))

    def drop_constant(self, ticket: int) -> None:
        """Drop a welcome group whose rewards are all equal; its prompt is given up."""
        self._leased(ticket)
        self._emit(ev.Dropped(ticket, DropReason.ZERO_STD.value, True))

    def fail(self, replica: str, ticket: int, attempt: int) -> bool:
        """Count a failed attempt; return False if the replica does not hold it."""
        if not self.holds_lease(replica, ticket, attempt):
            return False
        self._give_back(self.state.tickets[ticket], Reissue.FAILED)
        return True

    def release(self, replica: str, held: Sequence[tuple[int, int]]) -> int:
        """Take back the leases that a draining replica returns; return how many it held."""
        released = [pair[0] for pair in dict.fromkeys(held) if self.holds_lease(replica, *pair)]
        for ticket in released:
            self._give_back(self.state.tickets[ticket], Reissue.RELEASED)
        return len(released)

    def retire(self, replica: str) -> None:
        """Take back all that a replica holds; the same name may lease again."""
        for ticket in sorted(self.state.leases.get(replica, ())):
            self._give_back(self.state.tickets[ticket], Reissue.RETIRED)
        self.evaluations.free(replica)

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

    def lose_payload(self, ticket: int) -> None:
        """Issue a stored or reserved ticket again, because its payload is missing or damaged."""
        found = self.state.tickets[ticket]
        if found.state not in (State.STORED, State.RESERVED):
            raise LedgerError(f"ticket {ticket} is {found.state.value}: it has no payload to lose")
        self._emit(ev.Reissued(ticket, Reissue.LOST.value))

    def _leased(self, ticket: int) -> Ticket:
        found = self.state.tickets.get(ticket)
        if found is None or found.state is not State.LEASED:
            raise LedgerError(f"ticket {ticket} is not leased")
        return found

    def _give_back(self, ticket: Ticket, reason: Reissue) -> None:
        limit = self.settings.max_attempts
        has_failed = reason is Reissue.FAILED and ticket.num_failures + 1 >= limit
        is_lost = reason in (Reissue.EXPIRED, Reissue.RETIRED)
        has_killed = is_lost and ticket.num_lost_leases + 1 >= GIVEN_UP_LOST_LEASES * limit
        if has_failed or has_killed:
            self._emit(ev.Dropped(ticket.id, DropReason.POISON.value, True))
        else:
            self._emit(ev.Reissued(ticket.id, reason.value))

    # Learner

    def open(self, holder: str) -> int:
        """Make `holder` the learner; return its fencing token, which fences every older one."""
        token = self.state.token + 1
        self._emit(ev.Opened(token, holder))
        return token

    def check_token(self, token: int) -> None:
        """Raise FencedError unless `token` is the newest."""
        if token != self.state.token:
            raise FencedError(
                f"fencing token {token} is old, the newest is {self.state.token} of '{self.state.holder}'",
                hint="Another learner took over; stop this one",
            )

    def checkpoints(self) -> list[Checkpoint]:
        """Return the checkpoints that a learner may resume from, oldest first."""
        return list(self.state.checkpoints.values())

    def tickets_from(self, step: int) -> list[Ticket]:
        """Return the tickets that a resume at `step` would replay."""
        return [ticket for at, batch in self.state.by_step.items() if at >= step for ticket in batch]

    def resume(
        self,
        token: int,
        step: int,
        missing: Collection[int] = (),
        *,
        is_fork: bool = False,
        note: Mapping[str, float] | None = None,
        refused: Collection[int] = (),
    ) -> None:
        """Go back to before step `step`: later batches are reserved again, in order.

        Args:
            missing: Tickets of `tickets_from(step)` without a payload; they are generated again.
            is_fork: They are trained otherwise than before, so that no later weights come out the same.
            note: What `open` is to tell the next learner; without one, the last note stays.
            refused: Tickets of `tickets_from(step)` to drop as `guard`.

        Raises:
            LedgerError: No committed checkpoint has this step, or a refused ticket is not of it or later.
        """
        self.check_token(token)
        state = self.state
        later = {ticket.id for ticket in self.tickets_from(step)}
        gone = {ticket.id for ticket in state.dropped if ticket.reason is DropReason.GUARD}
        if not (later | gone).issuperset(refused):  # gone: the answer to an earlier call was lost
            raise LedgerError(f"some of the refused tickets {list(refused)} are not of step {step} or later")
        if step not in state.checkpoints and (step != 0 or state.floor_step > 0):
            raise LedgerError(
                f"no committed checkpoint of step {step}; there are {sorted(state.checkpoints)}",
                hint="Resume from one that `open` lists",
            )
        self._emit(ev.Resumed(token, step, is_fork, tuple((note or {}).items())))
        for ticket in sorted(later.intersection(refused)):
            self._emit(ev.Dropped(ticket, DropReason.GUARD.value, True))
        for ticket in sorted(set(missing).difference(refused)):
            self.lose_payload(ticket)
        self._revoke_early_leases(step)

    def _revoke_early_leases(self, step: int) -> None:
        """Take back leases that the restored weights could not get: they would sample over-age tokens."""
        settings = self.settings
        leased = [ticket for held in self.state.leases.values() for ticket in held.values()]
        for ticket in sorted(leased, key=lambda ticket: ticket.id):
            if not is_admissible(ticket.position, settings.groups_per_step, step, settings.max_lag):
                self._give_back(ticket, Reissue.REVOKED)

    def register_version(self, token: int, step: int) -> int:
        """Return a new version number for the weights after `step` steps.

        Raises:
            LedgerError: The learner cannot have such weights.
        """
        self._check_learner(token)
        trained = self.state.steps_trained
        is_in_training = step == trained + 1 and bool(self.state.by_step.get(trained))
        if step != trained and not is_in_training:
            raise LedgerError(f"weights of step {step} cannot exist: {trained} steps are trained")
        number = self.state.versions.last_number + 1
        self._emit(ev.VersionRegistered(number, step))
        return number

    def _check_learner(self, token: int) -> None:
        self.check_token(token)
        if not self.state.is_resumed:
            raise LedgerError(
                f"the ledger stands after step {self.state.steps_trained}, the learner has not resumed",
                hint="Call resume with the step of the checkpoint that was loaded",
            )

    def batch_size(self, step: int) -> int:
        """Return how many groups step `step` trains: as many as before in a replay."""
        return self.state.replay_sizes.get(step, self.settings.groups_per_step)

    def reserve(self, token: int, step: int) -> list[Ticket] | None:
        """Reserve the oldest complete groups for `step`, or return None while too few are complete.

        The same step returns the same tickets, sorted by id. A replayed step has its old tickets;
        oldest complete groups stand in for lost ones.

        Raises:
            LedgerError: `step` is not the next step.
        """
        self._check_learner(token)
        state = self.state
        if step != state.steps_trained:
            raise LedgerError(f"step {step} cannot be reserved: the next one is {state.steps_trained}")
        missing = self.batch_size(step) - len(state.by_step.get(step, ()))
        if missing > state.counts[State.STORED]:
            return None
        if missing > 0:
            self._emit(ev.Reserved(step, tuple(heapq.nsmallest(missing, state.stored_heap))))
        return sorted(state.by_step[step], key=lambda ticket: ticket.id)

    def counted_versions(self, tickets: Sequence[Ticket]) -> list[tuple[int, int]]:
        """Return (number, step to subtract) for every version that may have sampled these groups."""
        if not tickets:
            return []
        lowest = min(ticket.versions[0] for ticket in tickets)
        highest = max(ticket.versions[1] for ticket in tickets)
        book = self.state.versions
        return [(number, book.counted_step(number)) for number in range(lowest, highest + 1)]

    def trained(self, token: int, step: int, dropped: Sequence[tuple[int, str]] = ()) -> None:
        """Record that step `step` trained its batch, less the `dropped` groups with their reasons.

        A prompt dropped as stale is issued again as a new ticket, `max_attempts` times in all; any
        other one is given up. The same call again changes nothing.

        Raises:
            LedgerError: The step is not the reserved one, or a dropped ticket is not in its batch.
        """
        self._check_learner(token)
        state = self.state
        if step == state.steps_trained - 1:
            return  # a repeated call: the answer to the first one was lost
        batch = state.by_step.get(step, [])
        if step != state.steps_trained or len(batch) != self.batch_size(step):
            raise LedgerError(f"step {step} cannot be trained: it is not reserved")
        drops = self._parse_drops(batch, dropped)
        parents = []
        for ticket, reason in drops:
            is_again = reason is DropReason.STALE and ticket.generation + 1 < self.settings.max_attempts
            self._emit(ev.Dropped(ticket.id, reason.value, not is_again))
            if is_again:
                parents.append(ticket)
        self._emit(ev.Trained(step))
        for parent in parents:
            self._issue_again(parent)

    def _parse_drops(
        self, batch: Sequence[Ticket], dropped: Sequence[tuple[int, str]]
    ) -> list[tuple[Ticket, DropReason]]:
        by_id = {ticket.id: ticket for ticket in batch}
        drops = []
        for number, name in dropped:
            if number not in by_id or name not in DropReason._value2member_map_:
                raise LedgerError(f"ticket {number} cannot be dropped as '{name}' from this batch")
            drops.append((by_id.pop(number), DropReason(name)))
        return drops

    def _issue_again(self, parent: Ticket) -> None:
        state = self.state
        position = self.settings.groups_per_step * state.steps_trained + state.num_open
        prompt = (parent.source, parent.pass_number, parent.index)
        self._emit(ev.Issued(state.num_issued + 1, *prompt, position, parent.id, parent.generation + 1))

    def checkpointed(self, token: int, step: int, digest: str, kept: Sequence[int]) -> None:
        """Commit a checkpoint; groups that every kept checkpoint has behind it are folded away.

        Args:
            kept: Steps of the checkpoints that still exist, this one among them.

        Raises:
            LedgerError: The step is not trained yet, or the checkpoint is not among the kept ones.
        """
        self._check_learner(token)
        if step > self.state.steps_trained or step < self.state.floor_step:
            raise LedgerError(
                f"a checkpoint of step {step} does not fit {self.state.steps_trained} trained steps"
            )
        if step not in kept:
            raise LedgerError(f"the checkpoint of step {step} is not among the kept ones {list(kept)}")
        self._emit(ev.Checkpointed(token, step, digest, tuple(kept)))

    def request_evaluation(self, token: int, step: int) -> int:
        """Order an evaluation at weights of at least `step`; return its id."""
        self._check_learner(token)
        return self.evaluations.request(step)
