"""The supervisor: the real fleet machine, which starts, watches and ends the other actors.

Owns how a service is made. It looks at its services directly, not through the network: they are its children.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import assert_never

from asyncrl.control.fleet.machine import FleetMachine, FleetRules
from asyncrl.control.fleet.messages import (
    Begin,
    Cause,
    Drain,
    Effect,
    End,
    Event,
    Forgo,
    GiveUp,
    Gone,
    Heard,
    Kill,
    Promote,
    Retire,
    Start,
    Tick,
    Wanted,
)
from asyncrl.control.reconciler.status_events import in_order
from asyncrl.core.states import ServiceState
from asyncrl.planner.actors import buffer, learner
from asyncrl.planner.actors.buffer import BufferActor
from asyncrl.planner.actors.learner import LearnerActor
from asyncrl.planner.actors.replica import ReplicaActor
from asyncrl.planner.actors.weights import (
    COORDINATOR_NAME,
    PUBLISHER_NAME,
    CoordinatorActor,
    PublisherActor,
    ReceiverActor,
)
from asyncrl.planner.rates import Rates
from asyncrl.planner.setting import NEVER, Setting
from asyncrl.planner.world import Actor, World

NAME = "supervisor"


class Stub(Actor):
    """A receiver whose work another one of its cohort does."""

    state = "READY"


class SupervisorActor(Actor):
    """See the module.

    Attributes:
        machine: The real one.
        given_up: Why the run was ended, empty if it was not.
    """

    def __init__(self, world: World, setting: Setting, rates: Rates, num_steps: int) -> None:
        super().__init__(world, NAME)
        self._setting, self._rates, self._num_steps = setting, rates, num_steps
        self.machine = FleetMachine(self._rules(setting), world.now)
        self.given_up = ""
        self._heard: dict[str, tuple[int, str]] = {}

    @staticmethod
    def _rules(setting: Setting) -> FleetRules:
        """Return the run's rules, stretched for a fleet that is larger, or looked at more seldom."""
        rules, pace = setting.fleet, setting.pace
        return replace(
            rules,
            start_deadline_s=max(rules.start_deadline_s, 4 * pace.watch_s),
            max_replicas=max(rules.max_replicas, setting.replicas + setting.standby),
            silence_s=pace.fleet_silence_s,
            long_silence_s=max(rules.long_silence_s, pace.fleet_silence_s),
        )

    def begin(self) -> None:
        """Start the run."""
        self.hear(Begin(self._setting.replicas, self._setting.standby))
        self.every(self._setting.pace.watch_s, self._look)

    def scale(self, replicas: int) -> None:
        """Want another number of replicas."""
        self.hear(Wanted(replicas))

    def hear(self, event: Event) -> None:
        """Hand an event to the machine and do what it says."""
        for effect in self.machine.apply(event, self.world.now):
            self._perform(effect)

    def _look(self) -> None:
        names, living = list(self.machine.names), self.world.actors
        for event in in_order(Gone(name, "was killed", Cause.DEATH) for name in names if name not in living):
            self.hear(event)
        for name in names:
            if name in living:
                self._listen(living[name])
        self.hear(Tick())

    def _listen(self, actor: Actor) -> None:
        """Hand on what an actor says; where silence is no news, only what differs from its last word.

        There is little to be heard of a fleet of thousands, and nobody in it dies but by the user's will.
        """
        said = actor.life, str(getattr(actor, "state", "READY"))
        if self._setting.pace.fleet_silence_s == NEVER and self._heard.get(actor.name) == said:
            return
        self._heard[actor.name] = said
        done = actor.num_done if isinstance(actor, ReplicaActor) else int(getattr(actor, "step", 0))
        self.hear(Heard(actor.name, ServiceState(said[1]), done))

    def _perform(self, effect: Effect) -> None:
        match effect:
            case Start():
                self.world.start(self._make(effect.name, effect.is_standby))
            case Kill() | End():
                self.world.kill(effect.name)
                if effect.name.startswith("rollout."):
                    self.tell(buffer.NAME, "retire", replica=effect.name)
            case Drain():
                self._replica(effect.index, ReplicaActor.drain)
            case Promote():
                self._replica(effect.index, ReplicaActor.promote)
            case GiveUp():
                self.given_up = effect.reason
                self.world.note("given_up", reason=effect.reason)
            case Forgo():
                self.world.note("forgo", reason=effect.reason)
            case Retire():
                self.world.note("retire", reason=effect.reason)
            case _:
                assert_never(effect)

    def _replica(self, index: int, do: Callable[[ReplicaActor], None]) -> None:
        actor = self.world.actors.get(f"rollout.{index}")
        if isinstance(actor, ReplicaActor):
            do(actor)

    def _make(self, name: str, is_standby: bool) -> Actor:
        world, setting, rates = self.world, self._setting, self._rates
        kind, _, number = name.partition(".")
        index, cohort = int(number), setting.cohort
        if kind == "rollout":
            receiver = f"receiver.{index - index % cohort}"
            return ReplicaActor(world, name, receiver, setting, rates, is_standby=is_standby)
        if kind == "receiver":
            return self._make_receiver(name, index)
        makers: dict[str, Callable[[], Actor]] = {
            buffer.NAME: lambda: BufferActor(world, setting, rates),
            COORDINATOR_NAME: lambda: CoordinatorActor(world, setting),
            PUBLISHER_NAME: lambda: PublisherActor(world, setting, rates),
            learner.NAME: lambda: LearnerActor(world, setting, rates, self._num_steps),
        }
        return makers[name]()

    def _make_receiver(self, name: str, index: int) -> Actor:
        cohort, replicas = self._setting.cohort, self._setting.replicas
        if index % cohort:
            return Stub(self.world, name)
        last = index + 1 if cohort == 1 else min(replicas, index + cohort)
        names = tuple(f"rollout.{one}" for one in range(index, last))
        return ReceiverActor(self.world, name, self._setting, names)
