"""A simulated run, from its configuration to its figures.

Builds the world: a supervisor that starts all others. Nothing fails in it: what faults do to a run is for the
services themselves to show. `run_to_end` refuses a run that stands still, which would never end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from asyncrl.buffer.ledger.census import take_census
from asyncrl.core.errors import ConfigError
from asyncrl.planner.actors import buffer, learner
from asyncrl.planner.actors.buffer import BufferActor
from asyncrl.planner.actors.learner import LearnerActor
from asyncrl.planner.actors.record import StepRecord
from asyncrl.planner.actors.replica import ReplicaActor
from asyncrl.planner.actors.supervisor import SupervisorActor
from asyncrl.planner.outcome import Outcome, noise_of_mean, noise_of_ratio, share_by_lag
from asyncrl.planner.rates import Rates
from asyncrl.planner.setting import Setting
from asyncrl.planner.world import Args, Network, Reliable, World

STANDSTILL_S = 3600.0
"""A run that trains no step for so many virtual seconds will train none any more."""
WARM_UP_SHARE = 0.25
MAX_WARM_UP_STEPS = 20
MAX_PERIOD = 100
"""Steps: checkpoints and evaluations with a longer interval are not simulated."""


def count_warm_up(num_steps: int) -> int:
    """Return the number of warm-up steps: at least 1 of two or more, always fewer than `num_steps`."""
    return min(MAX_WARM_UP_STEPS, max(1, int(WARM_UP_SHARE * num_steps)), num_steps - 1)


def find_period(setting: Setting, rates: Rates) -> int:
    """Return the longest interval, in steps, of evaluations and of checkpoints that take time.

    It is the longest period up to `MAX_PERIOD`, 0 for none.
    """
    every = (setting.checkpoint_every if rates.checkpoint_s else 0, setting.eval_every)
    return max((steps for steps in every if steps <= MAX_PERIOD), default=0)


@dataclass
class Mark:
    """Counters at one moment."""

    time: float = 0.0
    busy_s: float = 0.0
    offered_s: float = 0.0
    sampled: float = 0.0
    buffer_busy_s: float = 0.0
    buffer_ops: int = 0


@dataclass
class Watch:
    """Collects what happens: steps, how long versions and evaluations take, whether the run has ended."""

    records: list[StepRecord] = field(default_factory=list)
    published: dict[int, float] = field(default_factory=dict)
    served: dict[int, list[float]] = field(default_factory=dict)
    ordered: dict[int, float] = field(default_factory=dict)
    evaluated: dict[int, float] = field(default_factory=dict)
    is_over: bool = False

    def hear(self, now: float, what: str, figures: Args) -> None:
        """Observe the world."""
        if what == "step":
            self.records.append(figures["record"])
        elif what == "published":
            self.published[figures["number"]] = now
        elif what == "serving":
            self.served.setdefault(figures["number"], []).append(now)
        elif what == "evaluation":
            self.ordered[figures["id"]] = now
        elif what == "evaluated":
            self.evaluated[figures["id"]] = now
        elif what == "ended":
            self.is_over = True


class Simulation:
    """A world with a whole run in it.

    >>> # simulation = Simulation(Setting.of(config), rates, seed=0, steps=50)
    >>> # simulation.run_to_end()

    Args:
        buffer_type: Of the buffer; one that measures what it does, for instance.

    Attributes:
        world: With its clock, its network and its disk.
        supervisor: That started all actors; they are in `world.actors` by service name.
    """

    def __init__(
        self,
        setting: Setting,
        rates: Rates,
        seed: int,
        steps: int,
        network: Network | None = None,
        buffer_type: type[BufferActor] = BufferActor,
    ) -> None:
        self.setting, self.rates, self.steps = setting, rates, steps
        self.world = World(seed, network or Reliable(rates.rpc_s))
        self.watch = Watch()
        self.world.observers.append(self.watch.hear)
        self.supervisor = SupervisorActor(self.world, setting, rates, steps, buffer_type)
        self._marks: list[Mark] = []
        self.world.observers.append(self._mark_step)
        self.world.start(self.supervisor)

    @property
    def buffer(self) -> BufferActor | None:
        found = self.world.actors.get(buffer.NAME)
        return found if isinstance(found, BufferActor) else None

    @property
    def learner(self) -> LearnerActor | None:
        found = self.world.actors.get(learner.NAME)
        return found if isinstance(found, LearnerActor) else None

    @property
    def replicas(self) -> list[ReplicaActor]:
        return [one for one in self.world.actors.values() if isinstance(one, ReplicaActor)]

    def run(self, until_s: float = float("inf")) -> None:
        """Run to the end, or until `until_s` of virtual time."""
        self.world.run(lambda: self.watch.is_over, until_s)

    def run_to_end(self) -> Outcome:
        """Run to the end and return the outcome.

        Raises:
            ConfigError: Nothing generates, or it has come to a standstill.
        """
        self._run_on(lambda: self.watch.is_over)
        return self.outcome()

    def run_to_step(self, num_steps: int) -> Outcome:
        """Run until `num_steps` are trained, or to the end, and return their outcome.

        Raises:
            ConfigError: Nothing generates, or it has come to a standstill.
        """
        self._run_on(lambda: self.watch.is_over or len(self.watch.records) >= num_steps)
        return self.outcome()

    def _run_on(self, is_enough: Callable[[], bool]) -> None:
        if self.setting.replicas == 0:
            raise ConfigError("nothing generates: rollout.replicas is 0", hint="Set it to 1 or more")
        num_seen = -1
        while not is_enough() and num_seen < len(self.watch.records):
            num_seen = len(self.watch.records)
            self.world.run(is_enough, self.world.now + STANDSTILL_S)
        if len(self.watch.records) < 2 or not is_enough():
            raise ConfigError(
                f"the simulated run stands still after {len(self.watch.records)} of {self.steps} steps",
                hint="Simulate 2 steps or more; give rates at which a step takes less than an hour",
            )

    def _mark_step(self, now: float, what: str, figures: Args) -> None:
        if what == "step":
            self._marks.append(self._mark())

    def _mark(self) -> Mark:
        now, mark = self.world.now, Mark(self.world.now)
        for one in self.replicas:
            one.engine.pass_time(now)
            mark.busy_s += one.engine.busy_s
            mark.offered_s += now - one.started_at
            mark.sampled += one.engine.num_tokens - one.num_evaluated
        if self.buffer is not None:
            mark.buffer_busy_s, mark.buffer_ops = self.buffer.busy_s, self.buffer.num_ops
        return mark

    def outcome(self) -> Outcome:
        """Return the figures of the steps after the warm-up."""
        records = self.watch.records
        assert len(records) >= 2, "a simulation trains some steps"
        first = count_warm_up(len(records))
        counted = records[first:]
        start, end = self._marks[first - 1], self._marks[len(records) - 1]
        return Outcome(
            **self._timing(counted, start, end),
            **self._tokens(counted, start, end),
            **self._interruptions(counted, start, end),
        )

    def _timing(self, counted: list[StepRecord], start: Mark, end: Mark) -> dict[str, Any]:
        wall_s = max(1e-9, end.time - start.time)
        offered_s = max(1e-9, end.offered_s - start.offered_s)
        return {
            "num_steps": len(counted),
            "step_s": wall_s / len(counted),
            "step_times_s": tuple(one.step_s for one in counted),
            "noise": self._noise(counted),
            "learner_idle": sum(one.wait_s for one in counted) / wall_s,
            "replica_idle": 1.0 - (end.busy_s - start.busy_s) / offered_s,
            "buffer_load": (end.buffer_busy_s - start.buffer_busy_s) / wall_s,
            "buffer_ops_per_s": (end.buffer_ops - start.buffer_ops) / wall_s,
            "sync_s": self.rates.transfer_s + self.rates.swap_s,
            "spread_s": self._spread_s(start.time),
            "num_events": self.world.num_events,
            "virtual_s": self.world.now,
        }

    def _noise(self, counted: list[StepRecord]) -> float:
        period, times_s = find_period(self.setting, self.rates), [one.step_s for one in counted]
        trained = [float(one.lags.total()) for one in counted]
        return max(noise_of_mean(times_s, period), noise_of_ratio(trained, times_s, period))

    def _interruptions(self, counted: list[StepRecord], start: Mark, end: Mark) -> dict[str, Any]:
        """Return the cost of streaming, checkpoints and evaluations."""
        wall_s, watch = max(1e-9, end.time - start.time), self.watch
        ended = {one: at for one, at in watch.evaluated.items() if start.time < at <= end.time}
        took = [at - watch.ordered[one] for one, at in ended.items()]
        under_way = [end.time - at for one, at in watch.ordered.items() if one not in watch.evaluated]
        took = took or under_way  # they have taken so long at least
        return {
            "parts_per_step": sum(one.num_parts for one in counted) / len(counted),
            "overlapped_s": sum(one.overlapped_s for one in counted) / len(counted),
            "stall_share": sum(one.stall_s for one in counted) / wall_s,
            "num_skipped": 0 if self.learner is None else self.learner.schedule.num_skipped,
            "num_evaluations": len(took),
            "evaluation_s": sum(took) / len(took) if took else 0.0,
        }

    def _tokens(self, counted: list[StepRecord], start: Mark, end: Mark) -> dict[str, Any]:
        wall_s = max(1e-9, end.time - start.time)
        tokens: Counter[int] = Counter()
        for one in counted:
            tokens.update(one.lags)
        lags, lag_mean = share_by_lag(tokens)
        num_masked = sum(one.num_masked for one in counted)
        trained = sum(one.num_tokens for one in counted)
        num_groups = len(counted) * self.setting.ledger.groups_per_step
        return {
            "lags": lags,
            "lag_mean": lag_mean,
            "masked_share": num_masked / max(1, num_masked + tokens.total()),
            "dropped_groups": sum(one.num_stale_groups for one in counted) / num_groups,
            "tokens_per_s": trained / wall_s,
            "trained_per_s": tokens.total() / wall_s,
            "sampled_per_s": (end.sampled - start.sampled) / wall_s,
            "tokens_per_step": trained / len(counted),
            "residue": 0 if self.buffer is None else take_census(self.buffer.ledger.state).residue,
        }

    def _spread_s(self, since: float) -> float:
        took = [
            max(times) - self.watch.published[number]
            for number, times in self.watch.served.items()
            if self.watch.published.get(number, -1.0) >= since
        ]
        return sum(took) / len(took) if took else 0.0
