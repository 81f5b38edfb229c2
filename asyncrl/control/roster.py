"""Services of a run, and the launch specification of each (pure)."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from asyncrl.core.config.sections.learner import DETERMINISTIC
from asyncrl.core.config.tree import Config, LearnerSection, RolloutSection
from asyncrl.core.service import INTERFACE_VARIABLES, ServiceContext
from asyncrl.core.variants import backend_facts, engine_facts

RUN_VARIABLE = "ASYNCRL_RUN_ID"
"""Marks every process of a run, so that what is left over can be found and ended by pid."""


@dataclass(frozen=True)
class ServiceSpec:
    """Launch specification of one service.

    Attributes:
        factory: `module:function` of its composition root.
        context: Context of the service.
        log_path: Its log file.
        cpus: CPU share that Ray reserves on each of its nodes.
        gpus: GPUs that Ray reserves there.
        environment: Variables set before the process imports anything, see `variables`.
        node: Ray's id of the node that it must run on, see `NODE_VARIABLE`; empty leaves that to Ray.
    """

    factory: str
    context: ServiceContext
    log_path: str
    cpus: float = 0.0
    gpus: float = 0.0
    environment: dict[str, str] = field(default_factory=dict)
    node: str = ""

    @property
    def name(self) -> str:
        return self.context.name

    @property
    def variables(self) -> dict[str, str]:
        """Return its environment. Without a GPU it sees none: Ray would show it all GPUs of its node."""
        return {**self.environment, **({} if self.gpus else {"CUDA_VISIBLE_DEVICES": ""})}


if TYPE_CHECKING:
    from asyncrl.core.sockets.keys import RunKeys

FACTORIES = {
    "buffer": "asyncrl.buffer.composition:build",
    "weight_sync": "weight_sync.control_composition:build_coordinator",
    "publisher": "weight_sync.composition:build_publisher",
    "receiver": "weight_sync.composition:build_receiver",
    "learner": "learner.composition:build",
    "rollout": "rollout_service.composition:build",
}

LEARNER_ON_GPU = {
    "PYTORCH_ALLOC_CONF": "expandable_segments:True",  # packed rows have another shape in each microbatch
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",  # a rank whose peer hangs ends at its group's timeout, by SIGABRT
    "TORCH_NCCL_BLOCKING_WAIT": "0",
}
"""Whatever the user's shell says of it."""
SERVERS = ("buffer.0", "weight_sync.0", "publisher.0")
"""The services that all nodes call; with `launcher.host` the n-th listens on the run's n-th port."""


@dataclass(frozen=True)
class Roster:
    """Makes the spec of any service of one run.

    Attributes:
        config: The resolved configuration.
        run_dir: `runs/<name>`.
        run_id: Unique per start.
        socket_dir: Folder (mode 0700) of the services' sockets.
        rendezvous: Where the learner's ranks meet.
        first_port: Of the ports that `launcher.host` is used with.
        keys: Of the run's sockets, if they have any.
        interface: On which torch.distributed talks; empty leaves that to it.
        secret: Of this start, see `ServiceContext`; without it no service can name its shared memory.
        num_publishers: Number of nodes that the learner began on.
    """

    config: Config
    run_dir: Path
    run_id: str
    socket_dir: Path
    rendezvous: str
    first_port: int = 0
    keys: RunKeys | None = None
    interface: str = ""
    secret: str = field(default="", repr=False)
    num_publishers: int = 1

    def spec(self, name: str, *, is_standby: bool = False) -> ServiceSpec:
        """Return how to start `name`; a replica may be started to stand by."""
        kind, index = name.split(".")
        others = [f"publisher.{number}" for number in range(1, self.num_publishers) if kind == "learner"]
        sizes = {"learner": self.config.learner.num_ranks, "publisher": self.num_publishers}
        context = ServiceContext(
            config=self.config,
            name=name,
            run_dir=self.run_dir,
            run_id=self.run_id,
            addresses={one: self._address(one) for one in (*called_by(name), *others)},
            bind=self._address(name),
            sockets=self.socket_dir,
            rank=int(index) if kind in sizes else 0,
            world_size=sizes.get(kind, 1),
            rendezvous=self.rendezvous,
            keys=self._keys_of(name),
            is_standby=is_standby,
            secret="" if kind == "rollout" else self.secret,
        )
        sections = {"learner": self.config.learner, "rollout": self.config.rollout}
        section: LearnerSection | RolloutSection | None = sections.get(kind)  # type: ignore[assignment]
        num_nodes = self.config.rollout.num_nodes if kind == "rollout" else 1
        return ServiceSpec(
            factory=FACTORIES[kind],
            context=context,
            log_path=str(self.run_dir / "logs" / f"{name}.log"),
            cpus=section.cpus / num_nodes if section else 0.0,
            gpus=section.gpus / num_nodes if section else 0.0,
            environment=self._environment(kind, section),
        )

    def _environment(self, kind: str, section: LearnerSection | RolloutSection | None) -> dict[str, str]:
        """Return the variables of a service's process."""
        found = dict.fromkeys(INTERFACE_VARIABLES, self.interface) if self.interface else {}
        if section is None:
            return found
        if kind != "learner":
            modes = (engine_facts(name).find_deterministic_mode() for name in self.config.rollout.engines)
            found |= {mode: "1" for mode in modes if mode}
        if section.gpus:
            found["OMP_NUM_THREADS"] = str(max(1, int(section.cpus)))
        if kind != "learner" or not section.gpus:
            return found
        learner = self.config.learner
        found |= {**LEARNER_ON_GPU, **backend_facts(learner.backend).gpu_environment}
        return {**found, **(DETERMINISTIC if learner.deterministic else {})}

    def _keys_of(self, name: str) -> RunKeys | None:
        if self.keys is None:
            return None
        if name in SERVERS or name.startswith(("receiver.", "publisher.")):
            return self.keys.of_server()
        return self.keys.of_generator() if name.startswith("rollout.") else self.keys.of_caller()

    def _address(self, name: str) -> str:
        """Return where `name` listens; who is none of `SERVERS` is called from the same node alone."""
        host = self.config.launcher.host
        if host is None or name not in SERVERS:
            return f"ipc://{self.socket_dir / name}"
        return f"tcp://{host}:{self.first_port + SERVERS.index(name)}"


def called_by(name: str) -> tuple[str, ...]:
    """Return the services whose addresses `name` needs: a replica those of its own receiver too."""
    kind, _, index = name.partition(".")
    return (*SERVERS, f"receiver.{index}") if kind == "rollout" else SERVERS
