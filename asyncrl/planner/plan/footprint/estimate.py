"""Resource plan of a run, made after all checks of its configuration have passed.

All errors are found at once. Nothing is started or written here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from asyncrl.buffer.composition import max_group_bytes
from asyncrl.control.machine.ports import PORTS
from asyncrl.control.machine.resources import check_resources
from asyncrl.control.record.sinks.opening import check_sinks
from asyncrl.control.roster import SERVERS
from asyncrl.core.config.tree import Config
from asyncrl.core.errors import ConfigError
from asyncrl.planner.plan import derived, folders, machine, models, names
from asyncrl.planner.plan.checks import (
    NOT_CHECKED_ELSEWHERE,
    PORTABLE_CHECKS,
    SIZE_CHECKS,
    check_folder,
    check_journal,
    count_nodes,
    find_notes,
    find_unchecked,
)
from asyncrl.planner.plan.derived import Derived, InFlight
from asyncrl.planner.plan.footprint import shared_memory
from asyncrl.planner.plan.footprint.memory import Part
from asyncrl.planner.plan.footprint.shared_memory import SharedMemory
from asyncrl.planner.plan.footprint.version_cost import ASSUMED_WEIGHTS, Stage, VersionCost
from asyncrl.planner.plan.prepare import is_builtin
from asyncrl.planner.plan.sources import check_sources


def check_lengths(config: Config) -> Iterator[str]:
    """A row is trained whole, on all the ranks of its copy together: cp does not make it shorter."""
    longest = config.data.max_prompt_tokens + config.rollout.max_tokens
    if longest > config.learner.max_tokens_per_microbatch:
        yield (
            f"learner.max_tokens_per_microbatch: {config.learner.max_tokens_per_microbatch} is less than a "
            f"row may have: data.max_prompt_tokens + rollout.max_tokens = {longest}; raise it to that, and "
            "learner.cp if memory does not suffice"
        )


def check_data(config: Config) -> Iterator[str]:
    """Say which prompts are not there, cannot be read, or do not fit."""
    has_environment = config.rollout.environment is not None
    yield from check_sources(config.data, Path(config.model.path), is_builtin, has_environment)


CHECKS: tuple[Callable[[Config], Iterator[str]], ...] = (
    folders.check_run_folder,
    models.check_models,
    models.check_adapters,
    models.check_router_replay,
    models.check_router_losses,
    models.check_reward_models,
    check_lengths,
    check_data,
    names.check_imports,
    names.check_reward_files,
    names.check_environment_file,
    names.check_gateway,
    names.check_engines,
    lambda config: check_resources(config, machine.count_replicas(config)),
    machine.check_limits,
    machine.check_host,
    check_sinks,
    check_journal,
    check_folder,
    *SIZE_CHECKS,
)
THIS_MACHINE, ANY_NODE = "this machine", "any node of the Ray cluster"
OTHER_NODES = "other nodes of the Ray cluster"
PROCESSES_OF_A_REPLICA = 3
"""The front end, its engine core, and its receiver."""


@dataclass(frozen=True)
class Placement:
    """Services of one kind: how many, where, and what Ray reserves for all of them together."""

    kind: str
    count: int
    num_processes: int
    cpus: float
    gpus: float
    where: str


@dataclass(frozen=True)
class Choice:
    """The transport of weights, and the reason for it."""

    backend: str
    why: str


@dataclass(frozen=True)
class Plan:
    """Resources of a run.

    Attributes:
        placement: Its services, those that are started first before the others.
        ports: Listening addresses by name.
        memory: Demand for memory, part by part.
        in_flight: Most work that may be open at once.
        weight_sync: Transport of weights.
        derived: Other values that follow from the configuration.
        shared_memory: Most shared memory of versions in transfer, if the model's size is known.
        not_checked: Skipped checks.
        notes: Valid values that are easily mistaken.
    """

    placement: tuple[Placement, ...]
    ports: dict[str, str]
    memory: tuple[Part, ...]
    in_flight: InFlight
    weight_sync: Choice
    derived: tuple[Derived, ...]
    shared_memory: SharedMemory | None
    not_checked: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    version: tuple[Stage, ...] = ()

    @property
    def num_processes(self) -> int:
        """Services, the vLLM engine cores among them."""
        return sum(one.num_processes for one in self.placement)

    @property
    def num_cpus(self) -> float:
        """CPU share that Ray reserves."""
        return sum(one.cpus for one in self.placement)

    @property
    def num_gpus(self) -> float:
        """GPUs that Ray reserves."""
        return sum(one.gpus for one in self.placement)


def check(config: Config) -> Plan:
    """Return the plan of a run.

    Raises:
        ConfigError: With every problem found, a line each.
    """
    return _check(config, (*CHECKS, machine.check_port, machine.check_gateway_ports))


def check_beside(config: Config) -> Plan:
    """As `check`, for a run that is live already and holds its ports."""
    return _check(config, CHECKS)


def check_elsewhere(config: Config) -> Plan:
    """As `check`, for another machine: without this one's hardware, files and network, which it says."""
    found = _check(config, (check_lengths, *PORTABLE_CHECKS))
    return replace(found, not_checked=(*NOT_CHECKED_ELSEWHERE, *found.not_checked))


