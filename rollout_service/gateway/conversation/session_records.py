"""Records of agents' sessions, as the buffer keeps them: each answer and each reward, in order.

A replica that dies or drains takes its sessions with it; from these records another one makes them again, as
the same keys open them. Invariant: the entries of all records, one after the other, make each session what it
was when its last one was noted; an entry under a new key is of another agent's session, which takes the place
of the earlier one of that sample.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np

from asyncrl.core.errors import WireError
from asyncrl.core.wire import Frame
from rollout_service.engine.protocol import Completion
from rollout_service.gateway.conversation.branches import Branch, Branches
from rollout_service.gateway.conversation.history import Asked, Reply, Told
from rollout_service.gateway.conversation.transcript import Turn
from rollout_service.sampling import turn_records
from rollout_service.sampling.turn_journal import Journal, Send

log = logging.getLogger(__name__)


class Answered(msgspec.Struct, frozen=True, array_like=True, tag="call"):
    """An answer, and where it stands.

    Attributes:
        key: What the session is kept under (`keys.lookup_of`).
        branch: Its number. origin, place: What it began with, if it is new: so many turns of another one.
        prompt_ids: Int32, of the call's prompt what follows the answer before.
        said: Its turn counts from the branch's beginning; one that is there is asked again.
    """

    key: bytes
    branch: int
    origin: int
    place: int
    added: Asked
    reply: Reply
    prompt_ids: bytes
    text: str
    stop: str
    said: turn_records.Said
    routed: turn_records.Routed | None

    @property
    def sample(self) -> int:
        return self.said.sample


class Rewarded(msgspec.Struct, frozen=True, array_like=True, tag="reward"):
    """The reward of a session."""

    key: bytes
    sample: int
    reward: float
    parts: dict[str, float]
    reason: str


Entry = Answered | Rewarded
_DECODER = msgspec.msgpack.Decoder(list[Entry])


class SessionJournal(Journal):
    """The journal of a group's sessions. If earlier records cannot be read, its agents begin anew.

    Attributes:
        past: Entries of earlier attempts.
    """

    def __init__(self, ticket: int, attempt: int, send: Send | None, past: Sequence[Frame] = ()) -> None:
        super().__init__(ticket, attempt, send, past)
        self.past: list[Entry] = []
        try:
            self.past = [entry for record in past for entry in _DECODER.decode(record)]
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            log.warning("ticket %d: its sessions cannot be read: %s", ticket, error)
        for entry in self.past:
            if isinstance(entry, Answered):
                self._cover(entry.said.spans)

    def note(self, entry: Entry) -> None:
        """Take in an entry for the next `flush`."""
        if isinstance(entry, Answered):
            self._cover(entry.said.spans)
        self._noted.append(turn_records.encode(entry))


def answered(key: bytes, sample: int, attempt: int, branch: Branch, turn: Turn) -> Answered:
    """Return the entry of the last turn of a branch, which `attempt` sampled."""
    number, told = len(branch.told) - 1, branch.told[-1]
    num_known = len(branch.transcript.ids_before(number))
    ids, logprobs = np.array(turn.answer_ids, np.int32), np.array(turn.logprobs, np.float32)
    completion = Completion(ids, logprobs, turn.spans, turn.finish_reason)
    return Answered(
        key,
        *(branch.number, branch.origin, branch.transcript.num_shared),
        *(told.added, told.reply, np.array(turn.prompt_ids[num_known:], "<i4").tobytes()),
        *(turn.text, turn.stop, turn_records.said(sample, number, attempt, completion, "")),
        turn_records.routed(sample, number, turn.experts),
    )


def restore(branches: Branches, entry: Answered) -> None:
    """Let the branches of a session become what they were after `entry`. Raises WireError."""
    branch = branches.at(entry.branch, entry.origin, entry.place)
    said, number, num_told = turn_records.completion_of(entry.said), entry.said.turn, len(branch.told)
    if not max(entry.place, num_told - 1) <= number <= num_told:
        raise WireError(f"turn {number} of branch {entry.branch} does not follow {num_told} turns")
    known = branch.transcript.ids_before(number)
    turn = Turn(
        prompt_ids=(*known, *np.frombuffer(entry.prompt_ids, "<i4").tolist()),
        answer_ids=tuple(said.token_ids.tolist()),
        logprobs=tuple(said.logprobs.tolist()),
        spans=said.spans,
        finish_reason=said.finish_reason,
        text=entry.text,
        stop=entry.stop,
        experts=None if entry.routed is None else turn_records.experts_of(entry.routed),
    )
    branch.add(turn, Told(entry.added, entry.reply), replaces=number < num_told)


def by_session(entries: Iterable[Entry]) -> dict[int, list[Entry]]:
    """Return the entries of each sample's newest session."""
    found: dict[int, list[Entry]] = {}
    for entry in entries:
        known = found.setdefault(entry.sample, [])
        if known and known[0].key != entry.key:
            known.clear()
        known.append(entry)
    return found
