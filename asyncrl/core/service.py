"""Interface between the control plane and a service: construction, status, notification, stop."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from asyncrl.core.config.tree import Config
from asyncrl.core.files.private import derive_name, make_secret
from asyncrl.core.obstacle import Tell, tell_nobody
from asyncrl.core.rpc.message import Message
from asyncrl.core.runtime.interface import Event, Runtime
from asyncrl.core.runtime.threads import ThreadRuntime
from asyncrl.core.service_command import AnyCommand
from asyncrl.core.sockets.keys import ClientKeys, RunKeys, ServerKeys
from asyncrl.core.status.service import ServiceStatus

SERVICE_VARIABLE = "ASYNCRL_SERVICE"
"""Names the service whose process it is, or was started by: an engine's core dies with its replica."""
NODE_VARIABLE = "ASYNCRL_NODE"
"""Ray's id of its node; of a replica over several, all of theirs with commas between, its own first."""
INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
PAUSED_FILE = "paused"
"""In the run's folder."""


@dataclass(frozen=True)
class ServiceContext:
    """All that a service gets to know at its start.

    Attributes:
        config: The run's resolved configuration.
        name: `<kind>.<index>`, for example `rollout.1`.
        run_dir: `runs/<name>`.
        run_id: Unique per start of the run. Not secret: `/tmp` and `/dev/shm` show it.
        addresses: RPC address of each service that this one may call, by service name. A client may connect
            before the service listens.
        bind: Where this service's own RPC server listens.
        sockets: The run's private folder, also of temporary files; None leaves those where they are.
        rank: Rank among the learner's processes; of a publisher its stripe; else 0.
        world_size: Number of the learner's processes; of publishers, for one and the supervisor; else 1.
        rendezvous: `host:port` where the learner's ranks meet; empty with one rank.
        keys: Of the run's sockets; None leaves them plain, on loopback or socket files only.
        is_standby: A replica that follows versions and takes no leases until it is told `promote`.
        tell: Of the host, which has no other status until the service is built.
        runtime: Of the process; it is handed on to all that the service is built of.
        secret: Of this start; the names that other users of a machine must not guess are derived from it.
    """

    config: Config
    name: str
    run_dir: Path
    run_id: str
    addresses: dict[str, str] = field(default_factory=dict)
    bind: str = "tcp://127.0.0.1:*"
    sockets: Path | None = None
    rank: int = 0
    world_size: int = 1
    rendezvous: str = ""
    keys: RunKeys | None = None
    is_standby: bool = False
    tell: Tell = tell_nobody
    secret: str = field(default_factory=make_secret, repr=False)
    runtime: Runtime = field(default_factory=ThreadRuntime, repr=False)

    @property
    def kind(self) -> str:
        return self.name.split(".")[0]

    @property
    def index(self) -> int:
        return int(self.name.split(".")[1])

    @property
    def server_keys(self) -> ServerKeys | None:
        return self.keys.server if self.keys else None

    @property
    def client_keys(self) -> ClientKeys | None:
        return self.keys.client if self.keys else None

    @property
    def shm_prefix(self) -> str:
        """Start of the run's segment names in `/dev/shm`: a private folder (`core.files.private`)."""
        return f"asyncrl-{self.run_id}-{derive_name(self.secret, 'segments')}/"

    @property
    def is_paused(self) -> bool:
        """Whether this start of the run is paused: a service that is started again begins so."""
        return read_paused(self.run_dir) == self.run_id


def read_paused(run_dir: Path) -> str:
    """Return the `run_id` of the start that was paused, empty if none was."""
    try:
        return (run_dir / PAUSED_FILE).read_text()
    except FileNotFoundError:
        return ""


def write_paused(run_dir: Path, run_id: str, is_paused: bool) -> None:
    """Mark a start of the run as paused, or take the mark away. A later start does not heed it."""
    if is_paused:
        (run_dir / PAUSED_FILE).write_text(run_id)
    else:
        (run_dir / PAUSED_FILE).unlink(missing_ok=True)


class Service(Protocol):
    """A running part of the system. `run` has its own thread; the others may be called from any."""

    def run(self, stop: Event) -> None:
        """Work until `stop` is set or the work is done. An exception is the service's failure."""

    def status(self) -> ServiceStatus:
        """Return the status of its kind."""

    def command(self, command: AnyCommand) -> Message:
        """Do what the supervisor asks, and return the answer of the command's type."""
