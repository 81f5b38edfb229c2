"""Cost of the bound itself: a system in which nothing but decoding and training takes time.

The closed form knows no bound. With one, a batch that waits for its longest answers keeps the slots of the
others empty: at most `(max_lag + 1) * groups_per_step` groups are open, those in training and those of which
one answer is still running among them. `bounded_share` simulates that rule, with the slots of an engine,
weights that are everywhere at once and messages that take no time. It is the share of a system that admits as
soon as the rule permits and trains each complete batch. The gap of a real system to it is the system's loss.
"""

from __future__ import annotations

import heapq
import itertools
import random
import statistics
from collections import deque
from dataclasses import dataclass

from asyncrl.core.config.lengths import Lengths

NUM_STEPS, NUM_SETTLING = 1000, 20


@dataclass(frozen=True)
class Work:
    """Work to generate and train, and its speeds.

    Attributes:
        slots: Answers that are decoded side by side.
        tokens_per_s: Of each of them.
        train_s_per_token: Of a step, per response token.
        ready_batches: Batches that lie ready at most before nothing more is admitted.
    """

    lengths: Lengths
    max_tokens: int
    groups_per_step: int
    group_size: int
    slots: int
    tokens_per_s: float
    train_s_per_token: float
    ready_batches: int = 1


def bounded_share(work: Work, max_lag: int, num_steps: int = NUM_STEPS, seed: int = 0) -> float:
    """Return the share of the closed form's ideal that is left under `max_lag`, at most 1.

    Seeds differ by 1 % or so at σ up to 1.5.
    """
    play = _Play(work, max_lag, seed)
    while len(play.ended_s) < num_steps + NUM_SETTLING:
        play.go_on()
    step_s = (play.ended_s[-1] - play.ended_s[NUM_SETTLING - 1]) / num_steps
    tokens = statistics.fmean(play.trained_tokens[NUM_SETTLING:])
    return tokens * max(1 / (work.slots * work.tokens_per_s), work.train_s_per_token) / step_s


class _Play:
    """One run. `ended_s` and `trained_tokens` are of its steps so far."""

    def __init__(self, work: Work, max_lag: int, seed: int) -> None:
        self._work = work
        self._max_open = (max_lag + 1) * work.groups_per_step
        self._dice = random.Random(seed)
        self._now_s = 0.0
        self._order = itertools.count()
        self._running: list[tuple[float, int, _Group]] = []
        self._queue: deque[tuple[_Group, int]] = deque()
        self._stored: deque[_Group] = deque()
        self._num_open = 0
        self._training_until_s: float | None = None
        self.ended_s: list[float] = []
        self.trained_tokens: list[int] = []

    def go_on(self) -> None:
        """Begin all that can begin, then let the next thing end."""
        self._begin_step()
        self._fill_slots()
        first_s = self._running[0][0] if self._running else None
        if self._training_until_s is not None and (first_s is None or self._training_until_s <= first_s):
            self._now_s, self._training_until_s = self._training_until_s, None
            self._num_open -= self._work.groups_per_step
            self.ended_s.append(self._now_s)
            return
        self._now_s, _, group = heapq.heappop(self._running)
        group.num_left -= 1
        if not group.num_left:
            self._stored.append(group)

    def _begin_step(self) -> None:
        count = self._work.groups_per_step
        if self._training_until_s is not None or len(self._stored) < count:
            return
        tokens = sum(self._stored.popleft().tokens for _ in range(count))
        self.trained_tokens.append(tokens)
        self._training_until_s = self._now_s + tokens * self._work.train_s_per_token

    def _fill_slots(self) -> None:
        while len(self._running) < self._work.slots:
            if not self._queue and not self._admit():
                return
            group, length = self._queue.popleft()
            ends_s = self._now_s + length / self._work.tokens_per_s
            heapq.heappush(self._running, (ends_s, next(self._order), group))

    def _admit(self) -> bool:
        work = self._work
        is_full = len(self._stored) >= work.ready_batches * work.groups_per_step
        if is_full or self._num_open >= self._max_open:
            return False
        self._num_open += 1
        drawn = [
            work.lengths.draw_tokens(self._dice.getrandbits(48), work.max_tokens)
            for _ in range(work.group_size)
        ]
        group = _Group(work.group_size, sum(drawn))
        self._queue.extend((group, length) for length in drawn)
        return True


@dataclass
class _Group:
    num_left: int
    tokens: int