def _check(config: Config, checks: Sequence[Callable[[Config], Iterator[str]]]) -> Plan:
    problems = [problem for check_one in checks for problem in check_one(config)]
    if problems:
        raise ConfigError("\n".join(problems))
    replicas, receivers = machine.count_replicas(config), machine.count_receivers_here(config)
    return Plan(
        placement=tuple(_place(config, replicas)),
        ports=dict(_ports(config)),
        memory=tuple(count_nodes(config)),
        in_flight=derived.count_in_flight(config, max_group_bytes(config), replicas),
        weight_sync=choose_backend(config),
        derived=tuple(derived.derive(config)),
        shared_memory=shared_memory.count(config, receivers, machine.count_learner_nodes(config)),
        not_checked=tuple(find_unchecked(config)),
        notes=tuple(find_notes(config)),
        version=tuple(find_stages(config)),
    )


def find_stages(config: Config) -> Iterator[Stage]:
    """Yield what a version of the model costs, stage by stage; nothing of one whose size is not known."""
    at_publisher = shared_memory.count(config, 0)
    if at_publisher is not None:
        yield from VersionCost.of(config, at_publisher.version_bytes).stages(ASSUMED_WEIGHTS)


def choose_backend(config: Config) -> Choice:
    """Return how weights travel: over gloo, as NCCL is refused, or through a folder."""
    section = config.weight_sync
    if section.all_by_folder:
        return Choice("folder", f"each replica reads {section.folder}")
    if section.folder is not None:
        return Choice("gloo and folder", f"replicas on other hosts than this read {section.folder}")
    if section.is_direct:
        return Choice("direct", "learner ranks send to engine workers, over NCCL or gloo; the rest is staged")
    is_set = section.backend == "gloo"
    why = "publisher and receivers have no GPU, which NCCL would need"
    return Choice("gloo", "weight_sync.backend says so" if is_set else why)


def _place(config: Config, replicas: int) -> Iterator[Placement]:
    elsewhere = ANY_NODE if config.launcher.is_cluster else THIS_MACHINE
    for kind in ("supervisor", "buffer", "weight_sync", "publisher"):
        yield Placement(kind, 1, 1, 0.0, 0, THIS_MACHINE)
    here, learner, rollout = machine.count_ranks_here(config), config.learner, config.rollout
    for ranks, where in ((here, THIS_MACHINE), (learner.num_ranks - here, OTHER_NODES)):
        if ranks:
            yield Placement("learner", ranks, ranks, learner.cpus * ranks, learner.gpus * ranks, where)
    num_processes = PROCESSES_OF_A_REPLICA * replicas
    cpus, gpus = rollout.cpus * replicas, rollout.gpus * replicas
    yield Placement("rollout", replicas, num_processes, cpus, gpus, elsewhere)


def _ports(config: Config) -> Iterator[tuple[str, str]]:
    launcher, gateway = config.launcher, config.rollout.gateway
    host = launcher.host or "127.0.0.1"
    yield "control API", f"127.0.0.1:{launcher.api_port or 'a free port'}"
    if launcher.host is None:
        yield "services", "socket files in a folder that only this user can open"
    else:
        room = f"{len(SERVERS)} ports in a row of {PORTS.start} to {PORTS.stop - 1}"
        yield "services", f"{host}: {room}"
    if config.learner.num_ranks > 1:
        yield "learner ranks", f"{host}: a free port to meet at, and those of torch.distributed"
    if gateway is not None:
        yield "gateways", f"{host}:{gateway.port} + n of rollout.n" if gateway.port else f"{host}: free ports"
