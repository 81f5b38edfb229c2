"""A fleet of any size in virtual time: the planner's, whose buffer is the real ledger and order of waiting.

Owns the clock of the buffer's work: only its requests and ticks are timed, in processor time of this thread.
What a request costs before it reaches the ledger does not grow with the fleet; `sockets` measures that.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType

from asyncrl.buffer.ledger.census import take_census
from asyncrl.buffer.ledger.tickets import LedgerSettings
from asyncrl.planner.actors.buffer import BufferActor
from asyncrl.planner.rates import Rates
from asyncrl.planner.setting import UNLIMITED, LengthsModel, Setting
from asyncrl.planner.simulation import Simulation
from asyncrl.planner.world import Message, World

GROUP_SIZE, NUM_TOKENS, PROMPT_TOKENS = 16, 4096, 64
GPU_TOKENS_PER_S = 2_500.0
"""Of one replica: an 8B model with long answers on one GPU, as an order of magnitude."""
GROUP_S = GROUP_SIZE * NUM_TOKENS / GPU_TOKENS_PER_S
"""A replica finishes a group so often: 26 s."""
IN_FLIGHT = 2
"""Groups of one replica: with those that are stored and reserved fewer than `max_lag` admits."""
SIGMA = 0.5
"""Of the length of an answer; its median makes the mean `NUM_TOKENS`."""
SWAP_S = 1.0
STEPS_PER_CHECKPOINT = 5
MAX_LAG = 4


@dataclass(frozen=True)
class Cost:
    """Cost of a number of trajectories.

    Attributes:
        us_per_trajectory: Processor time of all requests of replicas and learner.
        tick_share: Of a core, for the ticks of the buffer, in the fleet's own time.
        core_share: Of a core, for requests and ticks, in the fleet's own time.
    """

    trajectories: int
    virtual_s: float
    us_per_trajectory: float
    tick_share: float
    core_share: float


class Meter:
    """Processor time and function calls of the buffer's requests and ticks.

    Attributes:
        request_s, tick_s: Seconds so far. num_calls: Of functions by requests, None while none are counted.
    """

    def __init__(self) -> None:
        self.request_s = self.tick_s = 0.0
        self.num_calls: int | None = None

    def count(self, act: Callable[[], None]) -> None:
        """Do `act` and count its calls of functions; slow."""
        num_calls = 0

        def note(frame: FrameType, event: str, argument: object) -> None:
            nonlocal num_calls
            num_calls += event in ("call", "c_call")

        before = sys.getprofile()
        sys.setprofile(note)
        try:
            act()
        finally:
            sys.setprofile(before)
        assert self.num_calls is not None, "it is counting"
        self.num_calls += num_calls


class TimedBuffer(BufferActor):
    """The planner's buffer, with a meter."""

    def __init__(self, world: World, setting: Setting, rates: Rates) -> None:
        self.meter = Meter()
        super().__init__(world, setting, rates)

    def receive(self, src: str, message: Message) -> None:
        began_s = time.thread_time()
        if self.meter.num_calls is None:
            super().receive(src, message)
        else:
            self.meter.count(lambda: super(TimedBuffer, self).receive(src, message))
        self.meter.request_s += time.thread_time() - began_s

    def tick(self) -> None:
        began_s = time.thread_time()
        super().tick()
        self.meter.tick_s += time.thread_time() - began_s


class Fleet:
    """A run of `num_replicas`.

    Args:
        load: Ratio of the learner's time for a step to the fleet's time to generate it: above 1 replicas
            wait for leases.
    """

    def __init__(self, num_replicas: int, load: float) -> None:
        self.groups_per_step = num_replicas
        setting, rates = make_setting(num_replicas), make_rates(load)
        self._simulation = Simulation(setting, rates, seed=0, steps=sys.maxsize, buffer_type=TimedBuffer)
        buffer = self._simulation.buffer
        assert isinstance(buffer, TimedBuffer), "the simulation has started one"
        self._buffer, self.meter = buffer, buffer.meter

    @property
    def num_trained(self) -> int:
        """Trajectories of the steps that are over."""
        return len(self._simulation.watch.records) * self.groups_per_step * GROUP_SIZE

    def run(self, num_trajectories: int) -> Cost:
        """Go on until so many more trajectories were trained."""
        world, meter, trained = self._simulation.world, self.meter, self.num_trained
        began_s, request_s, tick_s = world.now, meter.request_s, meter.tick_s
        world.run(lambda: self.num_trained - trained >= num_trajectories)
        count, virtual_s = self.num_trained - trained, world.now - began_s
        request_s, tick_s = meter.request_s - request_s, meter.tick_s - tick_s
        share = (request_s + tick_s) / virtual_s
        return Cost(count, virtual_s, 1e6 * request_s / count, tick_s / virtual_s, share)

    def count_calls(self, num_trajectories: int) -> float:
        """Go on likewise, slowly; return how many calls of functions the requests took per trajectory.

        They are the same on every machine: where time grows and they do not, memory is what is slow.
        """
        self.meter.num_calls, trained = 0, self.num_trained
        self.run(num_trajectories)
        calls, self.meter.num_calls = self.meter.num_calls, None
        return calls / (self.num_trained - trained)

    @property
    def residue(self) -> int:
        """Residue of the ledger's accounting laws; 0 if they hold."""
        return take_census(self._buffer.ledger.state).residue

    @property
    def num_waiting(self) -> int:
        """Replicas that work on fewer groups than they could."""
        return sum(one.num_free > 0 for one in self._simulation.replicas)


def make_setting(num_replicas: int) -> Setting:
    """Return a run with a step of one group per replica and no evaluations."""
    ledger = LedgerSettings(
        run_seed=0,
        groups_per_step=num_replicas,
        max_lag=MAX_LAG,
        ready_batches=1,
        memory_bytes=1 << 50,
        max_group_bytes=1 << 30,
        lease_s=60.0,
        max_attempts=3,
    )
    return Setting(
        ledger=ledger,
        run_seed=0,
        replicas=num_replicas,
        num_samples=GROUP_SIZE,
        trained_samples=GROUP_SIZE,
        max_groups=IN_FLIGHT,
        max_sequences=UNLIMITED,
        max_tokens=4 * NUM_TOKENS,
        prompt_tokens=PROMPT_TOKENS,
        lengths=LengthsModel(SIGMA, NUM_TOKENS * math.exp(-(SIGMA**2) / 2)),
        num_prompts=1 << 20,
        parallelism=num_replicas,
        sync_deadline_s=600.0,
        checkpoint_every=STEPS_PER_CHECKPOINT,
        checkpoints_kept=1,
    )


def make_rates(load: float) -> Rates:
    """Return the speeds of a replica on a GPU, and of a learner that takes `load` times as long."""
    num_requests = IN_FLIGHT * GROUP_SIZE
    return Rates(
        decode=((1.0, GPU_TOKENS_PER_S / num_requests), (num_requests, GPU_TOKENS_PER_S)),
        step_s=load * GROUP_S,
        step_s_per_token=0.0,
        swap_s=SWAP_S,
        buffer_op_s=0.0,
    )
