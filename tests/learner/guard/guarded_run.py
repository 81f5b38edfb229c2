"""A learner over a real buffer and publisher, with faults injected into its losses and checkpoints."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from asyncrl.buffer.client import LearnerClient, ReplicaClient
from asyncrl.buffer.journals.file_journal import FileJournal
from asyncrl.buffer.ledger.events import Reserved, Resumed, Trained
from asyncrl.buffer.store import ExperienceStore
from asyncrl.core.config.tree import Config
from asyncrl.core.experience import Group
from asyncrl.core.runtime.interface import Runtime
from asyncrl.core.runtime.threads import ThreadEvent, ThreadRuntime
from asyncrl.core.service_command import HandOverRows
from asyncrl.core.status.service import BufferStatus
from learner.backend import Models
from learner.batch_fetcher import BatchFetcher
from learner.checkpoint import CheckpointStore
from learner.checkpoint.snapshot import Snapshot
from learner.composition import open_recorder
from learner.leader.leader import Leader
from learner.megatron.backend import MegatronValueBackend
from learner.ranks import Ranks
from learner.service import LearnerService
from tests.buffer.parts import make_group, make_store, serving
from tests.learner.parts.training import open_backend, open_objective
from tests.weight_sync.cluster import Cluster
from weight_sync.publisher_client import PublisherClient

NUM_STEPS, EVERY, LR = 8, 2, 1e-4
BUCKET_BYTES = 4096


@dataclass
class Faults:
    """What goes wrong. Updates are counted from 1, over the run's minibatches.

    Attributes:
        policy, critic: Whether the loss of an update is multiplied by `factor`.
        busy: Steps at which no buffer for weights is free.
        before_write: Called with the number of the checkpoint, from 1, before a rank writes it.
        runtime: What the learner measures its time with.
        wrap: What is put around the leader's way to the buffer.
    """

    policy: Callable[[int], bool] = lambda call: False
    critic: Callable[[int], bool] = lambda call: False
    factor: float = 1e6
    busy: tuple[int, ...] = ()
    before_write: Callable[[int], None] = lambda number: None
    runtime: Runtime = field(default_factory=ThreadRuntime)
    wrap: Callable[[LearnerClient], Any] = lambda client: client


@dataclass
class FaultyModel:
    """A policy or a critic that does what `Faults` says."""

    inner: Any
    is_poisoned: Callable[[int], bool]
    faults: Faults
    num_calls: int = 0
    num_snapshots: int = 0

    def __getattr__(self, name: str):
        return getattr(self.inner, name)

    def update(self, minibatch, loss_fn):
        self.num_calls += 1
        factor = self.faults.factor if self.is_poisoned(self.num_calls) else 1.0

        def loss(*args):
            value, metrics = loss_fn(*args)
            return value * factor, metrics

        return self.inner.update(minibatch, loss)

    def snapshot_state(self) -> Snapshot:
        self.num_snapshots += 1
        taken = self.inner.snapshot_state()
        fields = {one.name: getattr(taken, one.name) for one in dataclasses.fields(taken)}
        return LateSnapshot(
            **fields, before=lambda number=self.num_snapshots: self.faults.before_write(number)
        )


@dataclass(frozen=True)
class LateSnapshot(Snapshot):
    before: Callable[[], None] = field(default=lambda: None)

    def write(self, folder: Path) -> dict[str, str]:
        self.before()
        return super().write(folder)


class BusyHandoff(PublisherClient):
    """The way to the real publisher; has no free buffer while the learner is at one of `busy_steps`."""

    busy_steps: tuple[int, ...] = ()
    leader: Leader

    def has_room(self) -> bool:
        return self.leader.step not in self.busy_steps and super().has_room()


@dataclass
class Run:
    """One learner over a real buffer, with a sampler that hands out groups of the newest version."""

    learner: LearnerService
    leader: Leader
    store: ExperienceStore
    address: str
    folder: Path
    checkpoints: CheckpointStore

    def go(self) -> None:
        stop = ThreadEvent()
        sampler = threading.Thread(target=lambda: asyncio.run(self._sample(stop)), daemon=True)
        sampler.start()
        try:
            self.learner.run(ThreadEvent())
        finally:
            stop.set()
            sampler.join(60.0)

    def status(self) -> BufferStatus:
        with contextlib.closing(LearnerClient(self.address)) as client:
            return client.status()

    def rows(self) -> list[dict[str, Any]]:
        return [dict(row) for row in self.learner.command(HandOverRows(0)).rows]

    def events(self) -> list[Any]:
        """Read the journal, once the run is closed."""
        with contextlib.closing(FileJournal(self.folder / "buffer", "never")) as journal:
            return list(journal.events())

    def resumed_steps(self) -> list[int]:
        return [event.step for event in self.events() if isinstance(event, Resumed)]

    async def _sample(self, stop: threading.Event) -> None:
        client = ReplicaClient(self.address, "sampler")
        await client.describe_data(1000, "digest")
        while not stop.is_set():
            version = self.store.ledger.state.versions.last_number
            reply = await client.lease(version, 1, 0.05)
            for grant in reply.grants:
                await client.push(make_pair(grant.ticket, grant.attempt, version))
        client.close()


def make_pair(ticket: int, attempt: int, version: int) -> Group:
    """A group of two different answers, one of them right."""
    group = make_group(ticket, attempt, version)
    wrong, right = group.trajectories
    right = replace(right, response_ids=right.response_ids + 1 + ticket % 7)
    return replace(group, trajectories=(wrong, right))


@contextlib.contextmanager
def running(
    model: Path, cluster: Cluster, folder: Path, faults: Faults, algorithm: dict[str, Any], **sections: Any
) -> Iterator[Run]:
    """Yield a learner of one rank on what is in `folder`; a second one there resumes the first."""
    config = make_config(model, **{"algorithm": {"veto": 1e-3} | algorithm, **sections})
    size = config.learner.groups_per_step
    store = make_store(folder / "buffer", drops_constant_groups=False, groups_per_step=size)
    checkpoints = CheckpointStore(folder / "checkpoints", sections.get("checkpoint", {}).get("keep", 3))
    objective = replace(open_objective(**algorithm), max_lag=config.staleness.max_lag)
    names = ("minibatches", "lr", "lr_schedule", "steps", "max_tokens_per_microbatch")
    kept = {name: getattr(config.learner, name) for name in names}
    models = open_models(model, objective, faults, config.critic.lr, warmup_steps=0, **kept)
    with serving(store) as service, contextlib.ExitStack() as stack:
        address = service.status().address
        client, fetching = (stack.enter_context(contextlib.closing(LearnerClient(address))) for _ in range(2))

        def connect(token: int) -> PublisherClient:
            made = BusyHandoff(
                ThreadRuntime(), cluster.publisher.address, cluster.shm_prefix, BUCKET_BYTES, token
            )
            made.leader, made.busy_steps = leader, faults.busy
            stack.callback(made.close)
            return made

        leader = Leader(config, faults.wrap(client), connect, checkpoints, runtime=faults.runtime)
        place = Ranks(0, 1, torch.device("cpu"))
        parts = (models, objective, BatchFetcher(fetching), checkpoints, folder / "weights", leader)
        recorder = open_recorder(config, folder, place, models.policy) if config.run.record else None
        learner = LearnerService(config, place, *parts, runtime=faults.runtime, recorder=recorder)
        yield Run(learner, leader, store, address, folder, checkpoints)


def open_models(model: Path, objective, faults: Faults, critic_lr: float = LR, **changes) -> Models:
    """Return the models that the objective asks for, with the faults in them."""
    policy = FaultyModel(open_backend(model, **changes), faults.policy, faults)
    critic = reference = None
    if objective.needs_values:
        critic = FaultyModel(
            open_backend(model, None, MegatronValueBackend, **changes | {"lr": critic_lr}),
            faults.critic,
            faults,
        )
    if objective.needs_reference:
        reference = open_backend(model, is_frozen=True, **changes)
    return Models(policy, critic, reference)


def make_config(model: Path, **sections) -> Config:
    """The sampler's log-probs are invented: of the signals only the gradient's norm is looked at."""
    unseen = ("actor/ppo_kl", "actor/pg_clipfrac", "perf/throughput", "weights/engine_gap_mean")
    unseen += ("actor/step_kl", "actor/step_gain")
    has_critic = sections.get("algorithm", {}).get("advantage") == "gae"
    limits = dict.fromkeys((*unseen, "rollout_corr/rollout_is_eff_sample_size")) | {
        "actor/grad_norm": {"max": 50.0},
        "critic/grad_norm": {"max": 50.0},
    }
    return Config.model_validate(
        {
            "model": {"path": str(model), "dtype": "float32"},
            "data": {"train": "none", "eval": "none"},
            "reward": {"fn": "digit_sort"},
            "rollout": {"group_size": 2, "max_tokens": 5},
            "staleness": {"max_lag": 1},
            "learner": {"groups_per_step": 2, "minibatches": 1, "lr": LR, "steps": NUM_STEPS}
            | sections.get("learner", {}),
            "checkpoint": sections.get("checkpoint", {"every_steps": EVERY}),
            "eval": sections.get("eval", {}),
            "guard": {"limits": limits} | sections.get("guard", {}),
            "run": sections.get("run", {}),
            "algorithm": sections.get("algorithm", {}),
            **({"critic": {"lr": LR} | sections.get("critic", {})} if has_critic else {}),
            "weight_sync": {"bucket_bytes": BUCKET_BYTES},
        }
    )


def check_no_group_was_trained_at_two_steps_of_one_lineage(events: list) -> None:
    reserved: dict[int, set[int]] = {}
    step_of: dict[int, int] = {}
    for event in events:
        match event:
            case Reserved(step, tickets):
                reserved.setdefault(step, set()).update(tickets)
            case Resumed(_, resumed_step):
                step_of = {ticket: step for ticket, step in step_of.items() if step < resumed_step}
            case Trained(step):
                assert not reserved[step] & set(step_of)
                step_of |= dict.fromkeys(reserved[step], step)
