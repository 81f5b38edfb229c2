"""Launcher for a cluster: a `Launcher` that places each service on a node.

Owns the services that wait for a place, and those that were lost with a node. Invariant: a replica that no
node has room for waits and the run goes on; the learner's ranks wait together and say so; all start as soon
as a node has room.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from asyncrl.control.ray.launcher import Launcher
from asyncrl.control.ray.placement import Node, Placement, is_of_rank
from asyncrl.control.roster import ServiceSpec
from asyncrl.core.errors import ConfigError, ServiceFailed
from asyncrl.core.obstacle import Cause, Obstacle
from asyncrl.core.service_command import A, Command
from asyncrl.core.states import ServiceState
from asyncrl.core.status.service import ServiceStatus
from asyncrl.core.status.statuses import Statuses

log = logging.getLogger(__name__)

WAITING = ServiceState.WAITING
"""The state of a service that no node has room for."""
TRY_EVERY_S, ASK_EVERY_S = 2.0, 1.0
"""Between two tries to place services that wait; two looks for the nodes of services that start."""
RANK = "learner."
TROUBLED = (ServiceState.DEAD, ServiceState.FAILED, ServiceState.SILENT)


class ClusterLauncher:
    """Places services, and has `launcher` start them there.

    Args:
        launcher: Starts a service on the node that its spec names.
        placement: Node of each service.
        nodes: Returns the nodes that are alive.
        clean: Ends all that a killed service has left on a node; told the node's id and the service's name.
    """

    def __init__(
        self,
        launcher: Launcher,
        placement: Placement,
        nodes: Callable[[], Sequence[Node]],
        clean: Callable[[str, str], None],
    ) -> None:
        self._launcher = launcher
        self._placement = placement
        self._nodes = nodes
        self._clean = clean
        self._waiting: dict[str, tuple[ServiceSpec, str]] = {}
        self._addresses: dict[str, str] = {}
        self._living: Sequence[Node] = ()
        self._tried_at = self._asked_at = float("-inf")

    def start(self, spec: ServiceSpec) -> None:
        """Begin to start a service where there is room, or have it wait."""
        if time.monotonic() - self._asked_at >= ASK_EVERY_S:
            self._living, self._asked_at = self._nodes(), time.monotonic()
        self._place(spec, self._living)

    def _place(self, spec: ServiceSpec, nodes: Sequence[Node]) -> None:
        was_waiting = self._waiting.pop(spec.name, None) is not None
        self._addresses |= {node.id: node.address for node in nodes}
        try:
            node = self._placement.choose(nodes, spec.name, spec.cpus, spec.gpus)
        except ConfigError as error:
            if not was_waiting:
                log.warning("%s waits: %s", spec.name, error)
            self._waiting[spec.name] = (spec, str(error))
            return
        called = {one: at for one, at in spec.context.addresses.items() if self._may_call(spec.name, one)}
        self._launcher.start(replace(spec, node=node, context=replace(spec.context, addresses=called)))

    def _may_call(self, name: str, other: str) -> bool:
        """Tell whether a service may call another: a publisher but the first is called by its rank alone."""
        return not is_of_rank(other) or self._placement.seat_of(other)[1] == name

    def statuses(self, names: Iterable[str], deadline_s: float) -> Statuses:
        """Return each service's status; `WAITING` for one that no node has room for."""
        self._place_waiting()
        names = list(names)
        found = self._launcher.statuses([name for name in names if name not in self._waiting], deadline_s)
        for name, status in found.items():
            if status.node:
                self._placement.recall(name, status.node)
        first = next((one for one in self._waiting if one.startswith(RANK)), "")
        waiting = {name: self._wait(name, first) for name in names if name in self._waiting}
        return found | self._left_alone(found) | self._lost(found) | waiting

    def _wait(self, name: str, first: str) -> ServiceStatus:
        """Return the status of a service that waits; the `first` rank that does tells why the run stands."""
        why = self._waiting[name][1]
        obstacles = (Obstacle("", Cause.NO_ROOM, why),) if name == first else ()
        return ServiceStatus(state=WAITING, error=why, obstacles=obstacles)

    def _lost(self, found: Statuses) -> dict[str, ServiceStatus]:
        """Return the statuses of services whose node is gone, which made others fail."""
        placed = {name: self._placement.nodes_of(name) for name in found if found[name].state in TROUBLED}
        if set().union(*placed.values()) <= {self._placement.home}:
            return {}
        living = {node.id for node in self._nodes()}
        lost = {name: node for name, nodes in placed.items() for node in nodes if node not in living}
        gone = {name: self._loss(node) for name, node in lost.items()}
        return {name: ServiceStatus(state=ServiceState.DEAD, error=why) for name, why in gone.items()}

    def _left_alone(self, found: Statuses) -> dict[str, ServiceStatus]:
        """Return the statuses of publishers that have no rank on their node any more."""
        seats = {name: self._placement.seat_of(name)[0] for name in found if is_of_rank(name)}
        left = [
            one for one, seat in seats.items() if seat and self._placement.node_of(one) not in (None, seat)
        ]
        why = "the learner's ranks are on other nodes now"
        return dict.fromkeys(left, ServiceStatus(state=ServiceState.DEAD, error=why))

    def _loss(self, node: str) -> str:
        which, services = self._addresses.get(node, node), ", ".join(self._placement.placed_on(node))
        rest = "they are started again where there is room: bring the node back, or add another"
        return f"the node {which} ({node[:6]}) is gone, and with it {services}; {rest}"

    def command(self, name: str, command: Command[A], deadline_s: float) -> A:
        """Pass a command to a service. Raises ServiceFailed, also for one that waits; or DeadlineExceeded."""
        if name in self._waiting:
            raise ServiceFailed(f"{name} waits for a node and cannot '{command.word}'")
        return self._launcher.command(name, command, deadline_s)

    def stop(self, names: Iterable[str], deadline_s: float) -> set[str]:
        """Ask services to end, all at once; return the names of those that did, with those not yet placed."""
        names = list(names)
        waiting = {name for name in names if self._waiting.pop(name, None) is not None}
        return waiting | self._launcher.stop([name for name in names if name not in waiting], deadline_s)

    def kill(self, name: str) -> None:
        """End a service's process now, and give its place back."""
        self._waiting.pop(name, None)
        nodes = self._placement.nodes_of(name)
        self._placement.forget(name)
        self._launcher.kill(name)
        for node in nodes:
            if node != self._placement.home:  # home is the supervisor's to clean
                self._clean(node, name)

    def adopt(self) -> set[str]:
        """Adopt the services of an earlier launcher; their first statuses name their nodes."""
        return self._launcher.adopt()

    def _place_waiting(self) -> None:
        if not self._waiting or time.monotonic() - self._tried_at < TRY_EVERY_S:
            return
        self._tried_at = time.monotonic()
        nodes = self._nodes()  # asked once: each is connected to
        for spec, _ in list(self._waiting.values()):
            try:
                self._place(spec, nodes)
            except ServiceFailed as error:
                log.warning("%s waits on: %s", spec.name, error)
                self._placement.forget(spec.name)
                self._waiting[spec.name] = (spec, str(error))
