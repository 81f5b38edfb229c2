"""The supervisor: the real fleet machine, which starts and watches the other actors.

Owns how a service is made. It looks at its services directly, not through the network: they are its children.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from asyncrl.control.fleet.machine import FleetMachine, FleetRules
from asyncrl.control.fleet.messages import Begin, Event, Heard, Start, Tick
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
from asyncrl.planner.setting import NEVER, WATCH_S, Setting
from asyncrl.planner.world import Actor, World

NAME = "supervisor"


class Stub(Actor):
    """A receiver whose work another one of its cohort does."""

    state = "READY"


class SupervisorActor(Actor):
    """See the module.

    Args:
        buffer_type: Of the buffer that it starts.

    Attributes:
        machine: The real one.
    """

    def __init__(
        self, world: World, setting: Setting, rates: Rates, num_steps: int, buffer_type: type[BufferActor]
    ) -> None:
        super().__init__(world, NAME)
        self._buffer_type = buffer_type
        self._setting, self._rates, self._num_steps = setting, rates, num_steps
        self.machine = FleetMachine(self._rules(setting), world.now)
        self._heard: dict[str, ServiceState] = {}

    @staticmethod
    def _rules(setting: Setting) -> FleetRules:
        """Return the run's rules, stretched for a fleet that is looked at seldom; its silence is no news."""
        rules = setting.fleet
        return replace(
            rules,
            start_deadline_s=max(rules.start_deadline_s, 4 * WATCH_S),
            silence_s=NEVER,
            long_silence_s=NEVER,
        )

    def begin(self) -> None:
        """Start the run."""
        self.hear(Begin(self._setting.replicas, self._setting.standby))
        self.every(WATCH_S, self._look)

    def hear(self, event: Event) -> None:
        """Hand an event to the machine and do what it says."""
        for effect in self.machine.apply(event, self.world.now):
            if isinstance(effect, Start):  # nothing dies and nobody scales the fleet: others are of the end
                self.world.start(self._make(effect.name, effect.is_standby))

    def _look(self) -> None:
        for name in self.machine.names:
            self._listen(self.world.actors[name])
        self.hear(Tick())

    def _listen(self, actor: Actor) -> None:
        """Hand on what an actor says if it differs from its last word: thousands say little that is new."""
        state = ServiceState(getattr(actor, "state", "READY"))
        if self._heard.get(actor.name) == state:
            return
        self._heard[actor.name] = state
        done = actor.num_done if isinstance(actor, ReplicaActor) else int(getattr(actor, "step", 0))
        self.hear(Heard(actor.name, state, done))

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
            buffer.NAME: lambda: self._buffer_type(world, setting, rates),
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
