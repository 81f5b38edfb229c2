"""The record of one session: what the model was given and what it sampled, as token ids.

Owns the ids. What the model produced is kept as it was sampled and never made from text again.
Invariant: each turn's prompt begins with all ids of the turn before, prompt and answer; the tokens
between are observations, with loss mask 0 and log-prob 0, under the version of the token before them.

Shapes: P prompt and T response tokens, L layers, K experts chosen by each.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from asyncrl.core.experience import Trajectory
from asyncrl.core.experts import Rows, extend, split
from asyncrl.core.staleness import Span


@dataclass(frozen=True)
class Turn:
    """One call that ran to its end.

    Attributes:
        prompt_ids: All ids that the model was given.
        answer_ids: Sampled ids, an end of sequence included.
        logprobs: Of the answer's tokens.
        spans: Version that sampled each range of the answer's tokens.
        finish_reason: `stop` or `length`.
        text: The answer, before it is parsed.
        stop: The stop string that ended it, which is among its ids and not in its text.
        experts: Of all ids [P + T, L, K], as far as this call's passes read them; None if none are recorded.
    """

    prompt_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    spans: tuple[Span, ...]
    finish_reason: str
    text: str
    stop: str = ""
    experts: Rows | None = None


@dataclass(frozen=True)
class Answer:
    """A turn as it is kept: its tokens are `start` to `end` of the transcript's ids."""

    start: int
    end: int
    logprobs: tuple[float, ...]
    spans: tuple[Span, ...]
    finish_reason: str
    stop: str


class Transcript:
    """The turns of one conversation. Each id is kept once, however many turns there are.

    The first `num_shared` answers were sampled in another one.

    >>> transcript = Transcript()
    >>> transcript.add(Turn((1, 2), (3,), (-0.5,), (Span(7, 0, 1),), "stop", "c"))
    >>> transcript.add(Turn((1, 2, 3, 4), (5,), (-0.1,), (Span(8, 0, 1),), "stop", "e"))
    >>> transcript.trajectory(2, 1.0).loss_mask.tolist()
    [1, 0, 1]
    """

    def __init__(self) -> None:
        self._ids: list[int] = []
        self._experts: Rows | None = None
        self.answers: list[Answer] = []
        self.num_shared = 0

    @property
    def ids(self) -> tuple[int, ...]:
        """All ids up to the end of the last answer."""
        return tuple(self._ids)

    def ids_before(self, number: int) -> tuple[int, ...]:
        """Return the ids up to the end of the answer before answer `number`."""
        return tuple(self._ids[: self.answers[number - 1].end]) if number else ()

    def count_held(self, ids: Sequence[int]) -> int:
        """Return how many answers `ids` hold, each with all ids before it."""
        start = 0
        for place, answer in enumerate(self.answers):
            if list(ids[start : answer.end]) != self._ids[start : answer.end]:
                return place
            start = answer.end
        return len(self.answers)

    def share(self, num_answers: int) -> Transcript:
        """Return a transcript that begins as this one does, up to that answer, and trains nothing of it."""
        copied = Transcript()
        copied.answers = self.answers[:num_answers]
        copied._ids = self._ids[: copied.answers[-1].end]
        copied._experts, _ = split(self._experts, len(self._ids) - len(copied._ids))
        copied.num_shared = num_answers
        return copied

    @property
    def first_prompt(self) -> tuple[int, ...]:
        return tuple(self._ids[: self.answers[0].start])

    @property
    def last_prompt(self) -> tuple[int, ...]:
        """The ids that the last answer is to."""
        return tuple(self._ids[: self.answers[-1].start])

    @property
    def last_stop(self) -> str:
        """The stop string that ended the last answer, empty if none did."""
        return self.answers[-1].stop if self.answers else ""

    def add(self, turn: Turn) -> None:
        """Record the next turn."""
        num_before = len(self._ids)
        assert turn.prompt_ids[:num_before] == self.ids, "a turn must go on from the ids before it"
        assert len(turn.answer_ids) == len(turn.logprobs)
        self._ids += turn.prompt_ids[num_before:] + turn.answer_ids
        start, end = len(turn.prompt_ids), len(self._ids)
        self._experts = extend(self._experts, end, turn.experts)
        self.answers.append(Answer(start, end, turn.logprobs, turn.spans, turn.finish_reason, turn.stop))

    def replace_last(self, turn: Turn) -> None:
        """Record another answer to the last prompt: the client asked again."""
        assert turn.prompt_ids == self.last_prompt
        num_dropped = len(self._ids) - self.answers.pop().start
        del self._ids[-num_dropped:]
        self._experts, _ = split(self._experts, num_dropped)
        self.add(turn)

    def trajectory(
        self,
        num_prompt_tokens: int,
        reward: float,
        parts: Mapping[str, float] | None = None,
        reason: str = "",
    ) -> Trajectory:
        """Return it as a trajectory after the first `num_prompt_tokens` ids; shared answers have mask 0.

        What the first prompt has beyond them counts as an observation, under the first turn's version.
        """
        ids = self._ids[num_prompt_tokens:]
        mask = np.zeros(len(ids), dtype=np.uint8)
        logprobs = np.zeros(len(ids), dtype=np.float32)
        for number, answer in enumerate(self.answers):
            place = slice(answer.start - num_prompt_tokens, answer.end - num_prompt_tokens)
            mask[place] = number >= self.num_shared
            logprobs[place] = answer.logprobs
        prompt_experts, experts = split(self._experts, len(ids))
        return Trajectory(
            response_ids=np.asarray(ids, dtype=np.int32),
            loss_mask=mask,
            logprobs=logprobs,
            spans=_cover(self._spans(num_prompt_tokens), len(ids)),
            reward=reward,
            finish_reason=self.answers[-1].finish_reason,
            reward_parts=dict(parts or {}),
            num_turns=len(self.answers) - self.num_shared,
            reason=reason,
            experts=experts,
            prompt_experts=prompt_experts,
        )

    def _spans(self, num_prompt_tokens: int) -> Iterable[Span]:
        for answer in self.answers:
            offset = answer.start - num_prompt_tokens
            yield from (Span(span.version, span.start + offset, span.end + offset) for span in answer.spans)


def _cover(spans: Iterable[Span], num_tokens: int) -> tuple[Span, ...]:
    """Return `spans` without gaps: each begins at 0 or goes on up to the next; equal neighbours are one."""
    merged: list[Span] = []
    for span in spans:
        if not merged:
            merged.append(replace(span, start=0))
        elif span.version == merged[-1].version:
            merged[-1] = replace(merged[-1], end=span.end)
        else:
            merged[-1] = replace(merged[-1], end=span.start)
            merged.append(span)
    assert merged and merged[-1].end == num_tokens
    return tuple(merged)


def common_prompt(prompts: Sequence[Sequence[int]]) -> int:
    """Return how many ids all `prompts` begin with."""
    shortest = min(prompts, key=len)
    for place, token in enumerate(shortest):
        if any(prompt[place] != token for prompt in prompts):
            return place
    return len(shortest)
