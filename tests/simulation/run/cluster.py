"""The processes of a whole run: those of weight sync, buffer, replicas, and a leader with a played rank.

replicas (`Replica`)   lease from and push to buffer.0 (`BufferService`, a played journal)
learner.0 (`Leader`)   takes batches of buffer.0 and publishes to publisher.0
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from asyncrl.buffer.client import LearnerClient, ReplicaClient
from asyncrl.buffer.composition import group_bounds, ledger_settings
from asyncrl.buffer.messages import EvaluationOrder, Opening
from asyncrl.buffer.service import BufferService
from asyncrl.buffer.store import ExperienceStore
from asyncrl.core.experience import Group, Trajectory
from asyncrl.core.service_command import AnyCommand, DeregisterReplica, Pause, Unpause
from learner.batch_fetcher import BatchFetcher
from learner.checkpoint import CheckpointStore
from learner.leader.leader import Leader
from rollout_service.data.prompts import TokenizedPrompt
from rollout_service.engine.metered import MeteredEngine
from rollout_service.engine.protocol import Sampling
from rollout_service.evaluation.evaluator import EvaluationSettings, Evaluator
from rollout_service.replica.parts import ReplicaParts, ReplicaSettings
from rollout_service.replica.service import Replica
from rollout_service.sampling.episode import EpisodeRunner, SingleTurn
from rollout_service.sampling.groups import GroupRunner, GroupSettings
from rollout_service.tasks.digit_sort.vocabulary import EOS
from tests.simulation.kernel.network import Wires
from tests.simulation.kernel.runtime import SimRuntime
from tests.simulation.kernel.world import Process, World
from tests.simulation.parts.crew import Main
from tests.simulation.parts.engine import PlayedEngine
from tests.simulation.parts.journal import Disk, SimulatedJournal
from tests.simulation.run.data import LengthReward, make_config, read_data
from tests.simulation.run.judge import RunJudge
from tests.simulation.run.rank import PlayedRank
from tests.simulation.run.scenario import Scenario
from tests.simulation.sync.cluster import SyncCluster, address_of
from tests.simulation.sync.content import BUCKET_BYTES, Truth
from weight_sync.link import ReceiverLink
from weight_sync.publisher_client import PublisherClient

T = TypeVar("T")
EVENTS_PER_SNAPSHOT = 60
CALL_S, RETIRE_S = 5.0, 0.3


class RunCluster(SyncCluster):
    """See the module.

    Attributes:
        disk: Of the buffer's journal.
        leader: Of the learner that was started last.
        store: Of the buffer that was built last, by the process `buffer_of`.
    """

    singles = ("buffer.0", "weight_sync.0", "publisher.0", "learner.0")

    def __init__(
        self,
        world: World,
        wires: Wires,
        scenario: Scenario,
        truth: Truth,
        judge: RunJudge,
        prefix: str,
        folder: Path,
        disk: Disk,
    ) -> None:
        super().__init__(world, wires, scenario, truth, judge, prefix, folder)
        self.run_scenario, self.run_judge, self.disk = scenario, judge, disk
        self.config = make_config(scenario, folder)
        self.store: ExperienceStore | None = None
        self.buffer_of: Process | None = None
        self.leader: Leader | None = None
        self.crew.on_loss.append(self._tell_buffer)

    def mains(self) -> dict[str, Callable[[str], Main]]:
        """Return, by kind of service, what a process of a name does."""
        return {**super().mains(), "buffer": lambda name: self._buffer}

    def _tell_buffer(self, name: str) -> None:
        """Have the buffer take back at once what a dead replica held, as a supervisor does."""
        if name.startswith("rollout."):
            self.world.after(RETIRE_S, self.command_buffer, DeregisterReplica(name))

    def command_buffer(self, command: AnyCommand) -> None:
        """Tell the buffer something, as soon as it can be reached."""
        service = self.living("buffer.0")
        if service is not None:
            service.command(command)
        else:
            self.world.after(RETIRE_S, self.command_buffer, command)

    def pause(self, is_paused: bool) -> None:
        """Pause or unpause the run, and have a checkpoint written."""
        self.command_buffer(Pause() if is_paused else Unpause())
        if self.leader is not None:
            self.leader.is_paused = is_paused
            self.leader.ask_checkpoint(self.leader.step)

    def _buffer(self, runtime: SimRuntime) -> None:
        config, scenario = self.config, self.run_scenario
        journal = SimulatedJournal(self.disk, scenario.is_always_synced, EVENTS_PER_SNAPSHOT)
        store = self.store = ExperienceStore(
            ledger_settings(config),
            journal,
            group_size=config.rollout.group_size,
            drops_constant_groups=config.algorithm.drop_constant_groups,
            now=runtime.now(),
            bounds=group_bounds(config),
        )
        service = BufferService(store, runtime, address_of("buffer.0"))
        self.buffer_of = runtime.process
        self.serve("buffer.0", runtime, service)

    def _roll_out(self, name: str, runtime: SimRuntime) -> None:
        scenario, data = self.run_scenario, read_data()
        process, receiver = runtime.process, name.replace("rollout", "receiver")

        async def build() -> ReplicaParts:
            on_load, refuses = partial(self.judge.hear_load, process), partial(self._refuses, name)
            played = self.engines[name] = PlayedEngine(EOS, scenario.tokens_per_s, on_load, refuses)
            engine = MeteredEngine(played, runtime)
            episodes = SingleTurn(engine, data.tokenizer, LengthReward(self.world, scenario.failing_share))
            sizes = GroupSettings(
                scenario.seed, scenario.group_size, 1.0, scenario.max_tokens, stop=scenario.stop
            )
            return ReplicaParts(
                engine=engine,
                buffer=WatchedClient(runtime, name, self.run_judge),
                weights=ReceiverLink(runtime, address_of(receiver)),
                runner=GroupRunner(episodes, data.prompts, sizes),
                evaluator=WatchedEvaluator(episodes, scenario, self.run_judge),
                prompts=data.prompts,
            )

        settings = ReplicaSettings(scenario.max_groups, scenario.lease_s, 60.0, resumes_partial=True)
        service = Replica(runtime, name, settings, build)
        self.serve(name, runtime, service)

    def _learn(self, runtime: SimRuntime) -> None:
        config = self.config
        client = WatchedLearner(runtime, self.run_judge)
        kept = config.checkpoint
        store = CheckpointStore(self.folder / "checkpoints", kept.keep, kept.keep_best)
        connect = partial(PublisherClient, runtime, address_of("publisher.0"), self.prefix, BUCKET_BYTES)
        leader = self.leader = Leader(config, client, connect, store, 1, runtime)
        fetcher = BatchFetcher(client, prefetches=True)
        rank = PlayedRank(runtime, self.run_scenario, leader, fetcher, store, self.run_judge)
        for order in leader.orders(runtime.event()):
            rank.perform(order)
        if rank.is_complete:
            self.crew.retire("learner.0")
            self.run_judge.last_node = rank.node


class WatchedClient(ReplicaClient):
    """The production client, and what it was told of pushes."""

    def __init__(self, runtime: SimRuntime, replica: str, judge: RunJudge) -> None:
        super().__init__(address_of("buffer.0"), replica, CALL_S, runtime=runtime)
        self._judge = judge

    async def push(self, group: Group) -> str:
        """Push a group."""
        result = await super().push(group)
        if result == "stored":
            self._judge.acknowledged.add((group.ticket, group.attempt))
        return result


class WatchedLearner(LearnerClient):
    """The production client of a learner, and which of its calls were answered."""

    def __init__(self, runtime: SimRuntime, judge: RunJudge) -> None:
        super().__init__(address_of("buffer.0"), deadline_s=30.0, runtime=runtime)
        self._judge = judge

    def open(self, holder: str) -> Opening:
        """Become the learner."""
        opening = super().open(holder)
        self._judge.newest_token = max(self._judge.newest_token, opening.token)
        return opening

    def _repeat(self, call: Callable[[float], T]) -> T:
        """Make a call. One of an older learner, sent after another one had opened, is to be refused."""
        newest, token = self._judge.newest_token, self.token
        found = super()._repeat(call)
        if token and token < newest:
            self._judge.say(f"S5: a call of token {token} was answered after token {newest} had opened")
        return found


class WatchedEvaluator(Evaluator):
    """The production evaluator, and which versions its answers were sampled by."""

    def __init__(self, runner: EpisodeRunner, scenario: Scenario, judge: RunJudge) -> None:
        settings = EvaluationSettings(1.0, scenario.max_tokens, scenario.seed)
        super().__init__(self, read_data().held_out.prompts, settings, lambda answer: None)  # type: ignore[arg-type]
        self._episodes, self._judge = runner, judge
        self._seen: set[int] = set()

    async def run(self, order: Any, *more: Any) -> Any:
        """Answer a part, or, as the runner of its own episodes, a prompt."""
        if not isinstance(order, EvaluationOrder):
            return await self._answer(order, *more)
        self._seen = set()
        tallies = await super().run(order)
        self._judge.hear_answer(order.id, order.part, frozenset(self._seen))
        return tallies

    async def _answer(self, prompt: TokenizedPrompt, sampling: Sampling, episode_id: str) -> Trajectory:
        found = await self._episodes.run(prompt, sampling, episode_id)
        self._seen |= {span.version for span in found.spans}
        return found
