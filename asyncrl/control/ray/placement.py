"""Placement of services on nodes (pure).

Owns the rule: a service of which a run has one runs at home, the node where `asyncrl up` was called. A
replica, its engine and its receiver, runs on one node with room for it: the node with the fewest replicas,
home last. A receiver that starts again goes to the node of its engine. Invariant: no node gets more of the
run than it has room for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from asyncrl.core.errors import ConfigError

OF_REPLICA = ("rollout", "receiver")
TOO_LARGE = "A replica's engine runs on one node: lower rollout.gpus or rollout.cpus, or add a larger node"
_SLACK = 1e-6


@dataclass(frozen=True)
class Node:
    """A living node of the cluster, with its total resources."""

    id: str
    address: str
    cpus: float = 0.0
    gpus: float = 0.0


@dataclass(frozen=True)
class Claim:
    """Resources that a service was promised, and their node."""

    node: str
    cpus: float
    gpus: float


class Placement:
    """Node of each service; called anew at each start of a service.

    >>> placement = Placement("a")
    >>> nodes = [Node("a", "10.0.0.1", cpus=4), Node("b", "10.0.0.2", cpus=4)]
    >>> placement.choose(nodes, "buffer.0"), placement.choose(nodes, "rollout.0", cpus=1.0)
    ('a', 'b')

    Args:
        home: The id of the node of all that a run has once.
        needs: CPUs and GPUs by kind of service, for those that were found and not placed.
    """

    def __init__(self, home: str, needs: Mapping[str, tuple[float, float]] | None = None) -> None:
        self.home = home
        self._needs = dict(needs or {})
        self._claims: dict[str, Claim] = {}
        self._claims_on: dict[str, dict[str, Claim]] = {}

    def choose(self, nodes: Sequence[Node], name: str, cpus: float = 0.0, gpus: float = 0.0) -> str:
        """Return the id of the node for the service `name`, and remember it until `forget`.

        Raises:
            ConfigError: No node has room.
        """
        self.forget(name)
        kind, _, index = name.partition(".")
        if kind not in OF_REPLICA:
            return self._claim(name, self.home, cpus, gpus)
        mate = self._claims.get(f"{OF_REPLICA[1 - OF_REPLICA.index(kind)]}.{index}")
        if mate is not None and any(node.id == mate.node for node in nodes):
            return self._claim(name, mate.node, cpus, gpus)
        with_room = [node for node in nodes if self._has_room(node, cpus, gpus)]
        if not with_room:
            is_too_large = all(cpus > node.cpus or gpus > node.gpus for node in nodes)
            raise ConfigError(
                f"no node has room for {name}, which takes {cpus:g} CPUs and {gpus:g} GPUs: "
                f"{'; '.join(self._describe(node) for node in nodes) or 'there are none'}",
                hint=TOO_LARGE if is_too_large else "Add a node, or ask for fewer replicas",
            )
        chosen = min(with_room, key=lambda node: (self._count(node), node.id == self.home, node.address))
        return self._claim(name, chosen.id, cpus, gpus)

    def forget(self, name: str) -> None:
        """Free the resources reserved for `name`, if any."""
        if (claim := self._claims.pop(name, None)) is not None:
            del self._claims_on[claim.node][name]

    def recall(self, name: str, node: str) -> None:
        """Record that a service, placed by an earlier supervisor, lives on `node`."""
        if name not in self._claims:
            self._claim(name, node, *self._needs.get(name.partition(".")[0], (0.0, 0.0)))

    def node_of(self, name: str) -> str | None:
        """Return the id of the node of a service that was placed."""
        claim = self._claims.get(name)
        return None if claim is None else claim.node

    def _claim(self, name: str, node: str, cpus: float, gpus: float) -> str:
        claim = self._claims[name] = Claim(node, cpus, gpus)
        self._claims_on.setdefault(node, {})[name] = claim
        return node

    def _has_room(self, node: Node, cpus: float, gpus: float) -> bool:
        free_cpus, free_gpus = self._free(node)
        return cpus <= free_cpus + _SLACK and gpus <= free_gpus + _SLACK

    def _free(self, node: Node) -> tuple[float, float]:
        claims = self._claims_on.get(node.id, {}).values()
        cpus, gpus = sum(claim.cpus for claim in claims), sum(claim.gpus for claim in claims)
        return node.cpus - cpus, node.gpus - gpus

    def _count(self, node: Node) -> int:
        return sum(name.startswith("rollout.") for name in self._claims_on.get(node.id, ()))

    def _describe(self, node: Node) -> str:
        free_cpus, free_gpus = self._free(node)
        return (
            f"{node.address} has {free_cpus:g} of {node.cpus:g} CPUs "
            f"and {free_gpus:g} of {node.gpus:g} GPUs free"
        )
