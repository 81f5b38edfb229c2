"""The tokens of one episode: what the model said, what it was told, in the order in which it read them.

Invariant: nothing is ever taken back or written again. The prompt of a turn is the prompt of the turn
before, then exactly the tokens that the engine sampled for it, then observations.

Shapes: P prompt tokens, T response tokens of the episode.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from asyncrl.core.experience import Trajectory
from asyncrl.core.experts import Rows, extend, split
from asyncrl.core.staleness import Span
from rollout_service.engine.protocol import Completion
from rollout_service.rewards.score import Score


class Transcript:
    """Grows by what is said and observed, up to `max_tokens` of both together.

    Args:
        prompt_ids: [P].
        max_tokens: Response tokens of the whole episode, observations included.
    """

    def __init__(self, prompt_ids: Sequence[int], max_tokens: int) -> None:
        self._prompt_ids = list(prompt_ids)
        self._max_tokens = max_tokens
        self._ids: list[int] = []
        self._mask: list[int] = []
        self._logprobs: list[float] = []
        self._spans: list[Span] = []
        self._read: list[int] = []
        self._experts: Rows | None = None
        self.num_turns = 0

    @property
    def num_tokens(self) -> int:
        """Response tokens so far."""
        return len(self._ids)

    @property
    def num_left(self) -> int:
        """Tokens that may still be said or observed."""
        return self._max_tokens - len(self._ids)

    def next_prompt(self) -> list[int]:
        """Return what the engine reads for the next turn: it extends all that it read and said so far."""
        ids = [*self._prompt_ids, *self._ids]
        assert ids[: len(self._read)] == self._read, "a turn's prompt extends the turn before"
        return ids

    def say(self, completion: Completion, *, is_trained: bool = True) -> None:
        """Append what the model said, as the engine sampled it."""
        start = len(self._ids)
        said = completion.token_ids.tolist()
        self._read = [*self.next_prompt(), *said]
        self._ids += said
        self._mask += [int(is_trained)] * len(said)
        self._logprobs += completion.logprobs.tolist()
        for span in completion.spans:
            self._cover(span.version, start + span.end)
        self._experts = extend(self._experts, len(self._read), completion.experts)
        self.num_turns += 1
        assert not self._spans or self._spans[-1].end == len(self._ids), "every token has its version"

    def without_known(self, completion: Completion) -> Completion:
        """Return the next turn with experts of those tokens alone that no turn before has read."""
        num_read = len(self._prompt_ids) + len(self._ids) + len(completion.token_ids)
        _, new = split(completion.experts, num_read - max(0, len(self._read) - 1))
        return replace(completion, experts=new)

    def observe(self, token_ids: Sequence[int]) -> None:
        """Append what the model is told. Its tokens are not trained; they count to the version before."""
        self._ids += token_ids
        self._mask += [0] * len(token_ids)
        self._logprobs += [0.0] * len(token_ids)
        if self._spans:
            self._cover(self._spans[-1].version, len(self._ids))

    def _cover(self, version: int, end: int) -> None:
        """Let `version` cover the tokens up to `end`; those before the first turn count to its version."""
        start = 0
        if self._spans:
            last = self._spans[-1]
            assert version >= last.version, "an engine's versions only rise"
            is_same = version == last.version
            start = last.start if is_same else last.end
            if is_same:
                self._spans.pop()
        if end > start:
            self._spans.append(Span(version, start, end))

    def trajectory(self, score: Score, reward: float, finish_reason: str) -> Trajectory:
        """Return the record of the episode, with `reward` as its reward and the parts of `score`."""
        rows = extend(self._experts, len(self._prompt_ids) + len(self._ids), None)
        prompt_experts, experts = split(rows, len(self._ids))
        return Trajectory(
            response_ids=np.asarray(self._ids, dtype=np.int32),
            loss_mask=np.asarray(self._mask, dtype=np.uint8),
            logprobs=np.asarray(self._logprobs, dtype=np.float32),
            spans=tuple(self._spans),
            reward=reward,
            finish_reason=finish_reason,
            reward_parts=score.parts,
            num_turns=self.num_turns,
            reason=score.reason,
            experts=experts,
            prompt_experts=prompt_experts,
        )


def turn_seed(seed: int, turn: int) -> int:
    """Return the seed of a turn, 0 <= seed < 2**63: the sample's own for turn 0, as with a single turn."""
    if turn == 0:
        return seed
    digest = hashlib.blake2b(f"turn/{seed}/{turn}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
