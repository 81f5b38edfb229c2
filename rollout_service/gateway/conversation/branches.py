"""The branches of a session: its conversation, and what calls with another history made of it (pure).

Clients compact a conversation, hand part of it to a sub-agent, try a turn again, leave out thoughts. A call
goes on from as many recorded answers as its history holds, from the first on. If these are all of a branch,
it is that branch's next turn; else it begins another branch, which has their tokens once more. Invariant: an
answer is trained in the branch that sampled it, and in no other.
"""

from __future__ import annotations

from collections.abc import Iterator

from rollout_service.gateway.conversation.history import HISTORY_CHANGED, Asked, Step, Told
from rollout_service.gateway.conversation.transcript import Transcript, Turn
from rollout_service.gateway.refusal import Refusal


class Branch:
    """One conversation, whose turns are `told` and, as tokens, in `transcript`.

    Attributes:
        number: Of the branch in its session, from 0: part of its seeds.
        origin: Number of the branch that it begins as.
        is_busy: A call that it waits for is in flight.
    """

    def __init__(self, number: int, origin: int = 0) -> None:
        self.number, self.origin = number, origin
        self.told: list[Told] = []
        self.transcript = Transcript()
        self.is_busy = False

    @property
    def is_answered(self) -> bool:
        """Whether it has a turn of its own."""
        return len(self.told) > self.transcript.num_shared

    def count_held(self, asked: Asked) -> int:
        """Return how many of its turns the history of `asked` holds."""
        return self._follow(asked)[0]

    def added_by(self, asked: Asked) -> Asked:
        """Return what a call that goes on from all turns adds to them."""
        return asked.after(self._follow(asked)[1])

    def _follow(self, asked: Asked) -> tuple[int, int]:
        """Return how many turns `asked` holds, and where it goes on: of its messages or its text."""
        if not self.told or not asked.is_alike(self.told[0].added):
            return 0, 0
        if asked.kind == "ids":
            return self.transcript.count_held(asked.ids), 0
        start = 0
        for place, told in enumerate(self.told):
            end = told.end_in(asked, start)
            if end is None:
                return place, start
            start = end
        return len(self.told), start

    def is_last(self, asked: Asked) -> bool:
        """Tell whether `asked` is the call that its last turn answers."""
        if not self.told or not asked.is_alike(self.told[0].added):
            return False
        if asked.kind == "ids":
            return asked.ids == self.transcript.last_prompt
        place, start = self._follow(asked)
        return place == len(self.told) - 1 and asked.after(start) == self.told[-1].added

    def add(self, turn: Turn, told: Told, *, replaces: bool) -> None:
        """Record its next turn, or another one in the place of its last."""
        if replaces:
            self.transcript.replace_last(turn)
            self.told.pop()
        else:
            self.transcript.add(turn)
        self.told.append(told)

    def fork(self, number: int, place: int) -> Branch:
        """Return a branch that begins with the first `place` turns."""
        branch = Branch(number, self.number)
        if place:
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

    def at(self, number: int, origin: int, place: int) -> Branch:
        """Return the branch of that number; a new one begins with the first `place` turns of `origin`."""
        known = {branch.number: branch for branch in self._branches}
        if number not in known:
            known[number] = known.get(origin, Branch(origin)).fork(number, place)
            self._branches.append(known[number])
        return known[number]

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
            if not branch.is_busy and branch.is_last(asked) and self.may_replace(branch):
                return branch, Step.AGAIN
        nearest, place, is_next = Branch(0), 0, False
        for branch in self._branches:
            held = branch.count_held(asked)
            goes_on = held == len(branch.told) and not branch.is_busy
            if (held, goes_on) > (place, is_next):
                nearest, place, is_next = branch, held, goes_on
        if place and is_next:
            return nearest, Step.NEXT
        return self._begin(nearest, place), Step.NEXT if place else Step.FIRST

    def may_replace(self, branch: Branch) -> bool:
        """Tell whether no other branch has the last answer."""
        others = (other for other in self._branches if other is not branch)
        return not any(branch.told[-1] in other.told for other in others)

    def begin_beside(self, branch: Branch) -> Branch:
        """Return a branch that begins with all turns but the last. Raises Refusal as `take` does."""
        return self._begin(branch, len(branch.told) - 1)

    def _begin(self, origin: Branch, place: int) -> Branch:
        if len(self._branches) == self._limit:
            raise Refusal(
                "the conversation before this call is not one that this session recorded"
                + (f", and it has {self._limit} branches" if self._limit > 1 else ""),
                hint="Send back all earlier messages and answers as they were, open a session per "
                "conversation, or raise rollout.gateway.max_branches",
                code=HISTORY_CHANGED,
            )
        number = min(set(range(self._limit)) - {branch.number for branch in self._branches})
        branch = origin.fork(number, place)
        self._branches.append(branch)
        return branch

    def leave(self, branch: Branch) -> None:
        """Let the branch take the next call; one that was never answered is none."""
        branch.is_busy = False
        if not branch.is_answered:
            self._branches.remove(branch)
