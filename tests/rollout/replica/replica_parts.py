"""A replica with a scripted engine, a buffer service and a hand-fed receiver, for tests of the loop."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from asyncrl.buffer import composition
from asyncrl.buffer.client import LearnerClient, ReplicaClient
from asyncrl.core.config.tree import Config, EvalSection, SourceSection
from asyncrl.core.errors import AsyncrlError, DeadlineExceeded
from asyncrl.core.runtime.clock import SystemClock
from asyncrl.core.runtime.interface import Runtime
from asyncrl.core.runtime.threads import ThreadEvent, ThreadRuntime
from asyncrl.core.service import ServiceContext
from asyncrl.core.staleness import PolicyVersion
from asyncrl.core.status.service import BufferStatus
from rollout_service.data.prompts import PromptSet
from rollout_service.data.sources import load_sources
from rollout_service.engine.metered import MeteredEngine
from rollout_service.engine.scripted.engine import ScriptedEngine
from rollout_service.evaluation.wiring import make_evaluator
from rollout_service.replica.parts import ReplicaParts, ReplicaSettings
from rollout_service.replica.service import Replica
from rollout_service.rewards.score import Reward
from rollout_service.rewards.shaping import Overlong
from rollout_service.sampling.episode import SingleTurn
from rollout_service.sampling.groups import GroupRunner, GroupSettings
from rollout_service.tasks.digit_sort.examples import draw_split
from rollout_service.tasks.digit_sort.folder import write_prompts
from rollout_service.tasks.digit_sort.vocabulary import EOS, build_tokenizer
from tests.rollout.data.files import load_prompts
from tests.waiting import wait_for
from weight_sync.memory.staging import Staged

WAIT_S = 60.0
GROUP_SIZE = 4


@dataclass
class HandFedReceiver:
    """A `WeightLink` whose versions the test puts in."""

    staged: list[Staged] = field(default_factory=list)
    reports: list[tuple[int, bool]] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    wakes: list[Callable[[], object]] = field(default_factory=list)
    is_fenced: bool = False
    is_away: bool = False

    def offer(self, number: int, step: int) -> None:
        self.staged.append(Staged(PolicyVersion(number, step), "", None))  # type: ignore[arg-type]
        for wake in self.wakes:
            wake()

    async def next_staged(self, serving_number: int, wait_s: float) -> Staged | None:
        loop, is_offered = asyncio.get_running_loop(), asyncio.Event()
        self.wakes = [lambda: loop.call_soon_threadsafe(is_offered.set)]
        for _ in range(2):
            for staged in self.staged:
                if staged.version.number > serving_number:
                    return staged
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(is_offered.wait(), wait_s)
        return None

    async def report_loaded(self, number: int, ok: bool, error: str = "") -> None:
        self.reports.append((number, ok))

    async def pin(self) -> None:
        self.calls.append("pin")

    async def unpin(self) -> None:
        self.calls.append("unpin")
        if self.is_away:
            raise DeadlineExceeded("the receiver is gone")

    async def drain(self) -> None:
        self.calls.append("drain")

    def close(self) -> None:
        self.calls.append("close")


def make_config(folder: Path, advantage: str = "grpo", **rollout: Any) -> Config:
    return Config.model_validate(
        {
            "model": {"path": str(folder), "dtype": "float32"},
            "data": {"train": str(folder / "train.parquet"), "eval": str(folder / "eval.parquet")},
            "reward": {"fn": "digit_sort"},
            "rollout": {"group_size": GROUP_SIZE, "max_tokens": 6, "engine": "scripted", **rollout},
            "learner": {"groups_per_step": 4},
            "staleness": {"max_lag": 1},
            "buffer": {"journal": "none", "lease_s": 60.0},
            "algorithm": {"drop_constant_groups": False, "advantage": advantage},
        }
    )


def write_data(folder: Path) -> None:
    split = draw_split(0, 50, 12)
    write_prompts(folder / "train.parquet", split.train, "train")
    write_prompts(folder / "eval.parquet", split.held_out, "eval")


@contextlib.contextmanager
def running(service: Any) -> Iterator[list[AsyncrlError]]:
    """Run a service in a thread until the end of the block; what it raises is collected."""
    stop, failures = ThreadEvent(), []

    def run() -> None:
        try:
            service.run(stop)
        except AsyncrlError as error:
            failures.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield failures
    finally:
        stop.set()
        thread.join(WAIT_S)
        assert not thread.is_alive(), "a service did not stop"


@dataclass
class Stage:
    """All parts of a test with one replica."""

    replica: Replica
    receiver: HandFedReceiver
    engine: ScriptedEngine
    learner: LearnerClient
    address: str
    prompts: PromptSet
    failures: list[AsyncrlError]

    def state(self) -> str:
        return str(self.replica.status().state)

    def census(self) -> BufferStatus:
        return self.learner.status()

    def serve_first_version(self) -> int:
        """Register and offer the first version, and wait until the replica is ready."""
        self.learner.open("test")
        number = self.learner.register_version(0)
        self.receiver.offer(number, 0)
        wait_for(lambda: self.state() == "READY", "READY")
        return number


@contextlib.contextmanager
def open_stage(
    folder: Path,
    reward: Reward,
    /,
    tokens_per_s: float = 0.0,
    advantage: str = "grpo",
    overlong: Overlong | None = None,
    evaluation: dict[str, Any] | None = None,
    sources: Sequence[SourceSection] = (),
    make_client: Callable[[str, str, float], ReplicaClient] = ReplicaClient,
    is_standby: bool = False,
    lease_s: float = 60.0,
    renew_as_of_s: float = 0.0,
    runtime: Runtime | None = None,
    **parts: Any,
) -> Iterator[Stage]:
    """A buffer service and a replica of it, running; the replica on a runtime of its own.

    It renews its leases as if they lasted `renew_as_of_s`, where that is given. `parts` are more of it.
    """
    runtime = runtime or ThreadRuntime()
    write_data(folder)
    config = make_config(folder, advantage)
    buffer_section = config.buffer.model_copy(update={"lease_s": lease_s})
    config = config.model_copy(update={"eval": EvalSection(**(evaluation or {})), "buffer": buffer_section})
    buffer = composition.build(ServiceContext(config, "buffer.0", folder / "run", "test"))
    with running(buffer):
        wait_for(lambda: buffer.status().address, "the buffer's address")
        address = buffer.status().address
        tokenizer = build_tokenizer()
        train = SourceSection(path=str(folder / "train.parquet"))
        prompts = load_sources([train, *sources], tokenizer, 16)
        held_out = load_prompts(folder / "eval.parquet", tokenizer, 16)
        receiver, engine = HandFedReceiver(), ScriptedEngine(EOS, tokens_per_s)

        async def build() -> ReplicaParts:
            metered = MeteredEngine(engine, SystemClock())
            environment = SingleTurn(metered, tokenizer, reward, overlong)
            settings = GroupSettings(0, GROUP_SIZE, 1.0, 6, has_greedy=advantage == "remax")
            return ReplicaParts(
                engine=metered,
                buffer=make_client(address, "rollout.0", 5.0),
                weights=receiver,
                runner=GroupRunner(environment, prompts, settings),
                evaluator=make_evaluator(config, environment, tokenizer, held_out),
                prompts=prompts,
                overlong=overlong,
                **parts,
            )

        settings = ReplicaSettings(4, renew_as_of_s or lease_s, 60.0)
        replica = Replica(runtime, "rollout.0", settings, build, is_standby=is_standby)
        learner = LearnerClient(address)
        with running(replica) as failures:
            yield Stage(replica, receiver, engine, learner, address, prompts, failures)
        learner.close()
