"""Sessions: one agent's conversation, which becomes one trajectory of a leased group.

    openers wait -> the replica leases a group -> its samples go to the openers -> calls -> reward
    all siblings have a reward -> the group; one failed, or the deadline came -> EpisodeFailed

Owns who holds which sample of which lease. A group is asked of the ledger only while somebody waits for
a session. Invariant: a session belongs to one (ticket, attempt, sample) of a lease that is held; when the
lease's group ends, in whatever way, its sessions are closed, and their keys answer with the reason.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from asyncrl.buffer.messages import LeaseGrant
from asyncrl.core.errors import AsyncrlError, WireError
from asyncrl.core.experience import Group, Trajectory
from asyncrl.core.states import Reason
from asyncrl.core.status.replica import GatewayStatus
from rollout_service.gateway.conversation.session import Session
from rollout_service.gateway.conversation.session_records import Entry, SessionJournal, by_session
from rollout_service.gateway.conversation.transcript import common_prompt
from rollout_service.gateway.keys import lookup_of, make_session_key
from rollout_service.gateway.refusal import EpisodeFailed, NobodyCame, Refusal
from rollout_service.gateway.rules import Rules
from rollout_service.sampling.groups import gather_prompt_experts
from rollout_service.sampling.turn_journal import Journal

if TYPE_CHECKING:
    from rollout_service.data.prompts import PromptSet, TokenizedPrompt

log = logging.getLogger(__name__)

MAX_WAITING = 1024
MAX_REMEMBERED = 4096
"""Ended sessions whose keys still answer with the reason."""
UNOPENED_S = 10.0
"""Time that a group waits for its first session: its client may have gone, or asks again at once."""
RETURN_WAIT_S = 8.0
"""Time that one call waits for its session to be made again."""
DRAINING = "draining: this replica is about to stop"
LOST = "its group is no longer this replica's"


class OpenGroup:
    """A leased group whose samples agents generate.

    Args:
        journal: Records the sessions, where they are to outlive this replica.
    """

    def __init__(
        self,
        grant: LeaseGrant,
        prompt: TokenizedPrompt,
        size: int,
        deadline: float,
        journal: SessionJournal | None = None,
    ) -> None:
        self._journal = journal
        self.grant = grant
        self.prompt = prompt
        self.size = size
        self.deadline = deadline
        self.sessions: list[Session] = []
        self.outcome: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def num_left(self) -> int:
        """Samples that no agent has taken."""
        return 0 if self.outcome.done() else self.size - len(self.sessions)

    @property
    def is_whole(self) -> bool:
        return self.outcome.done() and not self.outcome.cancelled() and self.outcome.exception() is None

    @property
    def num_rewarded(self) -> int:
        return sum(session.reward is not None for session in self.sessions)

    @property
    def part_names(self) -> set[str]:
        """Names of all parts of the rewards so far."""
        return {name for session in self.sessions for name in session.parts}

    @property
    def has_failed(self) -> bool:
        return self.outcome.done() and not self.is_whole

    def open(self, max_branches: int) -> Session:
        """Return a session for the first sample that nobody has; `sessions` are in the samples' order."""
        free = set(range(self.size)) - {session.sample for session in self.sessions}
        session = Session(make_session_key(), self, min(free), max_branches)
        self.sessions.insert(session.sample, session)
        return session

    def restore(self, max_branches: int) -> None:
        """Make the sessions of earlier attempts again."""
        for sample, entries in sorted(by_session(self._journal.past if self._journal else ()).items()):
            session = Session("", self, sample, max_branches)
            try:
                session.restore(entries)
            except WireError as error:
                log.warning("session %s begins anew: %s", session.id, error)
            else:
                self.sessions.append(session)
        self.check_complete()

    async def keep(self, entry: Entry) -> None:
        """Return once `entry` is recorded, or its whole group pushed; its client may hang up meanwhile.

        Raises:
            Refusal: It cannot be; the group has ended.
        """
        if self._journal is None or self.has_failed:
            return
        self._journal.note(entry)
        try:
            await asyncio.shield(asyncio.ensure_future(self._journal.flush()))
        except AsyncrlError as error:
            self.fail(error)
            what = f"this session has ended: {error.message}"
            raise Refusal(what, status=410, code="session_closed") from error

    def fail(self, error: AsyncrlError) -> None:
        """End the group with `error`; the first one counts."""
        if not self.outcome.done():
            self.outcome.set_exception(error)

    def check_complete(self) -> None:
        """End the group well once every sibling has its reward."""
        if self.num_rewarded == self.size and not self.outcome.done():
            self.outcome.set_result(None)

    def assemble(self, rules: Rules) -> Group:
        """Return the group: its prompt is what the first prompts of all conversations begin with.

        Raises:
            EpisodeFailed: The prompts have nothing in common.
        """
        transcripts = [branch.transcript for session in self.sessions for branch in session.branches]
        first_prompts = [transcript.first_prompt for transcript in transcripts]
        num_common = common_prompt(first_prompts)
        if not num_common:
            raise EpisodeFailed("prompts_differ: the first prompts of the siblings begin differently")
        episodes = [session.trajectories(num_common) for session in self.sessions]
        told = [_masked(one, rules.masks_cut) for episode in episodes for one in episode]
        prompt_experts, trajectories = gather_prompt_experts(told, num_common)
        samples = tuple(sample for sample, episode in enumerate(episodes) for _ in episode)
        prompt_ids = np.asarray(first_prompts[0][:num_common], dtype=np.int32)
        forked = samples if len(samples) > self.size else ()
        identity = self.grant.ticket, self.grant.attempt, prompt_ids
        return Group(*identity, tuple(trajectories), forked=forked, prompt_experts=prompt_experts)


