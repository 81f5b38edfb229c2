"""The ledger, its journal and the payloads in memory, as one thing.

Owns that the three agree: a STORED or RESERVED ticket has a payload in memory or in the journal, and
nobody learns of a change before `settle` has made it durable. Groups are checked here as they come
in; what is malformed fails its attempt and is refused. One thread.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from asyncrl.buffer.journals.journal import Journal
from asyncrl.buffer.ledger.ledger import Ledger
from asyncrl.buffer.ledger.tickets import PAYLOAD_STATES, LedgerSettings, State, Ticket
from asyncrl.errors import LedgerError, WireError
from asyncrl.experience import Group, Trajectory, decode_group
from asyncrl.faults import fault_point
from asyncrl.wire import Frame


class ExperienceStore:
    """Groups on their way from replicas to the learner.

    Args:
        group_size: Trajectories that a group must have.
        drops_constant_groups: A group whose rewards are all equal is dropped as `zero_std`.
        needs_baseline: A group must bring the reward of a greedy answer.

    `counters` counts what was refused: `duplicates`, `late`, `malformed`, `failed/<reason>`, and so on.
    `num_turns` counts turns that changed something, since this process began.
    """

    def __init__(
        self,
        settings: LedgerSettings,
        journal: Journal,
        group_size: int,
        drops_constant_groups: bool,
        now: float,
        needs_baseline: bool = False,
    ) -> None:
        self.journal = journal
        self.counters: Counter[str] = Counter()
        self.num_turns = 0
        self._group_size = group_size
        self._drops_constant_groups = drops_constant_groups
        self._needs_baseline = needs_baseline
        self._payloads: dict[int, list[bytes]] = {}
        self.ledger = Ledger.replay(settings, journal.recover())
        if self.ledger.has_begun:
            self._reconcile(now)

    def _reconcile(self, now: float) -> None:
        """After a restart: issue again what has no payload, forget payloads that nobody needs."""
        tickets = self.ledger.state.tickets.values()
        self.journal.keep_only({ticket.id for ticket in tickets if ticket.state in PAYLOAD_STATES})
        waiting = [ticket for ticket in tickets if ticket.state in (State.STORED, State.RESERVED)]
        for ticket in waiting:
            if self.journal.read(ticket.id, ticket.attempt) is None:
                self._lose(ticket.id)
        self.ledger.restart(now)
        self.settle(now)

    def push(self, replica: str, ticket: int, attempt: int, frames: Sequence[Frame]) -> str:
        """Take a group in; return `stored`, `duplicate`, `late` or `dropped`.

        Raises:
            WireError: The group is malformed; its attempt has failed.
            LedgerError: Nobody was ever asked for this group.
        """
        verdict = self.ledger.judge_push(replica, ticket, attempt)
        if verdict != "welcome":
            self.counters["duplicates" if verdict == "duplicate" else verdict] += 1
            return verdict
        try:
            group = self._check(ticket, attempt, frames)
        except WireError:
            self.counters["malformed"] += 1
            self.ledger.fail(replica, ticket, attempt)
            raise
        if self._drops_constant_groups and group.is_constant:
            self.ledger.drop_constant(ticket)
            return "dropped"
        self._store(group, frames)
        return "stored"

    def _store(self, group: Group, frames: Sequence[Frame]) -> None:
        numbers = [span.version for trajectory in group.trajectories for span in trajectory.spans]
        self.journal.append(group.ticket, group.attempt, frames)
        fault_point("buffer.appended", group.ticket)
        num_bytes = sum(len(frame) for frame in frames)
        self.ledger.store(group.ticket, group.num_tokens, num_bytes, (min(numbers), max(numbers)))
        self._payloads[group.ticket] = [bytes(frame) for frame in frames]

    def _check(self, ticket: int, attempt: int, frames: Sequence[Frame]) -> Group:
        num_bytes, limit = sum(len(frame) for frame in frames), self.ledger.settings.max_group_bytes
        if num_bytes > limit:
            raise WireError(f"ticket {ticket}: a group of {num_bytes} bytes is over the limit of {limit}")
        group = decode_group(frames)
        if (group.ticket, group.attempt) != (ticket, attempt):
            raise WireError(
                f"the group is ticket {group.ticket}, attempt {group.attempt}, not {ticket}, {attempt}"
            )
        if len(group.trajectories) != self._group_size:
            raise WireError(
                f"ticket {ticket}: a group has {self._group_size} trajectories, not {len(group.trajectories)}"
            )
        if not len(group.prompt_ids):
            raise WireError(f"ticket {ticket}: the prompt is empty")
        if self._needs_baseline and group.baseline_reward is None:
            raise WireError(f"ticket {ticket}: the group lacks the reward of a greedy answer")
        for sample, trajectory in enumerate(group.trajectories):
            self._check_trajectory(trajectory, f"ticket {ticket}, sample {sample}")
        return group

    def _check_trajectory(self, trajectory: Trajectory, where: str) -> None:
        if trajectory.loss_mask.max(initial=0) != 1:
            raise WireError(f"{where}: no sampled token, or a loss mask beyond 0 and 1")
        registered = self.ledger.state.versions.registered
        if any(span.version not in registered for span in trajectory.spans):
            raise WireError(f"{where}: a version that was never registered")

    def fail(self, replica: str, ticket: int, attempt: int, reason: str) -> None:
        """Count a group that failed at its replica."""
        if self.ledger.fail(replica, ticket, attempt):
            self.counters[f"failed/{reason[:40]}" if len(self.counters) < 100 else "failed/other"] += 1
        else:
            self.counters["late"] += 1

    def fetch(self, numbers: Sequence[int]) -> tuple[list[list[bytes]], list[int]]:
        """Return the payloads of reserved tickets, and the tickets whose payload turned out lost.

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

    def _read(self, ticket: Ticket) -> list[bytes] | None:
        return self._payloads.get(ticket.id) or self.journal.read(ticket.id, ticket.attempt)

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
        missing = [ticket.id for ticket in self.ledger.tickets_from(step) if self._read(ticket) is None]
        self.ledger.resume(token, step, missing, is_fork=is_fork, note=note, refused=refused)
        self.counters["lost_payloads"] += len(missing)

    def settle(self, now: float) -> None:
        """Make all changes durable, then let go of payloads that are not needed any more."""
        events = self.ledger.drain_events()
        self.journal.commit(events, now)
        if events:
            self.num_turns += 1
            fault_point("buffer.committed", self.num_turns)
        state = self.ledger.state
        for ticket in state.freed:
            self._payloads.pop(ticket, None)
        for ticket in state.released:
            self.journal.release(ticket)
        state.freed.clear()
        state.released.clear()
