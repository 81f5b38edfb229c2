"""Placement of services on nodes (pure).

Owns the rule: a service of which a run has one runs at home, the node where `asyncrl up` was called. Learner
ranks have room before any replica: as many as a node holds, home first. Their nodes have the publishers, in
the order of the ranks; the first rank on a node writes for those there. A replica, its engine and receiver,
runs on one node with room for it: the node with the fewest replicas, home last; an engine over several nodes
gets all at once, each for an equal part. A receiver that starts again goes to the first node of its engine.
Invariants: no node gets more than it has room for; ranks are placed together.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from asyncrl.core.config.tree import Config, LearnerSection
from asyncrl.core.errors import ConfigError

OF_REPLICA = ("rollout", "receiver")
TOO_LARGE = "Lower rollout.gpus or rollout.cpus, add a larger node, or set rollout.engine_args: {nnodes: N}"
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
    """Resources that a service was promised on each of its nodes, of which the first is its own."""

    nodes: tuple[str, ...]
    cpus: float
    gpus: float


def is_of_rank(name: str) -> bool:
    """Tell whether a service is a publisher that may be away from home."""
    return name.startswith("publisher.") and name != "publisher.0"


def pack_ranks(
    rooms: Mapping[str, int], learner: LearnerSection, wanted: Collection[int]
) -> dict[int, str] | None:
    """Return the node of each rank in `wanted`, None if they have no room.

    The ranks of a copy of the model, of a stage, and of a matrix stay together where a node holds them, in
    this order. Rank 0 goes to the first node: the publisher is there.

    Args:
        rooms: Number of ranks that each node can take; they are filled in this order.

    >>> pack_ranks({"home": 3, "b": 2}, LearnerSection(tp=2, dp=2), range(4))
    {0: 'home', 1: 'home', 2: 'b', 3: 'b'}
    """
    left, found, home = dict(rooms), dict[int, str](), list(rooms)[:1]
    width = learner.tp * learner.cp
    of_stage = [range(width * at, width * (at + 1)) for at in range(learner.dp * learner.pp)]
    copies = [[rank for stage in of_stage[at :: learner.dp] for rank in stage] for at in range(learner.dp)]
    units = [[rank for rank in copy if rank in wanted] for copy in copies]
    for size in (width * learner.pp, width, learner.tp, 1):
        parts = [unit[at : at + size] for unit in units for at in range(0, len(unit), size)]
        units = []
        for part in parts:
            fitting = (node for node in (home if 0 in part else left) if left[node] >= len(part))
            if (node := next(fitting, None)) is None:
                units.append(part)
                continue
            left[node] -= len(part)
            found |= dict.fromkeys(part, node)
    return None if units else found


class Placement:
    """Node of each service; called anew at each start of a service.

    Args:
        home: The id of the node of all that a run has once.
        config: Of the run.
    """

    def __init__(self, home: str, config: Config) -> None:
        self.home = home
        self._learner = config.learner
        count = self._num_nodes = config.rollout.num_nodes
        sections = (("learner", config.learner, 1), ("rollout", config.rollout, count))
        self._needs = {kind: (one.cpus / nodes, one.gpus / nodes) for kind, one, nodes in sections}
        self._ranks = [f"learner.{rank}" for rank in range(config.learner.num_ranks)]
        self._reserved: set[str] = set()  # ranks with room that were not started there yet
        self._claims: dict[str, Claim] = {}
        self._claims_on: dict[str, dict[str, Claim]] = {}
        self._sums: dict[str, tuple[float, float]] = {}  # of claims on a node, until one changes

    def choose(self, nodes: Sequence[Node], name: str, cpus: float = 0.0, gpus: float = 0.0) -> str:
        """Return the ids of the nodes for a service, commas between, each with its needs, until `forget`.

        Raises:
            ConfigError: No node has room, or the learner's ranks have none, which come first.
        """
        kind, _, index = name.partition(".")
        if name in self._ranks:
            if self.home not in (node.id for node in nodes):
                raise ConfigError(f"{name} has no place: home is not among the living nodes")
            self._reserve_ranks(nodes)
            self._reserved.discard(name)
            return self._claims[name].nodes[0]
        self.forget(name)
        if kind not in OF_REPLICA:
            if is_of_rank(name):
                self._reserve_ranks(nodes)
            return self._claim(name, self.seat_of(name)[0] if is_of_rank(name) else self.home, cpus, gpus)
        mate = self._claims.get(f"{OF_REPLICA[1 - OF_REPLICA.index(kind)]}.{index}")
        beside = [node for node in nodes if mate is not None and node.id == mate.nodes[0]]
        count = self._num_nodes if kind == "rollout" else 1
        if not beside or count > 1:
            self._reserve_ranks(nodes)
        with_room = [node for node in nodes if self._count_fitting(node, cpus, gpus)]
        chosen = sorted(
            with_room,
            key=lambda one: (one not in beside, self._count_replicas(one), one.id == self.home, one.address),
        )[:count]
        if len(chosen) < count or (beside and chosen[0] not in beside):
            is_too_large = all(cpus > node.cpus or gpus > node.gpus for node in nodes)
            where = f"no {count} nodes have" if count > 1 else "no node has"
            raise ConfigError(
                f"{where} room for {name}, which takes {cpus:g} CPUs and {gpus:g} GPUs"
                f"{' of each' if count > 1 else ''}: "
                f"{'; '.join(map(self._describe, nodes)) or 'there are none'}",
                hint=TOO_LARGE if is_too_large else "Add a node, or ask for fewer replicas",
            )
        return self._claim(name, ",".join(node.id for node in chosen), cpus, gpus)

    def forget(self, name: str) -> None:
        """Free the resources reserved for `name`, if any."""
        if (claim := self._claims.pop(name, None)) is not None:
            for node in claim.nodes:
                del self._claims_on[node][name]
                self._sums.pop(node, None)

    def recall(self, name: str, node: str) -> None:
        """Record that a service, placed by an earlier supervisor, lives on `node`."""
        if name not in self._claims or name in self._reserved:
            self._reserved.discard(name)
            self._claim(name, node, *self._needs.get(name.partition(".")[0], (0.0, 0.0)))

    def node_of(self, name: str) -> str | None:
        """Return the id of the node of a service that was placed, the first of several."""
        return next(iter(self.nodes_of(name)), None)

    def nodes_of(self, name: str) -> tuple[str, ...]:
        """Return the ids of the nodes of a service, none if it was not placed."""
        return claim.nodes if (claim := self._claims.get(name)) else ()

    def seat_of(self, publisher: str) -> tuple[str, str]:
        """Return the node of a publisher and the rank that writes for it; empty while a rank has no place."""
        firsts: dict[str | None, str] = {}
        for rank in self._ranks:
            firsts.setdefault(self.node_of(rank), rank)
        seats = [(node, rank) for node, rank in firsts.items() if node is not None]
        return seats[int(publisher.partition(".")[2]) % len(seats)] if None not in firsts else ("", "")

    def placed_on(self, node: str) -> list[str]:
        """Return the services that were started on `node`."""
        return sorted(self._claims_on.get(node, ()))

    def _reserve_ranks(self, nodes: Sequence[Node]) -> None:
        """Give each rank of the learner a place, or raise ConfigError.

        Anew for all if one's node is gone, as all are started again then; else for those without one.
        """
        living, places = {node.id for node in nodes}, {name: self.node_of(name) for name in self._ranks}
        if living >= set(places.values()):
            return
        is_whole = living >= {node for name, node in places.items() if node and name not in self._reserved}
        wanted = {name for name in self._ranks if not is_whole or name in self._reserved or not places[name]}
        for name in wanted:
            self.forget(name)
        rooms = {one.id: self._count_fitting(one, self._learner.cpus, self._learner.gpus) for one in nodes}
        order = sorted(nodes, key=lambda one: (one.id != self.home, -rooms[one.id], one.address))
        indices = [index for index, name in enumerate(self._ranks) if name in wanted]
        found = pack_ranks({one.id: rooms[one.id] for one in order}, self._learner, indices)
        if found is None:
            raise ConfigError(
                f"the learner's {len(self._ranks)} ranks, each with {self._learner.cpus:g} CPUs and "
                f"{self._learner.gpus:g} GPUs and the first at home, have no room: "
                f"{'; '.join(map(self._describe, nodes))}",
                hint="Add a node, or take replicas from one by 'asyncrl scale rollout=N'",
            )
        for rank, node in found.items():
            self._claim(self._ranks[rank], node, self._learner.cpus, self._learner.gpus)
        self._reserved = wanted

    def _claim(self, name: str, node: str, cpus: float, gpus: float) -> str:
        self.forget(name)
        claim = self._claims[name] = Claim(tuple(node.split(",")), cpus, gpus)
        for one in claim.nodes:
            self._claims_on.setdefault(one, {})[name] = claim
            self._sums.pop(one, None)
        return node

    def _count_fitting(self, node: Node, *needs: float) -> int:
        """Return how many services with these needs `node` has room for; without any, as many as ranks."""
        pairs = zip(self._free(node), needs, strict=True)
        counts = (int((free + _SLACK) // need) for free, need in pairs if need)
        return max(0, min(counts, default=len(self._ranks)))

    def _free(self, node: Node) -> tuple[float, float]:
        if node.id not in self._sums:  # one that waits asks every node, again and again
            claims = self._claims_on.get(node.id, {}).values()
            self._sums[node.id] = sum(claim.cpus for claim in claims), sum(claim.gpus for claim in claims)
        cpus, gpus = self._sums[node.id]
        return node.cpus - cpus, node.gpus - gpus

    def _count_replicas(self, node: Node) -> int:
        return sum(name.startswith("rollout.") for name in self._claims_on.get(node.id, ()))

    def _describe(self, node: Node) -> str:
        cpus, gpus = self._free(node)
        return f"{node.address} has {cpus:g} of {node.cpus:g} CPUs and {gpus:g} of {node.gpus:g} GPUs free"
