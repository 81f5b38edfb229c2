"""A learner whose weights find no free buffer waits for one, and for its batch, by events."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from asyncrl.buffer.rules.learner import RESERVE_WAIT_S
from tests.simulation.kernel.network import LATENCY_S
from tests.simulation.kernel.world import Process, World
from tests.simulation.outcome import Outcome
from tests.simulation.parts.crew import RESTART_S
from tests.simulation.parts.stage import play_stage
from tests.simulation.run.data import read_data
from tests.simulation.run.play import Stage
from tests.simulation.run.scenario import Scenario
from weight_sync.publisher import PublisherService
from weight_sync.publisher_client import ROOM_WAIT_S

TRAINED_AT, KILLED_AT, FREE_AT = 5.0, 15.1, 20.3
SCENARIO = Scenario(
    seed=1,
    replicas=2,
    versions=1,
    every_s=1.0,
    bytes_per_s=60_000.0,
    deadline_s=6.0,
    parallelism=1,
    uses_delta=False,
    preempts=0.0,
    strikes=(),
    steps=4,
    max_lag=1,
)
"""Without new weights two steps are trained; the third one's groups wait for them."""


class CrowdedStage(Stage):
    """A run whose publisher has no free buffer from its first version on: transfers hold all the others.

    Attributes:
        published: When each step's weights were, in virtual seconds. looked: When room was found for them.
        num_looks: Of the learner until `FREE_AT`, which found no room.
        num_runs: How often it ran from `TRAINED_AT` until then.
    """

    def __init__(
        self,
        scenario: Scenario,
        then: Callable[[CrowdedStage], None],
        world: World,
        prefix: str,
        folder: Path,
    ) -> None:
        super().__init__(scenario, world, prefix, folder)
        self.published: dict[int | None, float] = {}
        self.looked: dict[int | None, float] = {}
        self.num_looks = self.num_runs = 0
        self._held: list = []
        self.world.on_point.append(self._hear)
        then(self)

    @property
    def publisher(self) -> PublisherService:
        return self.cluster.services["publisher.0"]

    def _hear(self, process: Process, name: str, place: tuple[int | None, ...]) -> None:
        if name == "learner.publishing":
            self.looked[place[0]] = self.world.now
        if name == "learner.published":
            self.published[place[0]] = self.world.now
            if place[0] == 0:
                self._fill()

    def _fill(self) -> None:
        pool = self.publisher._pool
        self._held = [slot for slot in pool._slots if slot is not pool.current]
        for slot in self._held:
            slot.num_transfers += 1

    def free(self) -> None:
        """Let the transfers end."""
        learner = f" run {self.cluster.crew.processes['learner.0']}/main"
        self.num_looks = self.publisher.counters["deferred"]
        self.num_runs = sum(
            learner in line and float(line.split()[0]) > TRAINED_AT for line in self.world.lines
        )
        pool = self.publisher._pool
        self.publisher._server.call_soon(lambda: [pool.release(slot) for slot in self._held])

    def kill(self) -> None:
        """End the publisher: its successor has free buffers."""
        self.cluster.crew.processes["publisher.0"].kill()


def play(then: Callable[[CrowdedStage], None], scenario: Scenario = SCENARIO) -> tuple[Outcome, CrowdedStage]:
    read_data()
    stages: list[CrowdedStage] = []

    def make(world: World, prefix: str, folder: Path) -> CrowdedStage:
        stages.append(CrowdedStage(scenario, then, world, prefix, folder))
        return stages[0]

    outcome = play_stage(1, "calm", World("crowded", keeps_lines=True), make)
    return outcome, stages[0]


def free_later(stage: CrowdedStage) -> None:
    stage.world.after(FREE_AT, stage.free)


def test_weights_go_out_at_the_moment_a_buffer_is_free_and_nobody_looks_meanwhile() -> None:
    outcome, stage = play(free_later)
    assert not outcome.broken
    assert 1 not in stage.published and stage.looked[2] - FREE_AT < 10 * LATENCY_S
    assert list(stage.published) == [0, 2, 3, 4]
    assert 0 < stage.num_looks <= FREE_AT / ROOM_WAIT_S + 1
    assert 0 < stage.num_runs <= (FREE_AT - TRAINED_AT) * (1 / RESERVE_WAIT_S + 3 / ROOM_WAIT_S)


def test_a_publisher_that_dies_while_room_is_awaited_is_noticed_and_its_successor_gets_the_weights() -> None:
    outcome, stage = play(lambda stage: stage.world.after(KILLED_AT, stage.kill))
    assert not outcome.broken
    assert list(stage.published) == [0, 2, 3, 4]
    assert stage.published[2] - KILLED_AT < RESTART_S[1] + RESERVE_WAIT_S, "noticed by the break alone"


def test_the_last_weights_go_out_at_the_moment_a_buffer_is_free() -> None:
    outcome, stage = play(free_later, replace(SCENARIO, max_lag=SCENARIO.steps))
    assert not outcome.broken
    assert list(stage.published) == [0, SCENARIO.steps]
    assert stage.looked[SCENARIO.steps] - FREE_AT < 10 * LATENCY_S
