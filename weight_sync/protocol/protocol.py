"""The weight-sync protocol as a pure state machine: no I/O, time is an argument.

Owns members, the one active round, the memberships and the permits to swap. Events come in through
methods, orders go out through `take_orders`. A round per version and set of members:
offer → transfer → verify; then each verified member swaps by itself, `parallelism` at a time.
Invariants: an offer is always of the newest published version; a membership number names one set of
members for ever; a member that missed a deadline is fenced until it has caught up; events may come
twice or late.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from asyncrl.versions import UNLOADED, PolicyVersion
from weight_sync.backends.choice import agree_on_backend
from weight_sync.protocol.members import Card, Member, MemberState, PublisherSeat
from weight_sync.protocol.rounds import GroupCache, Order, Part, Phase, Round, Sender, Timing

PUBLISHER = "publisher"
MAX_LOAD_FAILURES = 3
MAX_BACKOFF_S = 5.0
BLAMELESS = ("publisher_lost", "superseded", "left")
"""Causes for which no member is suspected."""


@dataclass
class Coordination:
    """See the module. `first_id` must rise with every start of a coordinator."""

    timing: Timing
    parallelism: int = 1
    backend: str = "gloo"
    first_id: int = 0
    members: dict[str, Member] = field(default_factory=dict)
    publisher: PublisherSeat | None = None
    current: PolicyVersion | None = None
    round: Round | None = None
    last_round_s: float | None = None
    culprit: str = ""
    counters: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._orders: list[Order] = []
        self._swap_queue: list[str] = []
        self._groups = GroupCache()
        self._last_id = self.first_id
        self._was_alone = False

    def take_orders(self) -> list[Order]:
        """Return the orders since the last call, oldest first."""
        orders, self._orders = self._orders, []
        return orders

    # --- membership -------------------------------------------------------------------------------

    def hello(self, card: Card, now: float) -> None:
        """A receiver joins, or joins again; it gets the newest version in the next round."""
        name, incarnation = card.name, card.incarnation
        known = self.members.get(name)
        if known is not None:
            self._leave_round(known, "said hello again", now)
        if known is not None and known.incarnation == incarnation and known.state is not MemberState.RETIRED:
            self._forget_progress(known)
            if known.state is MemberState.DEAD:
                known.move(MemberState.SYNCING)
        else:
            known = self.members[name] = Member(name, incarnation, card.abilities, now)
            self._groups.forget(name)
        known.serving, known.last_seen = card.serving, now
        known.is_attended, known.is_pinned = card.is_attended, card.is_pinned
        if card.staged > card.serving:
            known.staged = card.staged
            self._requeue(known)
        known.catch_up()
        self._advance(now)

    def publisher_hello(self, seat: PublisherSeat, current: PolicyVersion | None, now: float) -> None:
        """The publisher joins; a new process brings a new store, so no old group survives."""
        is_same = self.publisher is not None and self.publisher.incarnation == seat.incarnation
        self.publisher = seat
        if not is_same:
            self._groups.clear()
            self._break_round("publisher_lost", now)
            self.current = None
        if current is not None:
            self.published(current, now)
        self._advance(now)

    def seen(self, name: str, incarnation: str, now: float) -> bool:
        """Note that a peer spoke; False means that it must say hello first."""
        if name == PUBLISHER:
            seat = self.publisher
            if seat is None or seat.incarnation != incarnation:
                return False
            seat.last_seen = now
            return True
        member = self.members.get(name)
        if member is None or member.incarnation != incarnation or not member.is_listening:
            return False
        member.last_seen = now
        if member.state is MemberState.SUSPECT:
            member.catch_up()
        return True

    def drain(self, name: str, now: float) -> None:
        """Give the member nothing new from now on."""
        member = self.members[name]
        if member.is_listening:
            self._leave_round(member, "draining", now)
            member.move(MemberState.DRAINING)
        self._advance(now)

    def retire(self, name: str, now: float) -> None:
        """The member leaves for good."""
        member = self.members[name]
        if member.is_listening:
            self._leave_round(member, "retired", now)
            member.move(MemberState.RETIRED)
            self._forget_progress(member)
            self._groups.forget(name)
        self._advance(now)

    def pin(self, name: str, now: float) -> None:
        """Hold the member at its version; a commit that was not taken up waits."""
        member = self.members[name]
        member.is_pinned = True
        self._take_back_swap(member)
        self._leave_round(member, "pinned", now)
        self._advance(now)

    def unpin(self, name: str, now: float) -> None:
        """Let the member follow again."""
        self.members[name].is_pinned = False
        self._advance(now)

    # --- versions and rounds ----------------------------------------------------------------------

    def published(self, version: PolicyVersion, now: float) -> None:
        """A version is ready at the publisher; older unsent ones are skipped."""
        if self.current is not None and version.number <= self.current.number:
            return
        if self.current is not None and self.current.number not in self._sent_numbers():
            self.counters["versions_skipped"] += 1
        self.current = version
        self.counters["versions_published"] += 1
        self._advance(now)

    def accepted(self, name: str, round_id: int, now: float) -> None:
        """The member has made room for the offer."""
        if self._part(name, round_id) is Part.OFFERED:
            self._set_part(name, Part.ACCEPTED)
        self._advance(now)

    def verified(self, name: str, round_id: int, number: int, now: float) -> None:
        """The member holds all of version `number` with the right digests."""
        member = self.members[name]
        if self._part(name, round_id) is Part.RECEIVING:
            assert self.round is not None
            self._set_part(name, Part.VERIFIED)
            member.last_round_s = now - self.round.started
            member.is_alone, member.num_failures = False, 0
        if member.is_listening and number > max(member.serving, member.staged or 0, member.swapping or 0):
            member.staged = number
            if name not in self._swap_queue:
                self._swap_queue.append(name)
        self._advance(now)

    def failed(self, name: str, round_id: int, cause: str, now: float) -> None:
        """The member could not accept, receive or verify. Cause `transport` means a broken group."""
        if self._part(name, round_id) in (Part.OFFERED, Part.RECEIVING):
            assert self.round is not None
            self._set_part(name, Part.FAILED)
            self.round.causes[name] = cause
            self.members[name].last_error = cause
            if cause == "transport":
                self._break_round("transport", now)
        self._advance(now)

    def sent(self, round_id: int, num_bytes: int, now: float) -> None:
        """The publisher has sent all buckets of the round."""
        if self._is_sending(round_id):
            assert self.round is not None
            self.round.sender = Sender.SENT
            self.counters["bytes_sent"] += num_bytes
        self._advance(now)

    def send_failed(self, round_id: int, cause: str, now: float) -> None:
        """The publisher could not send; `superseded` means that the version is gone already."""
        if self._is_sending(round_id):
            self._break_round(cause, now)
        self._advance(now)

    # --- swaps ------------------------------------------------------------------------------------

    def attended(self, name: str, now: float) -> None:
        """A replica asks the member for weights."""
        self.members[name].is_attended = True
        self._advance(now)

    def restarted(self, name: str, serving: int, now: float) -> None:
        """The replica beside the member was started anew and serves `serving`."""
        member = self.members[name]
        self._take_back_swap(member)
        member.serving, member.is_attended = serving, True
        member.catch_up()
        self._advance(now)

    def loaded(self, name: str, number: int, is_ok: bool, error: str, now: float) -> None:
        """The engine has loaded `number`, or has failed to and holds nothing usable."""
        member = self.members[name]
        if member.swapping is not None and (number >= member.swapping or not is_ok):
            member.swapping = None
        if is_ok:
            self._note_load(member, number)
        else:
            self._note_failed_load(member, number, error, now)
        self._advance(now)

    def tick(self, now: float) -> None:
        """Let time pass."""
        for member in self.members.values():
            self._check_silence(member, now)
            if member.swapping is not None and now >= member.swap_until:
                self._miss_swap(member)
        self._advance(now)

    def _note_load(self, member: Member, number: int) -> None:
        member.serving, member.num_load_failures = number, 0
        if member.staged is not None and member.staged <= number:
            member.staged = None
        self.counters["swaps"] += 1
        member.catch_up()

    def _note_failed_load(self, member: Member, number: int, error: str, now: float) -> None:
        self.counters["failed_loads"] += 1
        member.serving, member.last_error = UNLOADED, error
        member.num_load_failures += 1
        if member.num_load_failures >= MAX_LOAD_FAILURES:
            member.num_load_failures, member.staged = 0, None
            self._blame(member, f"load failed {MAX_LOAD_FAILURES} times: {error}")
            self._back_off(member, now)
        else:
            member.staged = max(number, member.staged or 0)
            self._requeue(member)
        if member.state in (MemberState.SYNCING, MemberState.READY):
            member.move(MemberState.SYNCING)

    def _miss_swap(self, member: Member) -> None:
        self.counters["missed_swaps"] += 1
        self._take_back_swap(member)
        member.is_attended = False
        self._order(member.name, "withdraw")
        self._blame(member, "swap not done in time")

    def _take_back_swap(self, member: Member) -> None:
        if member.swapping is not None:
            member.staged = max(member.swapping, member.staged or 0)
            member.swapping = None
            self._requeue(member)

    def _requeue(self, member: Member) -> None:
        if member.name in self._swap_queue:
            self._swap_queue.remove(member.name)
        self._swap_queue.append(member.name)

    def _grant_swaps(self, now: float) -> None:
        num_swapping = sum(member.swapping is not None for member in self.members.values())
        for name in [name for name in self._swap_queue if self.members[name].may_swap()]:
            if num_swapping >= self.parallelism:
                return
            member = self.members[name]
            self._swap_queue.remove(name)
            member.swapping, member.staged = member.staged, None
            member.swap_until = now + self.timing.deadline_s
            self._order(name, "commit", number=member.swapping)
            num_swapping += 1

    # --- the round --------------------------------------------------------------------------------

    def _advance(self, now: float) -> None:
        if self.round is not None:
            self._progress(self.round, now)
        if self.round is None:
            self._start_round(now)
        self._grant_swaps(now)

    def _start_round(self, now: float) -> None:
        if self.current is None or self.publisher is None or self._is_silent(self.publisher.last_seen, now):
            return
        number = self.current.number
        able = [m for m in self.members.values() if m.may_be_offered(number, now)]
        names = self._choose([m for m in able if not self._is_silent(m.last_seen, now)])
        if not names:
            return
        until = now + self.timing.offer_s
        self.round = Round(self._next_id(), self.current, now, until, dict.fromkeys(names, Part.OFFERED))
        for name in names:
            self.members[name].staging = number
            self._order(name, "offer", round=self.round.id, number=number)

    def _choose(self, able: list[Member]) -> list[str]:
        alone = [member.name for member in able if member.is_alone]
        together = [member.name for member in able if not member.is_alone]
        self._was_alone = bool(alone) and not (together and self._was_alone)
        return alone[:1] if self._was_alone else together

    def _progress(self, round_: Round, now: float) -> None:
        if round_.phase is Phase.OFFER:
            self._progress_offer(round_, now)
        else:
            self._progress_transfer(round_, now)
        if round_.is_over and self.round is round_:
            self._close(round_, now)

    def _progress_offer(self, round_: Round, now: float) -> None:
        for name in round_.those(Part.OFFERED):
            if now >= round_.until or self._is_silent(self.members[name].last_seen, now):
                self._leave_out(round_, name, "no answer to the offer")
        if not round_.those(Part.OFFERED) and round_.those(Part.ACCEPTED):
            self._start_transfer(round_, now)

    def _start_transfer(self, round_: Round, now: float) -> None:
        assert self.publisher is not None
        names = round_.those(Part.ACCEPTED)
        round_.phase, round_.until = Phase.TRANSFER, now + self.timing.deadline_s
        key = tuple((name, self.members[name].incarnation) for name in names)
        round_.membership = self._groups.find(key) or self._groups.add(key, self._next_id())
        abilities = [self.publisher.abilities, *(self.members[name].abilities for name in names)]
        shared = {
            "round": round_.id,
            "number": round_.version.number,
            "membership": round_.membership,
            "live": self._groups.live,
            "world": len(names) + 1,
            "backend": agree_on_backend(self.backend, abilities),
            "store_host": self.publisher.store_host,
            "store_port": self.publisher.store_port,
            "deadline_s": self.timing.deadline_s,
        }
        self._order(PUBLISHER, "transfer", rank=0, **shared)
        for rank, name in enumerate(names, start=1):
            self._set_part(name, Part.RECEIVING)
            self._order(name, "transfer", rank=rank, **shared)

    def _progress_transfer(self, round_: Round, now: float) -> None:
        assert self.publisher is not None
        for name in round_.those(Part.RECEIVING):
            if self._is_silent(self.members[name].last_seen, now):
                self._leave_out(round_, name, "silent")
                if round_.sender is Sender.PENDING:
                    self._break_round("silent", now)
        if round_.sender is Sender.PENDING and self._is_silent(self.publisher.last_seen, now):
            self._break_round("publisher_lost", now)
        if now >= round_.until:
            self._break_round("deadline", now)
        if round_.settle_until is not None and now >= round_.settle_until:
            for name in round_.those(Part.RECEIVING):
                self._leave_out(round_, name, "silent")

    def _break_round(self, cause: str, now: float) -> None:
        """The group is lost: ask all for a sign of life; who gives none in time is the culprit."""
        round_ = self.round
        if round_ is None or round_.is_broken:
            return
        round_.settle_until = now + self.timing.settle_s
        round_.causes[PUBLISHER] = cause
        if round_.sender is Sender.PENDING:
            round_.sender = Sender.FAILED
            self._order(PUBLISHER, "abort", round=round_.id)
        for name in round_.those(Part.OFFERED, Part.ACCEPTED):
            self._set_part(name, Part.FAILED)
            self._order(name, "abort", round=round_.id)
        for name in round_.those(Part.RECEIVING):
            self._order(name, "abort", round=round_.id)

    def _close(self, round_: Round, now: float) -> None:
        self.round = None
        failed, left_out = round_.those(Part.FAILED), round_.those(Part.LEFT_OUT)
        self.counters["rounds"] += 1
        if failed or left_out:
            self._count_failure(round_)
            self._groups.drop(round_.membership)
        else:
            self.last_round_s = now - round_.started
        has_culprit = bool(left_out) or round_.causes.get(PUBLISHER) in BLAMELESS
        for name in failed:
            self._judge(self.members[name], round_, has_culprit, now)

    def _count_failure(self, round_: Round) -> None:
        causes = set(round_.causes.values()) or {"deadline"}
        self.counters["rounds_failed"] += 1
        for cause in sorted(causes):
            self.counters[f"rounds_failed/{cause}"] += 1

    def _judge(self, member: Member, round_: Round, has_culprit: bool, now: float) -> None:
        """Decide about a member that failed: blame it, try it alone, or just try it again."""
        cause = round_.causes.get(member.name, "")
        if cause not in ("", "transport", "aborted"):
            self._blame(member, cause)
            self._back_off(member, now)
        elif not has_culprit and len(round_.parts) == 1:
            self._blame(member, "failed alone")
            self._back_off(member, now)
        elif not has_culprit:
            member.is_alone = True

    # --- small parts ------------------------------------------------------------------------------

    def _order(self, to: str, kind: str, **fields: Any) -> None:
        self._orders.append(Order(to, kind, fields))

    def _next_id(self) -> int:
        self._last_id += 1
        return self._last_id

    def _is_silent(self, last_seen: float, now: float) -> bool:
        return now - last_seen >= self.timing.silence_s

    def _is_sending(self, round_id: int) -> bool:
        round_ = self.round
        return round_ is not None and round_.id == round_id and round_.sender is Sender.PENDING

    def _part(self, name: str, round_id: int) -> Part | None:
        if self.round is None or self.round.id != round_id:
            return None
        return self.round.parts.get(name)

    def _set_part(self, name: str, part: Part) -> None:
        assert self.round is not None
        self.round.parts[name] = part
        if part in (Part.VERIFIED, Part.FAILED, Part.LEFT_OUT):
            self.members[name].staging = None

    def _sent_numbers(self) -> set[int]:
        """Numbers that some member has or is getting."""
        return {n for m in self.members.values() for n in (m.serving, m.staging, m.staged, m.swapping) if n}

    def _leave_out(self, round_: Round, name: str, cause: str) -> None:
        self._set_part(name, Part.LEFT_OUT)
        round_.causes[name] = cause
        self._order(name, "abort", round=round_.id)
        self._blame(self.members[name], cause)

    def _leave_round(self, member: Member, cause: str, now: float) -> None:
        """Take a member out of the running round without blame."""
        round_ = self.round
        if round_ is None or member.name not in round_.those(Part.OFFERED, Part.ACCEPTED, Part.RECEIVING):
            return
        was_receiving = round_.parts[member.name] is Part.RECEIVING
        self._set_part(member.name, Part.FAILED)
        round_.causes[member.name] = "aborted"
        member.last_error = cause
        self._order(member.name, "abort", round=round_.id)
        if was_receiving:
            self._break_round("left", now)

    def _blame(self, member: Member, cause: str) -> None:
        self.culprit = f"{member.name}: {cause}"
        member.last_error = cause
        self.counters["culprits"] += 1
        if member.is_listening:
            member.fence(self.current.number if self.current else UNLOADED + 1)

    def _back_off(self, member: Member, now: float) -> None:
        member.num_failures += 1
        member.retry_at = now + min(MAX_BACKOFF_S, self.timing.backoff_s * 2 ** (member.num_failures - 1))

    def _check_silence(self, member: Member, now: float) -> None:
        if not member.is_listening:
            return
        if now - member.last_seen >= self.timing.dead_s:
            self._leave_round(member, "dead", now)
            member.move(MemberState.DEAD)
            self._forget_progress(member)
            self._groups.forget(member.name)
        elif member.state is not MemberState.SUSPECT and self._is_silent(member.last_seen, now):
            member.fence(self.current.number if self.current else UNLOADED + 1)

    def _forget_progress(self, member: Member) -> None:
        member.staging = member.staged = member.swapping = None
        member.is_attended = False
