"""A session: what one agent asks and is answered in one episode, and the calls that are in flight.

Owns the calls. Invariant: an answer is recorded to the branch that its call was placed on; nothing is
recorded of a call that has ended.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

import msgspec

from asyncrl.buffer.ledger.orders import sample_seed
from asyncrl.buffer.messages import LeaseGrant
from asyncrl.core.errors import AsyncrlError, WireError
from asyncrl.core.experience import Trajectory, check_reward
from rollout_service.gateway.conversation.branches import Branch, Branches
from rollout_service.gateway.conversation.history import Asked, Step, Told, comparable, reply_in_text
from rollout_service.gateway.conversation.session_records import (
    Answered,
    Entry,
    Rewarded,
    answered,
    restore,
)
from rollout_service.gateway.conversation.transcript import Turn
from rollout_service.gateway.keys import lookup_of, make_marker
from rollout_service.gateway.refusal import EpisodeFailed, Refusal

if TYPE_CHECKING:
    from rollout_service.data.prompts import TokenizedPrompt

MAX_CALLS = 16
"""In flight at once, of one session."""


class Siblings(Protocol):
    """The group of a session."""

    @property
    def grant(self) -> LeaseGrant: ...

    @property
    def prompt(self) -> TokenizedPrompt: ...

    @property
    def deadline(self) -> float: ...

    @property
    def has_failed(self) -> bool: ...

    @property
    def part_names(self) -> set[str]: ...

    def fail(self, error: AsyncrlError) -> None: ...

    async def keep(self, entry: Entry) -> None: ...

    def check_complete(self) -> None: ...


@dataclass(eq=False)
class Call:
    """One request in flight.

    Attributes:
        asked: Input of the model, once vLLM has read the request (`ask`).
        branch: The conversation that it belongs to, once it has asked; `holds_branch` until it is answered.
        room: Most tokens that the answer may have.
        num_recorded: Ids of its prompt that are earlier turns.
        added: What it adds to the turns of its branch.
        told: The turn that it has become, of branch `told_on`. is_shown: Its messages are the client's.
        entry: That turn's for the group's journal, until it is there.
        marker: Stands in the rendered chat for the answer that is recorded.
        request_id: The engine's, once it has the request.
        refusal: Why the call was refused, for the time that vLLM's handlers pass an error on as their own.
    """

    session: Session
    asked: Asked | None = None
    branch: Branch = field(default_factory=lambda: Branch(0))
    holds_branch: bool = False
    step: Step = Step.FIRST
    room: int = 0
    num_recorded: int = 0
    added: Asked | None = None
    told: Told | None = None
    told_on: Branch = field(default_factory=lambda: Branch(0))
    entry: Answered | None = None
    is_shown: bool = False
    marker: str = field(default_factory=make_marker)
    request_id: str = ""
    refusal: Refusal | None = None

    def ask(self, asked: Asked) -> None:
        """Take the input of the call.

        Raises:
            Refusal: It would begin one branch too many. That ends the group: what this agent says to its
                model cannot be recorded.
        """
        with self._ending_group():
            self.branch, self.step = self.session.branches.take(asked)
        is_again = self.step is Step.AGAIN
        self.added = self.branch.told[-1].added if is_again else self.branch.added_by(asked)
        self.asked, self.holds_branch = asked, True

    @contextlib.contextmanager
    def _ending_group(self) -> Iterator[None]:
        """End the group where a branch too many was refused."""
        session = self.session
        try:
            yield
        except Refusal as error:
            session.group.fail(EpisodeFailed(f"{error.code}: session {session.id}: {error.message}"))
            self.refusal = error
            raise

    def seed(self, run_seed: int) -> int:
        """Return the seed of its answer: asked again, a turn has the seed that it had."""
        branch, ticket = self.branch, self.session.group.grant.ticket
        seed = sample_seed(run_seed, ticket, self.session.sample)
        turn = len(branch.told) - (self.step is Step.AGAIN)
        if branch.number:
            return sample_seed(seed, -branch.number, turn)  # no ticket is negative: no other turn has it
        return sample_seed(seed, ticket, turn) if turn else seed

    def record(self, turn: Turn) -> None:
        """Keep the answer, unless the call has ended: its client has gone, and may have asked again.

        Raises:
            Refusal: It was asked again, another call went on from the first answer meanwhile, and a branch
                for both is one too many. That ends the group.
        """
        if self not in self.session.calls:
            return
        assert self.added is not None, "it has asked"
        branch, branches, session = self.branch, self.session.branches, self.session
        replaces = self.step is Step.AGAIN and branches.may_replace(branch)
        if self.step is Step.AGAIN and not replaces:
            with self._ending_group():
                branch = branches.begin_beside(branch)
        self.told_on, self.told = branch, Told(self.added, reply_in_text(turn.text))
        branch.add(turn, self.told, replaces=replaces)
        self.entry = answered(session.lookup, session.sample, session.group.grant.attempt, branch, turn)
        self.end()  # now: the client may go on as soon as it has read the end

    def answered(self, messages: Iterable[Mapping[str, object]]) -> None:
        """Keep the messages that the client gets as the answer; it sends them back with its next call."""
        if self.told is not None:
            said = tuple(comparable(message) for message in messages)
            self.told.reply = replace(self.told.reply, messages=said)
            self.is_shown = True

    @property
    def is_answered(self) -> bool:
        """Whether the answer is known as its client gets it."""
        return self.told is not None and (self.is_shown or self.told.added.kind != "chat")

    async def keep(self) -> None:
        """Return once the answer is recorded where it outlives this replica; before the client has its end.

        Raises:
            Refusal: It cannot be: the lease of its group is lost.
        """
        entry, self.entry = self.entry, None
        if entry is not None and self.told in self.told_on.told:  # else another answer has its place
            assert self.told is not None, "it has an entry"
            await self.session.group.keep(msgspec.structs.replace(entry, reply=self.told.reply))

    def end(self) -> None:
        """Let the session go on without it."""
        self.session.calls.discard(self)
        self._leave()

    def _leave(self) -> None:
        if self.holds_branch:
            self.holds_branch = False
            self.session.branches.leave(self.branch)


class Session:
    """Session that one key opens: one episode, which may have several branches, at most `max_branches`."""

    def __init__(self, key: str, group: Siblings, sample: int, max_branches: int) -> None:
        self.key, self.lookup = key, lookup_of(key)
        self.group = group
        self.sample = sample
        self.branches = Branches(max_branches)
        self.calls: set[Call] = set()
        self.reward: float | None = None
        self.parts: Mapping[str, float] = {}
        self.reason = ""
        self._max_calls = MAX_CALLS if max_branches > 1 else 1

    @property
    def id(self) -> str:
        grant = self.group.grant
        return f"{grant.ticket}.{grant.attempt}.{self.sample}"

    def begin(self) -> Call:
        """Return a call; `end` it in any case.

        Raises:
            Refusal: Too many calls are in flight, or the reward was given.
        """
        if self.reward is not None:
            raise Refusal("this session is closed: its reward was given", status=410, code="session_closed")
        if len(self.calls) == self._max_calls:
            what = f"calls of this session are in flight, {self._max_calls} at most"
            raise Refusal(what, status=409, code="call_in_flight")
        call = Call(self)
        self.calls.add(call)
        return call

    def close(self, reward: float, parts: Mapping[str, float], reason: str = "") -> None:
        """End the episode with its reward, and the reason of one of 0 or less; the same twice is no error.

        Raises:
            Refusal: A call is in flight, there is no answer to reward, another reward was given, the group
                has ended, or could not be pushed with this reward.
        """
        if self.group.has_failed:
            raise Refusal("this session's group has ended", status=410, code="session_closed")
        if self.calls:
            raise Refusal("a call of this session is in flight", status=409, code="call_in_flight")
        if not any(self.branches):
            raise Refusal("this session has no answer that a reward could be for", code="no_answer")
        if self.reward is not None and (self.reward, dict(self.parts)) != (reward, dict(parts)):
            raise Refusal("this session has another reward", status=409, code="session_closed")
        try:
            check_reward(reward, parts, self.group.part_names)
        except WireError as error:
            raise Refusal(error.message) from None
        self.reward, self.parts, self.reason = reward, parts, reason
        self.group.check_complete()

    async def keep_reward(self) -> None:
        """Return once the reward is recorded as answers are, unless the group has ended by now."""
        with contextlib.suppress(Refusal):
            assert self.reward is not None, "it was given"
            told = self.reward, dict(self.parts), self.reason
            await self.group.keep(Rewarded(self.lookup, self.sample, *told))

    def restore(self, entries: Iterable[Entry]) -> None:
        """Become what these entries tell of it. Raises WireError."""
        for entry in entries:
            self.lookup = entry.key
            if isinstance(entry, Answered):
                restore(self.branches, entry)
            else:
                self.reward, self.parts, self.reason = entry.reward, entry.parts, entry.reason

    def trajectories(self, num_prompt_tokens: int) -> list[Trajectory]:
        """Return the episode's trajectories after the first `num_prompt_tokens` ids; each has its reward."""
        reward = self.reward or 0.0
        return [
            one.transcript.trajectory(num_prompt_tokens, reward, self.parts, self.reason)
            for one in self.branches
        ]
