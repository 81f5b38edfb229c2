"""The ledger: permits of generation, batches of steps, and the fate of every prompt (pure).

Owns the rules. Time and facts come in as arguments, events come out of `drain_events`; there is no
clock, no I/O and no logging. A command checks, then emits events; `LedgerState.apply` is the only
thing that changes state, so `replay` of the events makes the same ledger.

    ISSUED -> LEASED -> STORED -> RESERVED(step) -> TRAINED(step) -> ACKED        any open one -> DROPPED
    LEASED -> ISSUED   expired, deregistered, released, partial, failed, revoked: next attempt, same prompt
    STORED, RESERVED -> ISSUED   its payload is lost
    RESERVED, TRAINED, ACKED from step s on -> RESERVED   resume at s: same steps, same order

Position. A ticket's position is the number of groups that go before it: those of the steps that are
trained or reserved, and the ones in work or complete. A step uses up `groups_per_step` places also
where some of its groups were dropped from it. After a resume steps may have gaps, where a payload was
lost or a group dropped; the next groups fill them in order. A ticket that is leased again keeps its
position, but moves forward if older ones were dropped, and never before the first free place.

Admission. (a) open tickets stay below `(max_lag + 1) * groups_per_step`, or below what fills the gaps;
(b) the position is within `max_lag` of the version that the replica serves, and of the versions of
a partial rollout, which is let go otherwise; (c) fewer than `ready_batches` batches are stored; (d) the
largest group fits in memory. (a) and (c) gate new tickets only. While a step trains, (a) is tighter:
about as many tickets are admitted as the step uses up, so that few stored groups are left over to age.

A token over the bound. The learner masks it, whatever the policy. `drop`: a group that has one when
its step is reserved is dropped, and its prompt issued again as a child behind all open tickets, until
its `max_attempts`-th generation. `wait`: a complete batch waits for groups in flight that are in bound
for this step and no other, at most `max_wait_s`. Replayed steps keep their groups and do not wait.

Liveness. Nobody waits for ever. If the next step is complete, the learner goes on, under `wait` after
`max_wait_s` at the latest. Otherwise it lacks groups and fewer are stored, so (c) is open. If something
is leased, it is pushed or expires. If nothing is, the oldest ISSUED ticket takes a place in this step,
so (b) holds at the newest version; with none ISSUED, (a) holds as fewer than a batch is open, or by
the gaps. What `drop` drops is over age, so nothing sampled at the newest version is, and each prompt
is dropped fewer than `max_attempts` times. A step that trains ends, or a resume ends it, and the
tighter (a) with it. Memory: whole groups own two batches of the largest ones,
partial rollouts have only what is beyond; later steps hold at most one batch (a resume leaves the rest to the
journal), this one fewer than a batch, stored groups among them: so (d) holds.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from asyncrl.buffer.ledger import events as ev
from asyncrl.buffer.ledger.commands.results import ReplicaCommands
from asyncrl.buffer.ledger.state import LedgerState
from asyncrl.buffer.ledger.tickets import (
    Checkpoint,
    DropReason,
    Grant,
    LedgerSettings,
    Part,
    Reissue,
    State,
    Ticket,
)
from asyncrl.core.errors import FencedError, LedgerError
from asyncrl.core.staleness import is_admissible, is_over_age, lag


class Reserved(NamedTuple):
    """A batch, or a part of one.

    Attributes:
        versions: (number, step to subtract) of every version that may have sampled it.
        is_whole: It makes the batch of its step whole.
    """

    tickets: list[Ticket]
    versions: list[tuple[int, int]]
    is_whole: bool


class Ledger(ReplicaCommands):
    """Commands on the ledger. Each raises before it changes anything, or succeeds whole.

    >>> ledger = Ledger(LedgerSettings(0, 1, 0, 1, 1 << 20, 1 << 10, lease_s=60.0, max_attempts=3))
    >>> ledger.describe_data(num_prompts=5, digest="d")
    >>> token = ledger.open("learner")
    >>> number = ledger.register_version(token, step=0)
    >>> [grant.ticket for grant in ledger.lease("replica", number, want=2, now=0.0)]
    [1]
    """

    def _begin(self) -> None:
        super()._begin()
        self._complete_step = -1
        self._complete_since = 0.0

    @classmethod
    def replay(
        cls,
        settings: LedgerSettings,
        events: Iterable[ev.Event],
        snapshot: Mapping[str, object] | None = None,
    ) -> Ledger:
        """Return the ledger that these events made, the first of them in `snapshot`, if given.

        Raises:
            WireError: The snapshot is none of this version.
        """
        ledger = cls(settings)
        if snapshot is not None:
            ledger.state = LedgerState.from_snapshot(settings, snapshot)
            ledger._begin()
        for event in events:
            ledger.state.apply(event)
        ledger.state.freed.clear()
        ledger.state.released.clear()
        return ledger

    @property
    def has_begun(self) -> bool:
        """Whether it has any event."""
        return bool(self.state.num_prompts or self.state.token)

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
            note: Told by `open` to the next learner; without one, the last note stays.
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
        self._complete_step = -1
        self._judge_all_again()
        for ticket in sorted(later.intersection(refused)):
            self._emit(ev.Dropped(ticket, DropReason.GUARD.value, True))
        for ticket in sorted(set(missing).difference(refused)):
            self.lose_payload(ticket)
        self._revoke_early_leases(step)

    def _revoke_early_leases(self, step: int) -> None:
        """Take back leases that the restored weights could not get: they would sample over-age tokens."""
        settings = self.settings
        for ticket in sorted(self.state.leased(), key=lambda ticket: ticket.id):
            if not is_admissible(ticket.position, settings.groups_per_step, step, settings.max_lag):
                self._give_back(ticket, Reissue.REVOKED)

    def register_version(self, token: int, step: int) -> int:
        """Return a new version number for the weights after `step` steps.

        Raises:
            LedgerError: These are not the weights after the last step that was reported trained.
        """
        self._check_learner(token)
        trained = self.state.steps_trained
        if step != trained:
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

    def grant(
        self, replica: str, version: int, want: int, evaluating: int | None, now: float
    ) -> tuple[list[Grant], Part | None] | None:
        """Return the answer to a replica's call for leases, None while there is no work for it.

        Args:
            evaluating: As of `Evaluations.give`; the others and errors are those of `lease`.
        """
        grants = self.lease(replica, version, want, now)
        part = self.evaluations.give(replica, version, evaluating)
        return (grants, part) if grants or part is not None else None

    def reserve(self, token: int, step: int, now: float) -> list[Ticket] | None:
        """Reserve the oldest complete groups for `step`, or return None while it must not start yet.

        It must not while too few are complete; nor, under policy `wait`, while a group in flight is in
        bound for this step and not for the next, for at most `max_wait_s` since the first call that
        found the batch complete. Policy `drop` drops stored groups that are over age at `step` and issues
        their prompts again. The same step returns the same tickets, sorted by id. A replayed step has its
        old tickets; oldest complete groups stand in for lost ones.

        Raises:
            LedgerError: `step` is not the next step.
        """
        missing = self._count_missing(token, step)
        if missing > 0 and not self._reserve_oldest(step, missing, missing, now):
            return None
        return sorted(self.state.by_step[step], key=lambda ticket: ticket.id)

    def reserve_part(
        self, token: int, step: int, now: float, have: Collection[int], at_least: int = 1
    ) -> list[Ticket] | None:
        """Reserve the complete groups that `step` has place for, or return None while there are too few.

        For a learner that begins before its batch is whole. What was reserved stays so until the step is
        trained, over a resume too: its parts come again as they were, in the same order, whoever asks. Under
        policy `wait` places stay free for groups in flight as long as `reserve` would wait for them.

        Args:
            have: The tickets of the step that the caller has; it gets those of the next part.
            at_least: The fewest groups of a part that does not make the batch whole.

        Returns:
            The part, sorted by id; None too if the batch is whole and `have` is all of it.

        Raises:
            LedgerError: `step` is not the next step, or not all of `have` is reserved for it.
        """
        missing, known = self._count_missing(token, step), set(have)
        reserved = {ticket.id for ticket in self.state.by_step.get(step, ())}
        if not reserved.issuperset(known):
            raise LedgerError(
                f"step {step} has begun with tickets {sorted(known - reserved)}, which are not reserved",
                hint="A payload was lost meanwhile: reserve the step from its start",
            )
        least = min(max(at_least, 1), missing)
        if reserved == known and not (missing and self._reserve_oldest(step, missing, least, now)):
            return None
        return next(part for part in self._parts(step) if not known.issuperset(one.id for one in part))

    def reserve_next(
        self, token: int, step: int, now: float, have: Collection[int] | None, at_least: int = 1
    ) -> Reserved | None:
        """Reserve the batch of `step`, see `reserve`; with `have` the next part of it, see `reserve_part`."""
        if have is None:
            tickets = self.reserve(token, step, now)
        else:
            tickets = self.reserve_part(token, step, now, have, at_least)
        if tickets is None:
            return None
        is_whole = self.is_whole(step, [*(have or ()), *(ticket.id for ticket in tickets)])
        return Reserved(tickets, self.counted_versions(tickets), is_whole)

    def is_whole(self, step: int, have: Collection[int]) -> bool:
        """Tell whether `have` is all that `step` trains."""
        batch = self.state.by_step.get(step, [])
        return len(batch) == self.state.batch_size(step) and {one.id for one in batch}.issubset(have)

    def _parts(self, step: int) -> list[list[Ticket]]:
        """Return the parts in which the batch of `step` was reserved, each sorted by id."""
        rest = {ticket.id: ticket for ticket in self.state.by_step[step]}
        later = [[rest.pop(number) for number in part] for part in self.state.parts.get(step, ())]
        found = [sorted(part, key=lambda ticket: ticket.id) for part in (list(rest.values()), *later)]
        return [part for part in found if part]

    def _count_missing(self, token: int, step: int) -> int:
        """Return how many groups `step` lacks. Raises LedgerError if it is not the next step."""
        self._check_learner(token)
        state = self.state
        if step != state.steps_trained:
            raise LedgerError(f"step {step} cannot be reserved: the next one is {state.steps_trained}")
        return state.batch_size(step) - len(state.by_step.get(step, ()))

    def _reserve_oldest(self, step: int, missing: int, at_least: int, now: float) -> bool:
        """Reserve up to `missing` of the oldest complete groups, if `at_least` of them may be."""
        state = self.state
        if self.settings.policy == "drop":
            self._drop_over_age(step)
        if at_least > state.counts[State.STORED]:
            return False
        oldest = sorted(state.stored)[:missing]
        awaited = self._find_awaited(step, now, is_complete=len(oldest) == missing)
        if awaited:  # those before a group take places before it
            free = [missing - 1 - sum(one < number for one in awaited) for number in oldest]
            oldest = [number for taken, number in enumerate(oldest) if taken <= free[taken]]
        if len(oldest) < at_least:
            return False
        self._emit(ev.Reserved(step, tuple(oldest)))
        return True

    @property
    def patience_ends(self) -> float:
        """Time at which a complete batch stops waiting for groups in flight; infinite if none waits."""
        is_waiting = self.settings.policy == "wait" and self._complete_step == self.state.steps_trained
        return self._complete_since + self.settings.max_wait_s if is_waiting else math.inf

    def _drop_over_age(self, step: int) -> None:
        """Drop stored groups over age at `step`; a prompt's last generation is left to the mask."""
        state, settings = self.state, self.settings
        is_judged = self._judged_step == step
        for number in sorted(self._unjudged if is_judged else state.stored):
            ticket = state.tickets[number]
            lowest = state.versions.lowest_step(ticket.versions)
            is_exempt = ticket.generation + 1 >= settings.max_attempts
            if not is_exempt and is_over_age(step, lowest, settings.max_lag):
                self._emit(ev.Dropped(number, DropReason.STALE.value, False))
                self._issue_again(ticket)
        self._judged_step = step
        self._unjudged.clear()

    def _find_awaited(self, step: int, now: float, is_complete: bool) -> list[int]:
        """Return the groups in flight that are in bound at this step and after it no longer.

        None from `max_wait_s` after the first call that found the batch complete, and under other policies.
        """
        state, max_lag = self.state, self.settings.max_lag
        if self.settings.policy != "wait":
            return []
        if is_complete and self._complete_step != step:
            self._complete_step, self._complete_since = step, now
        if is_complete and now - self._complete_since >= self.settings.max_wait_s:
            return []
        return [
            number
            for version, leased in state.leased_by_version.items()
            if version and lag(step, state.versions.counted_step(version)) == max_lag
            for number in leased
        ]

    def counted_versions(self, tickets: Sequence[Ticket]) -> list[tuple[int, int]]:
        """Return (number, step to subtract) for every version that may have sampled these groups."""
        lowest = min(ticket.versions[0] for ticket in tickets)
        highest = max(ticket.versions[1] for ticket in tickets)
        book = self.state.versions
        return [(number, book.counted_step(number)) for number in range(lowest, highest + 1)]

    def trained(
        self, token: int, step: int, dropped: Sequence[tuple[int, str]] = (), lag_max: int = ev.UNSAID
    ) -> None:
        """Record that step `step` trained its batch, less the `dropped` groups with their reasons.

        A prompt dropped as stale is issued again as a new ticket, `max_attempts` times in all; any
        other one is given up. The same call again changes nothing.

        Args:
            lag_max: The largest lag of a token that entered the loss.

        Raises:
            LedgerError: The step is not the reserved one, a dropped ticket is not in its batch, or
                `lag_max` is over the bound.
        """
        self._check_learner(token)
        state = self.state
        if step == state.steps_trained - 1:
            return  # a repeated call: the answer to the first one was lost
        batch = state.by_step.get(step, [])
        if step != state.steps_trained or len(batch) != self.state.batch_size(step):
            raise LedgerError(f"step {step} cannot be trained: it is not reserved")
        if not ev.UNSAID <= lag_max <= self.settings.max_lag:
            raise LedgerError(
                f"step {step} trained a token of lag {lag_max}, the bound is {self.settings.max_lag}",
                hint="The learner must mask what is over age",
            )
        drops = self._parse_drops(batch, dropped)
        parents = []
        for ticket, reason in drops:
            is_again = reason is DropReason.STALE and ticket.generation + 1 < self.settings.max_attempts
            self._emit(ev.Dropped(ticket.id, reason.value, not is_again))
            if is_again:
                parents.append(ticket)
        self._emit(ev.Trained(step, lag_max))
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
