"""Store of groups: keeps the ledger, its journal and the payloads in memory consistent.

A ticket is one prompt to be trained; each lease of it is an attempt. Invariants: a STORED or RESERVED ticket
has a payload in memory or in the journal; no reply is sent before `commit` has made the change durable.
Groups are checked here as they come in; a malformed one fails its attempt and is refused. One thread.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence

from asyncrl.buffer.bounds import UNBOUNDED, GroupBounds
from asyncrl.buffer.journals.journal import Journal, Need
from asyncrl.buffer.journals.records import HEADER_BYTES, TURNS_FROM
from asyncrl.buffer.ledger.ledger import Ledger
from asyncrl.buffer.ledger.tickets import PAYLOAD_STATES, LedgerSettings, State, Ticket
from asyncrl.core.errors import LedgerError, WireError
from asyncrl.core.experience import CUT_REASONS, UNFINISHED, Outline, outline_group
from asyncrl.core.runtime.faults import fault_point
from asyncrl.core.states import FAILURES
from asyncrl.core.wire import Frame

KEPT_DROPPED_BYTES, MAX_KEPT_DROPPED = 16 << 20, 64
"""Bytes and number of the newest dropped groups that the journal keeps for inspection, at least one. A
dropped group is released when it alone keeps an old journal file from deletion."""


class ExperienceStore:
    """Groups on their way from replicas to the learner.

    Args:
        group_size: Trajectories that a group must have.
        drops_constant_groups: A group whose rewards are all equal is dropped as `zero_variance`.
        needs_baseline: A group must bring the reward of a greedy answer.
        bounds: Upper limits on the lengths and numbers in a group.

    `counters` counts refusals: `duplicates`, `late`, `malformed`, `failed/<reason>`, and so on.
    `num_turns` counts commits that changed something, since this process began. `is_committed` tells whether
    the last `commit` made all durable.
    """

    def __init__(
        self,
        settings: LedgerSettings,
        journal: Journal,
        group_size: int,
        drops_constant_groups: bool,
        now: float,
        needs_baseline: bool = False,
        bounds: GroupBounds = UNBOUNDED,
    ) -> None:
        self.journal = journal
        self.counters: Counter[str] = Counter()
        self.num_turns = 0
        self.is_committed = True
        self._group_size = group_size
        self._drops_constant_groups = drops_constant_groups
        self._needs_baseline = needs_baseline
        self._bounds = bounds
        self._payloads: dict[int, list[Frame]] = {}
        num_kept_dropped = min(MAX_KEPT_DROPPED, KEPT_DROPPED_BYTES // settings.max_group_bytes)
        self._num_kept_dropped = max(1, num_kept_dropped)
        self._kept_dropped: deque[int] = deque()
        past = journal.recover()
        self.ledger = Ledger.replay(settings, past.events, past.snapshot)
        self.turns = TurnRecords(self.ledger, journal)
        if self.ledger.has_begun:
            self._reconcile(now)

    def _reconcile(self, now: float) -> None:
        """After a restart: reissue tickets without a payload, release payloads that no ticket refers to."""
        tickets = self.ledger.state.tickets.values()
        self._keep_needed()
        waiting = [ticket for ticket in tickets if ticket.state in (State.STORED, State.RESERVED)]
        for ticket in waiting:
            if not self.journal.holds(ticket.id, ticket.attempt):
                self._lose(ticket.id)
        for ticket in [one for one in tickets if one.partial is not None and not self._holds_partial(one)]:
            self._lose_partial(ticket.id)
        self.ledger.restart(now)
        self.commit(now)

    def _keep_needed(self) -> None:
        tickets = self.ledger.state.tickets.values()
        needed = {ticket.id for ticket in tickets if ticket.state in PAYLOAD_STATES or ticket.partial_attempt}
        newest = list(self.ledger.state.dropped)[-self._num_kept_dropped :]
        self._kept_dropped = deque(one.id for one in newest if self.journal.holds(one.id, one.attempt))
        self.journal.keep_only(needed | set(self._kept_dropped))

    def push(self, replica: str, ticket: int, attempt: int, frames: Sequence[Frame]) -> str:
        """Take a group in; return `stored`, `duplicate`, `late` or `dropped`.

        Raises:
            WireError: The group is malformed; its attempt has failed.
            LedgerError: No replica ever held a lease on this ticket and attempt.
        """
        verdict = self.ledger.judge_push(replica, ticket, attempt)
        if verdict != "accepted":
            self.counters["duplicates" if verdict == "duplicate" else verdict] += 1
            return verdict
        group = self._checked(replica, ticket, attempt, frames)
        self.journal.append(ticket, attempt, frames)
        fault_point("buffer.appended", ticket)
        num_bytes = sum(len(frame) for frame in frames)
        has_zero_variance = self._drops_constant_groups and group.is_constant
        how = {"is_masked": group.is_masked, "has_zero_variance": has_zero_variance}
        result = self.ledger.take_in(ticket, group.num_tokens, num_bytes, group.versions, **how)
        if result == "stored":
            self._payloads[ticket] = list(frames)
            self.turns.forget(ticket)
        else:
            self._keep_dropped(ticket)
        return result

    def store_partial(self, replica: str, ticket: int, attempt: int, frames: Sequence[Frame]) -> str:
        """Take in the partial rollouts of a draining replica; return `stored`, `released` or `late`.

        Raises:
            WireError: It is malformed; its attempt has failed.
        """
        if not self.ledger.holds_lease(replica, ticket, attempt):
            self.counters["late"] += 1
            return "late"
        group = self._checked(replica, ticket, attempt, frames, is_partial=True)
        num_bytes = sum(len(frame) for frame in frames)
        versions = (min(group.versions), max(group.versions))
        result = self.ledger.store_partial(replica, ticket, attempt, group.num_tokens, num_bytes, versions)
        if result == "stored":
            self.journal.append(ticket, attempt, frames)
            self._payloads[ticket] = list(frames)
        return result

    def fetch_partial(self, replica: str, ticket: int, attempt: int) -> Sequence[Frame] | None:
        """Return the partial rollout that this attempt resumes from, None if there is none left."""
        is_held = self.ledger.holds_lease(replica, ticket, attempt)
        partial = self.ledger.state.tickets[ticket].partial if is_held else None
        if partial is None:
            return None
        frames = self.turns.read(ticket, partial.num_records) if partial.num_records else None
        if not partial.num_records:
            frames = self._payloads.get(ticket) or self.journal.read(ticket, partial.attempt)
        if frames is None:
            self._lose_partial(ticket)
        return frames

    def _lose_partial(self, ticket: int) -> None:
        """Give partial rollouts up, and take the ticket out of the pending releases.

        Without this, the next commit would delete a payload pushed for the same ticket in the meantime.
        """
        self.counters["lost_partials"] += 1
        self.ledger.lose_partial(ticket)
        self._payloads.pop(ticket, None)
        self.turns.forget(ticket)
        self.journal.release(ticket)
        state = self.ledger.state
        for numbers in (state.freed, state.released):
            numbers[:] = [number for number in numbers if number != ticket]

    def _checked(
        self, replica: str, ticket: int, attempt: int, frames: Sequence[Frame], is_partial: bool = False
    ) -> Outline:
        """Return the group's outline.

        Raises:
            WireError: It is malformed; its attempt has failed.
        """
        try:
            group = self._check(ticket, attempt, frames)
            _check_samples(group, is_partial)
            if self._needs_baseline and group.baseline_reward is None and not is_partial:
                raise WireError(f"ticket {ticket}: the group lacks the reward of a greedy answer")
            return group
        except WireError:
            self.counters["malformed"] += 1
            self.ledger.fail(replica, ticket, attempt)
            raise

    def _check(self, ticket: int, attempt: int, frames: Sequence[Frame]) -> Outline:
        num_bytes, limit = sum(len(frame) for frame in frames), self.ledger.settings.max_group_bytes
        if num_bytes > limit:
            raise WireError(f"ticket {ticket}: a group of {num_bytes} bytes is over the limit of {limit}")
        group = outline_group(frames)
        if (group.ticket, group.attempt) != (ticket, attempt):
            raise WireError(
                f"the group is ticket {group.ticket}, attempt {group.attempt}, not {ticket}, {attempt}"
            )
        if group.num_samples != self._group_size:
            raise WireError(
                f"ticket {ticket}: a group has {self._group_size} trajectories, not {group.num_samples}"
            )
        self._bounds.check(group)
        if not all(version in self.ledger.state.versions for version in group.versions):
            raise WireError(f"ticket {ticket}: a version that was never registered")
        return group

    def fail(
        self, replica: str, ticket: int, attempt: int, reason: str, cause: str = "", now: float = 0.0
    ) -> None:
        """Count a group that failed at its replica. See `ReplicaCommands.fail`."""
        if self.ledger.fail(replica, ticket, attempt, cause, reason, now):
            if cause in FAILURES:
                self.counters[f"failures/{cause}"] += 1
            self.counters[f"failed/{reason[:40]}" if len(self.counters) < 100 else "failed/other"] += 1
        else:
            self.counters["late"] += 1

    def fetch(self, numbers: Sequence[int]) -> tuple[list[Sequence[Frame]], list[int]]:
        """Return the payloads of reserved tickets, and the tickets whose payload is lost.

        Raises:
            LedgerError: A ticket is not reserved.
        """
        for number in numbers:
            found = self.ledger.state.tickets.get(number)
            if found is None or found.state is not State.RESERVED:
                raise LedgerError(f"ticket {number} is not reserved")
        payloads, lost = [], []
        for number in numbers:
            frames = self._read(self.ledger.state.tickets[number])
            if frames is None:
                lost.append(number)
            else:
                payloads.append(frames)
        for number in dict.fromkeys(lost):
            self._lose(number)
        return payloads, lost

    def is_reserved(self, number: int, attempt: int) -> bool:
        """Tell whether this very attempt of a ticket is in a reserved batch."""
        found = self.ledger.state.tickets.get(number)
        return found is not None and found.state is State.RESERVED and found.attempt == attempt

    def peek(self, num_groups: int) -> list[tuple[int, int, list[Frame]]]:
        """Return (ticket, attempt, payload) of the oldest complete groups, as far as they are in memory."""
        state = self.ledger.state
        oldest = (state.tickets[number] for number in sorted(state.stored)[:num_groups])
        return [(one.id, one.attempt, self._payloads[one.id]) for one in oldest if one.id in self._payloads]

    def _read(self, ticket: Ticket) -> Sequence[Frame] | None:
        return self._payloads.get(ticket.id) or self.journal.read(ticket.id, ticket.attempt)

    def _holds(self, ticket: Ticket) -> bool:
        return ticket.id in self._payloads or self.journal.holds(ticket.id, ticket.attempt)

    def _lose(self, number: int) -> None:
        self.counters["lost_payloads"] += 1
        self.ledger.lose_payload(number)

    def resume(
        self,
        token: int,
        step: int,
        *,
        is_fork: bool = False,
        note: Mapping[str, float] | None = None,
        refused: Sequence[int] = (),
    ) -> None:
        """Rewind the ledger to `step`, see `Ledger.resume`; groups without a payload are generated again."""
        self.ledger.check_token(token)
        missing = [ticket.id for ticket in self.ledger.tickets_from(step) if not self._holds(ticket)]
        self.ledger.resume(token, step, missing, is_fork=is_fork, note=note, refused=refused)
        self.counters["lost_payloads"] += len(missing)

    def commit(self, now: float) -> bool:
        """Make all changes durable, then let go of payloads that are not needed any more.

        Returns:
            False while the journal is unavailable: send no reply and call again; nothing is lost. When the
            journal is back, every lease gets a full new term, because replicas could not renew.

        Raises:
            FencedError: Another buffer has taken the journal over.
        """
        was_committed, self.is_committed = self.is_committed, self._commit_once(now)
        if self.is_committed and not was_committed:
            self.ledger.restart(now)
            self.is_committed = self._commit_once(now)
        return self.is_committed

    def _commit_once(self, now: float) -> bool:
        events = self.ledger.drain_events()
        if events:
            self.num_turns += 1
            fault_point("buffer.committing", self.num_turns)
        is_durable = self.journal.commit(events, now)
        if self.journal.need is Need.ALL:
            is_durable = self._rebuild_journal()
        if not is_durable:
            return False
        if events:
            fault_point("buffer.committed", self.num_turns)
        self._let_go()
        if self.journal.need is Need.SNAPSHOT:
            self.journal.write_snapshot(self.ledger.state.as_snapshot())
        return True

    def _let_go(self) -> None:
        state = self.ledger.state
        if state.released:
            self._release_old_dropped()
        for ticket in state.freed:
            self._payloads.pop(ticket, None)
            self.turns.forget(ticket)
        for ticket in state.released:
            if self._is_kept_dropped(ticket):
                self._keep_dropped(ticket)
            else:
                self.journal.release(ticket)
        state.freed.clear()
        state.released.clear()

    def _is_kept_dropped(self, number: int) -> bool:
        found = self.ledger.state.tickets.get(number)
        is_dropped = found is not None and found.state is State.DROPPED
        return found is not None and is_dropped and self.journal.holds(number, found.attempt)

    def _keep_dropped(self, ticket: int) -> None:
        """Keep a dropped group's payload in the journal for inspection, and release the oldest such one."""
        if ticket not in self._kept_dropped:
            self._kept_dropped.append(ticket)
        if len(self._kept_dropped) > self._num_kept_dropped:
            self.journal.release(self._kept_dropped.popleft())

    def _release_old_dropped(self) -> None:
        """Release each dropped group that alone keeps an old journal file from deletion."""
        for ticket in [ticket for ticket in self._kept_dropped if not self.journal.is_recent(ticket)]:
            self._kept_dropped.remove(ticket)
            self.journal.release(ticket)

    def _rebuild_journal(self) -> bool:
        """Refill a wiped journal: payloads in memory are rewritten; tickets without one are reissued."""
        if not self.journal.survey():
            return False
        self._keep_needed()
        for ticket in list(self.ledger.state.tickets.values()):
            if ticket.state in (State.STORED, State.RESERVED):
                if not self._ensure_journalled(ticket.id, ticket.attempt):
                    self._lose(ticket.id)
            elif ticket.partial is not None and not self._holds_partial(ticket):
                self._lose_partial(ticket.id)
        self._let_go()
        is_done = self.journal.begin_anew(self.ledger.state.as_snapshot())
        if is_done:
            self.ledger.drain_events()  # the snapshot holds them already
        return is_done

    def _holds_partial(self, ticket: Ticket) -> bool:
        if ticket.partial is not None and ticket.partial.num_records:
            return self.turns.are_journalled(ticket.id, ticket.partial.num_records)
        return self._ensure_journalled(ticket.id, ticket.partial_attempt)  # of a draining replica

    def _ensure_journalled(self, ticket: int, attempt: int) -> bool:
        frames = self._payloads.get(ticket)
        if frames is not None and not self.journal.holds(ticket, attempt):
            self.journal.append(ticket, attempt, frames)
        return self.journal.holds(ticket, attempt)


