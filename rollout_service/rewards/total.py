"""The reward of a run: its parts weighed and summed, counted, and watched for failures.

Invariant: every answer is counted once, as scored or as failed; once the share of failed ones is over the
limit, every further call raises `RewardsFailed`, so that the replica ends and the run with it.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from asyncrl.core.errors import WireError
from asyncrl.core.experience import MAX_REWARD_PARTS, check_reward
from asyncrl.core.obstacle import Cause, FailureStreak, Obstacle
from asyncrl.core.states import Reason
from asyncrl.core.status.replica import RewardStatus
from rollout_service.rewards.score import Answer, Part, RewardError, RewardsFailed, Score, Task
from rollout_service.rewards.zeros import ZeroWatch

WINDOW_ANSWERS = 256
"""The share of failed answers is taken over so many of the last ones."""
MIN_ANSWERS = 20
"""Nothing is said of fewer answers."""
FIRST_ANSWERS = 8
"""Unless so many failed and none was ever scored: calls that hang take their deadline each."""
LAST_REASONS = 3


@dataclass(frozen=True)
class Weighed:
    """A part and what its value is multiplied by.

    Attributes:
        explain: Returns why its value for an answer is 0 or less, where it always knows.
    """

    part: Part
    weight: float = 1.0
    explain: Callable[[Answer], Reason] | None = None

    def reason(self, answer: Answer, found: Score) -> str:
        """Return the reason of its value, if that is a zero that counts."""
        if found.value > 0 or not self.weight:
            return ""
        return found.reason or (self.explain(answer) if self.explain is not None else "")


class ErrorRate:
    """Counts answers that could not be scored, by kind, and says when there were too many.

    Once an answer was scored, failures of infrastructure end no run: the buffer's breaker waits them out.

    Args:
        max_error_rate: Of the last `WINDOW_ANSWERS`; 1 ends a run only if all of them failed.
    """

    def __init__(self, max_error_rate: float) -> None:
        self._max_error_rate = max_error_rate
        self._failed: deque[bool] = deque(maxlen=WINDOW_ANSWERS)
        self._reasons: deque[str] = deque(maxlen=LAST_REASONS)
        self._has_scored = False
        self.kinds: Counter[str] = Counter()
        self.streak = FailureStreak(Cause.REWARDS_FAIL)
        self.verdict: RewardsFailed | None = None

    def add_scored(self) -> None:
        """Count an answer that was scored."""
        self._failed.append(False)
        self._has_scored = True
        self.streak.succeed()

    def add_failed(self, error: RewardError) -> None:
        """Count one that was not; sets `verdict` when there were too many."""
        self.kinds[error.kind] += 1
        self.streak.fail(error.message)
        if self._has_scored and error.reason is Reason.INFRASTRUCTURE:
            return
        self._failed.append(True)
        if _without_numbers(error.message) not in map(_without_numbers, self._reasons):
            self._reasons.append(error.message)
        num_failed, num_answers = sum(self._failed), len(self._failed)
        at_least = MIN_ANSWERS if self._has_scored else FIRST_ANSWERS
        is_allowed = num_answers < at_least or num_failed <= self._max_error_rate * num_answers
        if is_allowed and num_failed < WINDOW_ANSWERS:
            return
        kinds = ", ".join(f"{count} {kind}" for kind, count in self.kinds.most_common())
        self.verdict = RewardsFailed(
            f"{num_failed} of the last {num_answers} answers could not be scored (reward.max_error_rate is "
            f"{self._max_error_rate:g}). Since the start: {kinds}. The last reasons: "
            + "; ".join(self._reasons),
            hint="Mend the reward, or raise reward.max_error_rate",
            kind=error.kind,
            reason=error.reason,
        )


def _without_numbers(reason: str) -> str:
    """Return a reason without the row that it was met at: the same one at other rows says nothing new."""
    return re.sub(r"\d+", "#", reason)


class TotalReward:
    """The weighted sum of parts that are asked at once.

    Args:
        rate: Counts failures; None counts nothing, for evaluations.
    """

    def __init__(self, parts: Sequence[Weighed], rate: ErrorRate | None = None) -> None:
        self._parts = tuple(parts)
        self._rate = rate
        self._zeros = ZeroWatch()
        self._sums = {weighed.part.name: [0, 0.0] for weighed in self._parts}
        self._trial: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start what the parts need. Raises ConfigError if one cannot be used."""
        for weighed in self._parts:
            await weighed.part.start()

    async def close(self) -> None:
        """End what the parts started."""
        if self._trial is not None:
            self._trial.cancel()
            await asyncio.gather(self._trial, return_exceptions=True)
        for weighed in self._parts:
            await weighed.part.close()

    def begin_trial(self, prompt: Task) -> None:
        """Begin to score the ground truth of `prompt` as an answer, while the engine starts.

        A part that fails is an obstacle until an answer is scored; it is not counted and ends nothing.
        """
        self._trial = asyncio.create_task(self._try_parts(prompt))

    async def _try_parts(self, prompt: Task) -> None:
        answer = Answer(prompt, str(prompt.ground_truth), "stop", 1)
        await asyncio.gather(*(self._try_part(weighed.part, answer) for weighed in self._parts))

    async def _try_part(self, part: Part, answer: Answer) -> None:
        try:
            await part.value(answer)
        except RewardError as error:
            if self._rate is not None:
                self._rate.streak.fail(f"tried on a ground truth: {error.message}")

    def for_evaluation(self) -> TotalReward:
        """Return the same reward, whose calls are not counted and never end the run."""
        return TotalReward(self._parts)

    async def score(self, answer: Answer) -> Score:
        """Return the sum and its parts. Raises RewardError, and RewardsFailed once too many failed."""
        rate = self._rate
        if rate is not None and rate.verdict is not None:
            raise rate.verdict
        source = answer.prompt.data_source
        try:
            score = self._sum(answer, await self._values(answer))
        except RewardError as error:
            self.note_failed(error, source)
            raise
        self.note_scored(score, source)
        return score

    def note_scored(self, score: Score, source: str) -> None:
        """Count an answer of a data source that was scored, here or by its environment."""
        if self._rate is None:
            return
        self._rate.add_scored()
        self._zeros.add_scored(source, score.value, score.reason)
        for name, value in score.parts.items():
            if name not in self._sums and len(self._sums) >= MAX_REWARD_PARTS:
                continue  # no group could hold it; its push is refused
            counted = self._sums.setdefault(name, [0, 0.0])
            counted[0] += 1
            counted[1] += value

    def note_failed(self, error: RewardError, source: str) -> None:
        """Count an answer that failed, here or before it came here. Raises RewardsFailed after too many."""
        if self._rate is None:
            return
        self._zeros.add_failed(source, error.reason)
        self._rate.add_failed(error)
        if self._rate.verdict is not None:
            raise self._rate.verdict from error

    async def _values(self, answer: Answer) -> list[Score]:
        if len(self._parts) == 1:
            return [await self._parts[0].part.value(answer)]
        failures: list[RewardError] = []
        calls: list[asyncio.Task[Score]] = []
        try:
            async with asyncio.TaskGroup() as tasks:
                calls = [tasks.create_task(weighed.part.value(answer)) for weighed in self._parts]
        except* RewardError as group:
            failures = [error for error in group.exceptions if isinstance(error, RewardError)]
        if failures:
            raise failures[0]
        return [call.result() for call in calls]

    def _sum(self, answer: Answer, scores: Sequence[Score]) -> Score:
        values = [score.value for score in scores]
        value = sum(weighed.weight * value for weighed, value in zip(self._parts, values, strict=True))
        try:
            check_reward(value, {})
        except WireError as error:
            what = "the weighted sum of the rewards is not a finite 32-bit number"
            raise RewardError(what, kind="not_finite") from error
        names = (weighed.part.name for weighed in self._parts)
        reasons = (part.reason(answer, score) for part, score in zip(self._parts, scores, strict=True))
        reason = next(filter(None, reasons), "") if value <= 0 else ""
        return Score(value, dict(zip(names, values, strict=True)), reason)

    def status(self) -> RewardStatus:
        """Return, since the start, each part's (count, sum) and the failures by kind."""
        errors = {} if self._rate is None else dict(self._rate.kinds)
        sums = list(self._sums.items())  # at once: the thread that scores may add a name meanwhile
        parts = {name: (int(count), total) for name, (count, total) in sums}
        return RewardStatus(parts, errors, self._zeros.counts())

    def obstacles(self) -> tuple[Obstacle, ...]:
        """Return the failures since the last answer that was scored, and zeros that look like such."""
        return () if self._rate is None else (*self._rate.streak.report(), *self._zeros.obstacles())

    def child_pids(self) -> list[int]:
        """Return the processes that the parts started and that live."""
        return [pid for weighed in self._parts for pid in weighed.part.child_pids()]
