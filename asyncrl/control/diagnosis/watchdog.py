"""Watchdog of a run: detects that no step finishes, and names the chain of waiting services (pure).

Owns how long a step usually takes. It ends nothing: the fleet machine handles dead and silent
services, and a waiting service may be right to wait.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from statistics import median

from asyncrl.control.diagnosis.waits import Edge, waiting_edges
from asyncrl.core.obstacle import Obstacle
from asyncrl.core.states import ServiceState
from asyncrl.core.status.service import LEARNER
from asyncrl.core.status.statuses import Statuses

TIMES_USUAL = 10.0
AT_LEAST_S = 60.0
FIRST_STEP_S = 600.0
"""Limit before the first step, whose duration is unknown: engines load and compile."""
NUM_REMEMBERED = 16
MAX_EDGES = 48
"""Waits that a report names; a run of 16 replicas has fewer."""


@dataclass(frozen=True)
class Stall:
    """A run that takes no steps.

    Attributes:
        who: The last service in the chain of waits: the one that does not move.
        edges: (waiting service, service that it waits for), from the learner on.
    """

    who: str
    text: str
    edges: tuple[str, ...]


class Watchdog:
    """Reports a stall when it begins, and again whenever it has lasted twice as long."""

    def __init__(self, groups_per_step: int) -> None:
        self._groups_per_step = groups_per_step
        self._times_s: deque[float] = deque(maxlen=NUM_REMEMBERED)
        self._step: int | None = None
        self._since: float | None = None
        self._next_s = 0.0
        self.is_stalled = False

    @property
    def limit_s(self) -> float:
        """Seconds without a step that are no stall yet."""
        return max(AT_LEAST_S, TIMES_USUAL * median(self._times_s)) if self._times_s else FIRST_STEP_S

    def look(
        self, now: float, statuses: Statuses, *, is_meant_to_train: bool, known: Obstacle | None = None
    ) -> Stall | None:
        """Take in the statuses of time `now` (seconds, monotonic); return a stall that is worth reporting.

        Args:
            known: Obstacle reported by a service: it is preferred to a guess.
        """
        learner = statuses.learner
        step = self._step if learner is None else learner.step
        is_ending = statuses.state(LEARNER) in (ServiceState.FINISHING, ServiceState.ENDED)
        if is_ending or not is_meant_to_train:
            self._since = None
        elif self._since is None or step != self._step:
            self._note_step(now, step)
        else:
            return self._judge(now - self._since, statuses, known)
        self._step, self.is_stalled, self._next_s = step, False, 0.0
        return None

    def _note_step(self, now: float, step: int | None) -> None:
        """Note a change of the step; a lower one is a restarted learner's, without progress."""
        num_steps = 0 if step is None or self._step is None else step - self._step
        if num_steps > 0 and self._since is not None:
            self._times_s.append((now - self._since) / num_steps)
        self._since = now

    def _judge(self, still_s: float, statuses: Statuses, known: Obstacle | None) -> Stall | None:
        if still_s <= max(self.limit_s, self._next_s):
            return None
        self._next_s, self.is_stalled = 2 * still_s, True
        edges = waiting_edges(statuses, self._groups_per_step)
        if known is not None:
            edges = [Edge("the run", known.service, known.sentence)]
        usual = f", usually one takes {median(self._times_s):.1f} s" if self._times_s else ""
        told = [str(edge) for edge in edges[:MAX_EDGES]]
        if (num_more := len(edges) - len(told)) > 0:
            told.append(f"{num_more} more waits")
        text = f"no step was finished for {still_s:.0f} s{usual}: {'; '.join(told)}"
        return Stall(edges[-1].whom, text, tuple(told))