def _check_samples(group: Outline, is_partial: bool) -> None:
    """Raise WireError unless each sample is trainable, truncated and masked, or may be continued."""
    if not (is_partial or group.is_whole):
        raise WireError(f"ticket {group.ticket}: unfinished trajectories are for partial rollouts only")
    if not any(group.lengths):
        raise WireError(f"ticket {group.ticket}: the group has no token")
    for sample, (length, largest, finish) in enumerate(
        zip(group.lengths, group.mask_max, group.finish, strict=True)
    ):
        is_begun = length > 0 or finish == UNFINISHED
        may_be_masked = finish in CUT_REASONS or not length
        if not is_begun or largest > 1 or (largest == 0 and not may_be_masked):
            raise WireError(
                f"ticket {group.ticket}, sample {sample}: no sampled token, or a loss mask beyond 0 and 1"
            )


class TurnRecords:
    """Records of turns: in the journal, and in memory as far as this process has had them."""

    def __init__(self, ledger: Ledger, journal: Journal) -> None:
        self._ledger, self._journal = ledger, journal
        self._kept: dict[int, list[Frame]] = {}

    def store(
        self, replica: str, key: tuple[int, int, int], versions: tuple[int, int], frames: Sequence[Frame]
    ) -> str:
        """Take in a record of finished turns; return `stored`, `duplicate`, `full` or `late`.

        Args:
            key: (ticket, attempt, number).

        Raises:
            LedgerError: As of the ledger's `store_turns`. WireError: It is not one frame.
        """
        ticket, _, number = key
        if len(frames) != 1:
            raise WireError(f"ticket {ticket}: a record of turns is one frame, not {len(frames)}")
        result = self._ledger.store_turns(replica, *key, len(frames[0]) + HEADER_BYTES, versions)
        if result == "stored":
            self._journal.append(ticket, TURNS_FROM + number, frames)
            kept = self._kept.setdefault(ticket, [])
            del kept[number - 1 :]
            if len(kept) == number - 1:  # else `read` has to come first
                kept.append(frames[0])
        return result

    def read(self, ticket: int, num_records: int) -> Sequence[Frame] | None:
        """Return a ticket's records, None if one is missing or damaged."""
        if len(self._kept.get(ticket, ())) != num_records:
            read = [self._journal.read(ticket, TURNS_FROM + number) for number in range(1, num_records + 1)]
            found = [record for one in read if one is not None for record in one]
            if len(found) != num_records:
                return None
            self._kept[ticket] = list(found)
        return self._kept[ticket]

    def are_journalled(self, ticket: int, num_records: int) -> bool:
        """Tell whether the journal holds all of a ticket's records; it gets those in memory that it lacks."""
        kept = self._kept.get(ticket, ())
        for number, record in enumerate(kept if len(kept) == num_records else (), 1):
            if not self._journal.holds(ticket, TURNS_FROM + number):
                self._journal.append(ticket, TURNS_FROM + number, [record])
        return all(self._journal.holds(ticket, TURNS_FROM + number) for number in range(1, num_records + 1))

    def forget(self, ticket: int) -> None:
        """Leave a ticket's records to the journal, which forgets them with the ticket."""
        self._kept.pop(ticket, None)
