"""Calls of tools that count once, whichever attempt makes them.

The model's turn stands at the buffer before its first call is made, and each result before the next one.
A call whose result is recorded is not made again. A call that may have been made and has no result, because
its attempt ended inside it, is made again under the same key if its tool is idempotent; otherwise its group
is given up. Invariant: neither arguments nor what a tool raised enters a message of an error.
"""

from __future__ import annotations

import traceback
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from asyncrl.core.states import Reason
from rollout_service.environments.protocol import EnvironmentFailed
from rollout_service.sampling.turn_journal import EpisodeRecord
from rollout_service.sampling.turn_records import Answered, Begun


@dataclass(frozen=True)
class CallKey:
    """Idempotency key of one call: equal whenever the same call is made again.

    Attributes:
        attempt: The one that sampled the turn of the call.
        index: Of the call in its turn.
        fencing_token: The attempt that makes the call, and no part of the key: a tool may refuse a lower one
            than it has seen of this ticket.

    >>> str(CallKey(7, 1, 0, 2, 0, fencing_token=3))
    '7.1.0.2.0'
    """

    ticket: int
    attempt: int
    sample: int
    turn: int
    index: int
    fencing_token: int

    def __str__(self) -> str:
        return f"{self.ticket}.{self.attempt}.{self.sample}.{self.turn}.{self.index}"


@dataclass(frozen=True)
class Outcome:
    """The text that the model reads. `is_last`: the turn's other calls are not made."""

    text: str
    is_last: bool = False


Make = Callable[[CallKey | None], Awaitable[Outcome]]
"""Makes a call. The key is None in an evaluation."""


@runtime_checkable
class MakesCalls(Protocol):
    """An environment with calls that must count once: before its start it is given `calls`."""

    calls: Calls


class Calls:
    """Makes the calls of one episode.

    Args:
        record: Of the episode's turns.
    """

    def __init__(self, record: EpisodeRecord) -> None:
        self._record = record

    @property
    def has_results(self) -> bool:
        """Whether the result of any call is recorded."""
        return any(turn.answers for turn in self._record.turns)

    async def make(self, index: int, tool: str, make: Make, *, is_idempotent: bool = False) -> Outcome:
        """Return the outcome of call `index` of the present turn; make it if there is none.

        Raises:
            EnvironmentFailed: The call raised; or it may have been made before, and must not be made twice.
        """
        record, key = self._record, self._key(index)
        if not record.turns:  # no runner plays this episode
            return await self._made(tool, key, make, index)
        turn = record.turns[-1]
        if index in turn.answers:
            return Outcome(turn.answers[index].text, turn.answers[index].is_last)
        if not is_idempotent:
            if index in turn.begun:
                raise EnvironmentFailed(
                    f"call {key} of the tool '{tool}' was begun by an attempt that ended inside it, and the "
                    "tool is not idempotent: it is not called again",
                    reason=Reason.NOT_RETRYABLE,
                )
            record.note(Begun(*record.place, index))
        await record.flush()
        if record.is_full and not is_idempotent:
            raise EnvironmentFailed(
                f"call {key} of the tool '{tool}' cannot be recorded, and the tool is not idempotent",
                hint="Raise buffer.memory_bytes or rollout.max_tokens",
            )
        outcome = await self._made(tool, key, make, index)
        record.note(Answered(*record.place, index, outcome.text, outcome.is_last))
        return outcome

    async def _made(self, tool: str, key: CallKey | None, make: Make, index: int) -> Outcome:
        self._record.pass_point("rollout.calling", index)
        try:
            outcome = await make(key)
        except EnvironmentFailed:
            raise
        except Exception as error:  # a tool may raise anything; where it did may be told, and no text of it
            frame = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{Path(frame.filename).name}:{frame.lineno}"
            what = f"call {key} of the tool '{tool}' raised {type(error).__name__} at {where}"
            raise EnvironmentFailed(what) from None
        self._record.pass_point("rollout.called", index)
        return outcome

    def _key(self, index: int) -> CallKey | None:
        turns = self._record.turns
        if self._record.key is None or not turns:
            return None
        ticket, attempt, sample = self._record.key
        return CallKey(ticket, turns[-1].attempt, sample, len(turns) - 1, index, fencing_token=attempt)
