"""Records of an episode's turns, as the buffer keeps them, and the turns that they make (pure).

A record is a list of entries of the samples of one group, in the order in which they came about. Invariant:
the entries of all records, one after the other, say how far each sample is; a turn that is said again takes
the place of the earlier one and of all after it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Annotated, cast

import msgspec
import numpy as np

from asyncrl.core.errors import WireError
from asyncrl.core.experts import FIELD, Rows, read_column
from asyncrl.core.experts import encode as pack
from asyncrl.core.staleness import Span
from asyncrl.core.wire import Frame
from rollout_service.engine.protocol import Completion
from rollout_service.environments.protocol import Observation, PlainObservation, Step


class Entry(msgspec.Struct, frozen=True, array_like=True):
    """One thing that came about in turn `turn` of `sample`."""

    sample: int
    turn: int


class Said(Entry, frozen=True, array_like=True, tag="said"):
    """The model's turn, sampled by `attempt`. `opening`: the observation before the first one."""

    attempt: int
    token_ids: bytes
    logprobs: bytes
    spans: tuple[tuple[int, int, int], ...]
    finish_reason: str
    opening: PlainObservation = ""


class Routed(Entry, frozen=True, array_like=True, tag="routed"):
    """Experts of the last `num_tokens` tokens up to the turn's end (`asyncrl.core.experts.Column`)."""

    num_tokens: Annotated[int, msgspec.Meta(ge=1)]
    form: tuple[int, int, int, int]
    frame: bytes


class Begun(Entry, frozen=True, array_like=True, tag="begun"):
    """Call `index` of the turn is about to be made."""

    index: int


class Answered(Entry, frozen=True, array_like=True, tag="answered"):
    """The result of call `index`. `is_last`: the turn's other calls are not made."""

    index: int
    text: str
    is_last: bool = False


class Stepped(Entry, frozen=True, array_like=True, tag="stepped"):
    """The environment's answer to the turn."""

    observation: PlainObservation
    is_done: bool


class Forked(Entry, frozen=True, array_like=True, tag="forked"):
    """The sample begins with the first `turn` turns of sample `origin`, as they are recorded so far."""

    origin: int


AnyEntry = Forked | Said | Routed | Begun | Answered | Stepped
_ENCODER, _DECODER = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(list[AnyEntry])


@dataclass
class Turn:
    """A turn of the model and what followed.

    Attributes:
        attempt: The attempt that sampled it.
        begun: Calls that were about to be made. answers: Results of calls.
        step: The environment's answer, None while it has none.
        is_shared: Another sample of the group sampled it, and this one has forked off after it.
    """

    attempt: int
    completion: Completion
    opening: Observation
    begun: set[int] = field(default_factory=set)
    answers: dict[int, Answered] = field(default_factory=dict)
    step: Step | None = None
    is_shared: bool = False


def said(sample: int, turn: int, attempt: int, completion: Completion, opening: PlainObservation) -> Said:
    """Return the entry of a turn that was sampled."""
    ids, logprobs = completion.token_ids.astype("<i4"), completion.logprobs.astype("<f4")
    spans = tuple((span.version, span.start, span.end) for span in completion.spans)
    reason = completion.finish_reason
    return Said(sample, turn, attempt, ids.tobytes(), logprobs.tobytes(), spans, reason, opening)


def routed(sample: int, turn: int, experts: Rows | None) -> Routed | None:
    """Return the entry of a turn's experts, None if there are none."""
    told = None if experts is None else pack([(len(experts), experts)])
    if experts is None or told is None:
        return None
    num_layers, num_chosen, num_bytes, is_packed = told[0]
    form = num_layers, num_chosen, num_bytes, is_packed
    return Routed(sample, turn, len(experts), form, bytes(told[1]))


def encode(entry: msgspec.Struct) -> bytes:
    """Return an entry as `join` takes it. Raises TypeError, ValueError, OverflowError."""
    return _ENCODER.encode(entry)


def join(entries: Sequence[bytes]) -> bytes:
    """Return a record of these entries."""
    return _ENCODER.encode([msgspec.Raw(entry) for entry in entries])


def decode(records: Iterable[Frame]) -> list[AnyEntry]:
    """Return the entries of all records.

    Raises:
        WireError: A record is none of this version.
    """
    try:
        return [entry for record in records for entry in _DECODER.decode(record)]
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise WireError(f"a record of turns cannot be read: {error}") from None


def forked(turns: Sequence[Turn], num_turns: int) -> list[Turn]:
    """Return the first `num_turns` turns of another sample, as a fork has them."""
    return [replace(turn, is_shared=True) for turn in turns[:num_turns]]


def add(turns: list[Turn], entry: Said | Routed | Begun | Answered | Stepped) -> None:
    """Let `turns` of one sample become what they are after `entry`. Raises WireError."""
    if isinstance(entry, Said):
        if entry.turn <= len(turns):
            turns[entry.turn :] = [
                Turn(entry.attempt, completion_of(entry), cast("Observation", entry.opening))
            ]
    elif entry.turn == len(turns) - 1:
        turn = turns[-1]
        match entry:
            case Routed():
                turn.completion = replace(turn.completion, experts=experts_of(entry))
            case Begun(index=index):
                turn.begun.add(index)
            case Answered(index=index):
                turn.answers[index] = entry
            case Stepped(observation=observation, is_done=is_done):
                turn.step = Step(cast("Observation", observation), is_done)


def experts_of(entry: Routed) -> Rows:
    """Return the experts of an entry. Raises WireError."""
    return read_column({FIELD: list(entry.form)}, entry.frame, entry.num_tokens).read()


def completion_of(entry: Said) -> Completion:
    """Return what was said, without experts. Raises WireError."""
    try:
        ids, logprobs = np.frombuffer(entry.token_ids, "<i4"), np.frombuffer(entry.logprobs, "<f4")
    except ValueError as error:
        raise WireError(f"a recorded turn is not whole: {error}") from None
    ends = [0, *(end for _, _, end in entry.spans)]
    is_covered = [start for _, start, _ in entry.spans] == ends[:-1] and ends[-1] == len(ids)
    is_rising = all(a < b for a, b in pairwise(ends))
    if not (len(ids) == len(logprobs) > 0 and is_covered and is_rising):
        raise WireError(f"a recorded turn of {len(ids)} tokens has {len(logprobs)} log-probs, {entry.spans}")
    return Completion(ids, logprobs, tuple(Span(*span) for span in entry.spans), entry.finish_reason)