def _masked(trajectory: Trajectory, masks_cut: bool) -> Trajectory:
    if not (masks_cut and trajectory.finish_reason == "length"):
        return trajectory
    return replace(trajectory, loss_mask=np.zeros_like(trajectory.loss_mask))


class SessionManager:
    """Gives sessions out and brings groups in. All calls come from one event loop.

    Args:
        deadline_s: From a group's lease to the reward of its last session.
        abort: Ends requests in the engine, by id.
        return_s: From a start, in which agents of the replica before it may come back to their sessions;
            0 if these are not recorded.
    """

    journal = SessionJournal

    def __init__(
        self,
        prompts: PromptSet,
        rules: Rules,
        deadline_s: float,
        abort: Callable[[list[str]], Awaitable[None]],
        *,
        return_s: float = 0.0,
    ) -> None:
        self.rules = rules
        self._return_until = time.monotonic() + return_s if return_s else 0.0
        self._returning: dict[bytes, asyncio.Future[None]] = {}
        self.counters: Counter[str] = Counter()
        self.overridden: Counter[str] = Counter()
        self.on_demand: Callable[[], None] = lambda: None
        self._prompts = prompts
        self._deadline_s = deadline_s
        self._abort = abort
        self._groups: dict[tuple[int, int], OpenGroup] = {}
        self._sessions: dict[bytes, Session] = {}
        self._ended: OrderedDict[bytes, str] = OrderedDict()
        self._waiting: deque[asyncio.Future[Session]] = deque()
        self._closed_for = ""
        self._idle_since = time.monotonic()

    @property
    def idle_s(self) -> float:
        """Time since an agent last had a session or waited for one."""
        is_idle = not (self._sessions or self._waiting)
        return time.monotonic() - self._idle_since if is_idle else 0.0

    # Agents

    async def open(self, wait_s: float) -> Session:
        """Return a new session, within `wait_s`.

        Raises:
            Refusal: There is no group for it: the ledger admits none, or this replica is full or draining.
        """
        if self._closed_for:
            raise Refusal(self._closed_for, status=503, code="draining")
        group = next((group for group in self._groups.values() if group.num_left), None)
        if group is not None:
            return self._enter(group.open(self.rules.max_branches))
        if len(self._waiting) >= MAX_WAITING:
            raise Refusal("too many agents wait for a session", status=503, code="no_session")
        waiter: asyncio.Future[Session] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiter)
        self.on_demand()
        try:
            return await asyncio.wait_for(waiter, wait_s)
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                self.take_back(waiter.result())
            raise
        except TimeoutError:
            what = f"no group was admitted within {wait_s:g} s"
            hint = "The learner has enough for now, or this replica is full; ask again"
            raise Refusal(what, hint=hint, status=503, code="no_session") from None
        finally:
            self._idle_since = time.monotonic()
            if waiter in self._waiting:
                self._waiting.remove(waiter)

    def take_back(self, session: Session) -> None:
        """Free the sample of a session whose agent had gone before it got the key."""
        group = self._groups.get(session.group.grant.key)
        if group is None or group.outcome.done():
            return  # its end ends the session
        group.sessions.remove(session)
        del self._sessions[session.lookup]
        self.counters["sessions_taken_back"] += 1
        self._serve_waiting(group)

    def find(self, key: str) -> Session:
        """Return the session that `key` opens. Raises Refusal: there is none, or it has ended."""
        lookup = lookup_of(key)
        session = self._sessions.get(lookup)
        if session is not None:
            return session
        if self.is_to_return:
            why = "this replica ends; its sessions go on at the same address once it is back"
            raise Refusal(why, status=503, code="draining")
        if lookup in self._ended:
            raise Refusal(f"this session has ended: {self._ended[lookup]}", status=410, code="session_closed")
        if self._return_s > 0:
            raise Refusal("the session is not back yet: ask again", status=503, code="no_session")
        raise Refusal("the session key is missing or wrong", status=401, code="unauthorized")

    @property
    def is_to_return(self) -> bool:
        """Whether sessions that end now go on when this replica is back."""
        return self._return_until > 0 and bool(self._closed_for)

    @property
    def _return_s(self) -> float:
        """Time that agents of the replica before this one still have to come back."""
        return self._return_until - time.monotonic()

    async def await_return(self, key: str) -> None:
        """Wait a little for the session of an unknown key: a replica that died may have had it."""
        lookup = lookup_of(key)
        is_known = lookup in self._sessions or lookup in self._ended or self._closed_for
        if not key or is_known or self._return_s <= 0 or len(self._returning) >= MAX_WAITING:
            return
        back = self._returning.setdefault(lookup, asyncio.get_running_loop().create_future())
        self.on_demand()
        try:
            await asyncio.wait([back], timeout=min(RETURN_WAIT_S, self._return_s))
        finally:
            if self._returning.get(lookup) is back:
                del self._returning[lookup]

    def why_ended(self, session: Session) -> str:
        """Return the reason that the key of an ended session answers with."""
        return self._ended.get(session.lookup, "it was aborted")

    def remaining_s(self, session: Session) -> float:
        return max(0.0, session.group.deadline - asyncio.get_running_loop().time())

    # The replica

    @property
    def num_groups_wanted(self) -> int:
        """Number of groups that the waiting agents could begin."""
        return math.ceil((len(self._waiting) + len(self._returning)) / self.rules.group_size)

    def status(self, url: str) -> GatewayStatus:
        """Return how many sessions are open, counts, and how often a parameter was replaced."""
        return GatewayStatus(
            url=url,
            sessions=len(self._sessions),
            sessions_counted=dict(self.counters),
            overridden=dict(self.overridden),
        )

    async def run(self, grant: LeaseGrant, partial: Group | Journal | None = None) -> Group:
        """Let agents generate the grant's group, and return it. The same seam as `GroupRunner.run`.

        Args:
            partial: Journal of its sessions, if they are recorded.

        Raises:
            EpisodeFailed: The siblings were not complete by the deadline, or one of them failed.
            NobodyCame: No agent has a session of the group.
            EngineDied: The engine is gone.
        """
        deadline = asyncio.get_running_loop().time() + self._deadline_s
        prompt, size = self._prompts.at(grant.index), self.rules.group_size
        journal = partial if isinstance(partial, SessionJournal) else None
        group = self._groups[grant.key] = OpenGroup(grant, prompt, size, deadline, journal)
        ending = LOST
        group.restore(self.rules.max_branches)
        for session in group.sessions:
            self._sessions[session.lookup] = session
            self.counters["sessions_restored"] += 1
            if (back := self._returning.pop(session.lookup, None)) is not None:
                back.set_result(None)
        self._serve_waiting(group)
        try:
            await self._outcome_of(group)
            assembled = group.assemble(self.rules)
            ending = "its group is complete"
            return assembled
        except TimeoutError:
            what = self._what_is_missing(group)
            error = EpisodeFailed(what, reason=Reason.TIMEOUT) if group.sessions else NobodyCame(what)
            ending = error.message
            raise error from None
        except AsyncrlError as error:
            ending = error.message
            raise
        finally:
            self.counters["groups_complete" if group.is_whole else "groups_ended"] += 1
            await self._end(group, self._closed_for if ending == LOST and self._closed_for else ending)

    def is_complete(self, group: Group) -> bool:
        """Tell whether a group that `run` returned is whole: it always is."""
        return True

    def fits(self, grant: LeaseGrant, partial: Group) -> bool:
        """Tell whether agents could go on from a group's tokens: their sessions are not among them."""
        return False

    def refuse_sessions(self, why: str = DRAINING) -> None:
        """Give no more sessions out. Groups with all their siblings go on; the others are handed back."""
        self._closed_for = why
        for group in self._groups.values():
            if group.num_left:
                group.outcome.cancel()
        for waiter in self._waiting:
            if not waiter.done():
                waiter.set_exception(Refusal(why, status=503, code="draining"))

    def fail_all(self, error: AsyncrlError) -> None:
        """End all groups: the engine cannot go on."""
        for group in self._groups.values():
            group.fail(error)

    async def _outcome_of(self, group: OpenGroup) -> None:
        """Wait until all siblings have a reward. Raises the group's error, TimeoutError if they have not."""
        await asyncio.wait([group.outcome], timeout=min(UNOPENED_S, self._deadline_s))
        if not (group.sessions or group.outcome.done()):
            raise TimeoutError
        await asyncio.wait_for(group.outcome, group.deadline - asyncio.get_running_loop().time())

    def _serve_waiting(self, group: OpenGroup) -> None:
        while group.num_left and self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.done():
                waiter.set_result(self._enter(group.open(self.rules.max_branches)))

    def _enter(self, session: Session) -> Session:
        self._sessions[session.lookup] = session
        self.counters["sessions"] += 1
        return session

    def _what_is_missing(self, group: OpenGroup) -> str:
        return (
            f"siblings_missing: {group.num_rewarded} of {group.size} sessions had a reward after "
            f"{self._deadline_s:g} s, {len(group.sessions)} were opened"
        )

    async def _end(self, group: OpenGroup, ending: str) -> None:
        del self._groups[group.grant.key]
        group.outcome.cancel()  # where it is still open: nothing of the group counts any more
        in_flight: list[str] = []
        for session in group.sessions:
            del self._sessions[session.lookup]
            self._ended[session.lookup] = ending
            in_flight += [call.request_id for call in session.calls if call.request_id]
        self._idle_since = time.monotonic()
        while len(self._ended) > MAX_REMEMBERED:
            self._ended.popitem(last=False)
        if in_flight:
            await self._abort(in_flight)
