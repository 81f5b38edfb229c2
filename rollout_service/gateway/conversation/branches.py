"""The branches of a session: its conversation, and what calls with another history made of it (pure).

Clients compact a conversation, hand part of it to a sub-agent, try a turn again, leave out thoughts. A call
goes on from as many recorded answers as its history holds, from the first on. If these are all of a branch,
it is that branch's next turn; else it begins another branch, which has their tokens once more. Invariant: an
answer is trained in the branch that sampled it, and in no other.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rollout_service.gateway.conversation.history import HISTORY_CHANGED, Asked, Reply, Step, is_continued
from rollout_service.gateway.conversation.transcript import Transcript
from rollout_service.gateway.refusal import Refusal


@dataclass(frozen=True)
class Told:
    """One answered call: its input, and the answer as the client got it."""

    asked: Asked
    reply: Reply


class Branch:
    """One conversation, whose turns are `told` and, as tokens, in `transcript`.

    Attributes:
        number: Of the branch in its session, from 0: part of its seeds.
        is_busy: A call that it waits for is in flight.
        num_taken: Turns that other branches have taken along.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.told: list[Told] = []
        self.transcript = Transcript()
        self.is_busy = False
        self.num_taken = 0

    @property
    def is_answered(self) -> bool:
        """Whether it has a turn of its own."""
        return len(self.told) > self.transcript.num_shared

    def count_held(self, asked: Asked) -> int:
        """Return how many of its turns the history of `asked` holds."""
        for place in range(len(self.told), 0, -1):
            told, ids = self.told[place - 1], self.transcript.ids_after(place)
            if is_continued(told.asked, told.reply, ids, asked):
                return place
        return 0

    def may_repeat(self, asked: Asked) -> bool:
        """Tell whether `asked` is its last call again, which nothing has gone on from."""
        is_last_own = self.is_answered and self.num_taken < len(self.told)
        return is_last_own and not self.is_busy and self.told[-1].asked == asked

    def fork(self, number: int, place: int) -> Branch:
        """Return a branch that begins with the first `place` turns."""
        branch = Branch(number)
        if place:
            self.num_taken = max(self.num_taken, place)
            branch.told, branch.transcript = self.told[:place], self.transcript.share(place)
        return branch


class Branches:
    """All branches of one session, at most `limit`."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._branches: list[Branch] = []

    def __iter__(self) -> Iterator[Branch]:
        """Yield those with a turn of their own, the oldest first."""
        return (branch for branch in self._branches if branch.is_answered)

    def take(self, asked: Asked) -> tuple[Branch, Step]:
        """Return the branch of a call, busy from now on, and how the call goes on from it.

        Raises:
            Refusal: It would begin one branch too many: `history_changed`.
        """
        branch, step = self._place(asked)
        branch.is_busy = True
        return branch, step

    def _place(self, asked: Asked) -> tuple[Branch, Step]:
        for branch in self._branches:
            if branch.may_repeat(asked):
                return branch, Step.AGAIN
        held = [(branch.count_held(asked), not branch.is_busy, branch) for branch in self._branches]
        place, is_idle, nearest = max(held, key=lambda one: one[:2], default=(0, False, Branch(0)))
        if place == len(nearest.told) > 0 and is_idle:
            return nearest, Step.NEXT
        if len(self._branches) == self._limit:
            raise Refusal(
                "the conversation before this call is not one that this session recorded"
                + (f", and it has {self._limit} branches" if self._limit > 1 else ""),
                hint="Send back all earlier messages and answers as they were, open a session per "
                "conversation, or raise rollout.gateway.max_branches",
                code=HISTORY_CHANGED,
            )
        number = min(set(range(self._limit)) - {branch.number for branch in self._branches})
        branch = nearest.fork(number, place)
        self._branches.append(branch)
        return branch, Step.NEXT if place else Step.FIRST

    def leave(self, branch: Branch) -> None:
        """Let the branch take the next call; one that was never answered is none."""
        branch.is_busy = False
        if not branch.is_answered:
            self._branches.remove(branch)
