"""An engine under virtual time: requests that share a replica, and which version sampled what (pure).

All running requests decode at one rate, which depends on how many run, so one count of "tokens per request
so far" dates all of them: a request that begins at count c with n tokens to come ends at c + n. Time is an
argument. Invariant: a request's tokens are its length, each at the version that was served as it was sampled.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Callable

Key = tuple[tuple[int, int], int]
"""(ticket, attempt), sample."""


class SimulatedEngine:
    """Requests of one replica.

    Args:
        token_rate: Tokens/s of one request while so many run.
        max_running: More than these wait their turn.

    Attributes:
        busy_s: Time with a request in flight and no swap.
        num_tokens: Sampled so far, by requests that ended.
    """

    def __init__(self, token_rate: Callable[[float], float], max_running: int) -> None:
        self._token_rate = token_rate
        self._max_running = max_running
        self._count = 0.0
        self._then = 0.0
        self._blocked_until = self._swapped_at = 0.0
        self._running: list[tuple[float, int, float, Key]] = []
        self._waiting: deque[tuple[float, Key, float]] = deque()
        self._num_begun = 0
        self._version_counts: list[float] = [0.0]
        self._version_numbers: list[int] = [0]
        self.busy_s = 0.0
        self.num_tokens = 0.0

    def begin(self, key: Key, num_tokens: float, now: float, stall_s: float = 0.0) -> None:
        """Take in a request; everybody stands still for `stall_s` when it begins to run."""
        self.pass_time(now)
        self._waiting.append((num_tokens, key, stall_s))
        self._fill()

    def serve(self, number: int, now: float) -> None:
        """Sample with version `number` from here on."""
        self.pass_time(now)
        if self._version_numbers[-1] != number:
            self._version_counts.append(self._count)
            self._version_numbers.append(number)

    def swap(self, seconds: float, now: float) -> None:
        """Sample nothing for so long: weights are loaded."""
        self.pass_time(now)
        self._blocked_until = max(self._blocked_until, now) + seconds
        self._swapped_at = now + seconds

    def pass_time(self, now: float) -> None:
        """Let the requests run until `now`."""
        if now <= self._then:
            return
        if self._running:
            active_s = max(0.0, now - max(self._then, self._blocked_until))
            self.busy_s += max(0.0, now - max(self._then, self._swapped_at))
            if active_s:
                self._count += active_s * self._rate()
        self._then = now

    def next_end(self) -> float | None:
        """Return when the next request ends if nothing else happens, None if none does."""
        if not self._running:
            return None
        rate = self._rate()
        if rate <= 0.0:
            return None
        return max(self._then, self._blocked_until) + max(0.0, self._running[0][0] - self._count) / rate

    def take_ended(self, now: float) -> list[tuple[Key, Counter[int]]]:
        """Return the requests that have ended, each with its tokens by version number."""
        self.pass_time(now)
        ended = []
        while self._running and self._running[0][0] <= self._count + 1e-6:
            end, _, start, key = heapq.heappop(self._running)
            self.num_tokens += end - start
            ended.append((key, self._spans(start, end)))
        self._fill()
        return ended

    def _rate(self) -> float:
        return self._token_rate(len(self._running))

    def _fill(self) -> None:
        while self._waiting and len(self._running) < self._max_running:
            num_tokens, key, stall_s = self._waiting.popleft()
            self._num_begun += 1
            heapq.heappush(self._running, (self._count + num_tokens, self._num_begun, self._count, key))
            if stall_s:
                self._blocked_until = max(self._blocked_until, self._then) + stall_s

    def _spans(self, start: float, end: float) -> Counter[int]:
        counts, numbers = self._version_counts, self._version_numbers
        at = bisect_right(counts, start) - 1
        tokens: Counter[int] = Counter()
        while True:
            until = counts[at + 1] if at + 1 < len(counts) else end
            num_tokens = round(min(until, end)) - round(start)
            if num_tokens > 0:
                tokens[numbers[at]] += num_tokens
            if until >= end:
                return tokens
            start, at = until, at + 1
