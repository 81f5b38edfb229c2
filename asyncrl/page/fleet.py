"""Services of a run as rows, and a large fleet as groups of its services, the worst first (pure).

A kind of services with more than `FEW` of them is large: its replicas, say. A view has rows of all services
of the other kinds, and of a large kind the worst of the unhealthy. Invariants: each service of a large kind
is counted once in each of its groupings; a view has as many rows and groups for a thousand as for a hundred.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from asyncrl.control.snapshot import ServiceView, Snapshot
from asyncrl.core.states import ServiceState
from asyncrl.core.status.service import kind_of
from asyncrl.page.figures import DASH, count_of
from asyncrl.page.picture import Group, Grouping, Service
from asyncrl.page.snapshot import index_of, metric_of, state_of, tone_of

FEW, MAX_WORST, MAX_NODES, MAX_BITS = 16, 8, 8, 64
LAGGING = 2
"""Versions behind the newest from which a replica is unhealthy: one is on its way to it."""
TONES = ("bad", "warn", "busy", "good")
"""The worst first."""
_Ranked = tuple[int, str, str]
"""Rank of a group, the worst first, its name and its tone."""
_ORDER = {"rollout": 0, "learner": 1, "buffer": 2, "weight_sync": 3, "publisher": 4, "receiver": 5}


class Fleet:
    """The services of a snapshot."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._services = snapshot.services
        told = [one.number or 0 for name, one in self._services.items() if kind_of(name) == "rollout"]
        published = metric_of(snapshot, "weights/published") or 0  # a row is older than a status
        self._newest = max(published, *told, 0)
        self._kinds: dict[str, list[str]] = {}
        for name in sorted(self._services, key=index_of):
            self._kinds.setdefault(kind_of(name), []).append(name)

    def all_rows(self) -> list[Service]:
        """Return every service."""
        return [self._row(name) for _, names in self._in_order() for name in names]

    def rows(self) -> list[Service]:
        """Return the services of small kinds, and the worst of large ones."""
        found = [self._worst(names) if len(names) > FEW else names for _, names in self._in_order()]
        return [self._row(name) for names in found for name in names]

    def groupings(self) -> list[Grouping]:
        """Return the groups of large kinds: by state; of replicas by version and by node too."""
        return [
            one for kind, names in self._in_order() if len(names) > FEW for one in self._group(kind, names)
        ]

    def _in_order(self) -> list[tuple[str, list[str]]]:
        return sorted(self._kinds.items(), key=lambda item: _ORDER.get(item[0], 9))

    def _group(self, kind: str, names: list[str]) -> Iterator[Grouping]:
        yield {"title": f"{kind} by state", "groups": _groups_of(map(self._state_group, names))}
        if kind == "rollout":
            yield {"title": f"{kind} by version", "groups": _groups_of(map(self._lag_group, names))}
        if kind == "rollout" and len({self._services[name].node for name in names}) > 1:
            yield {"title": f"{kind} by node", "groups": self._by_node(names)}

    def _state_group(self, name: str) -> _Ranked:
        tone = tone_of(state_of(self._services[name]))
        return TONES.index(tone), self._state(name), tone

    def _lag_group(self, name: str) -> _Ranked:
        """Return the group of its lag; that of a large one is wide."""
        if not self._services[name].number:
            return -MAX_BITS, "no version", "busy"
        lag = int(self._lag(name))
        width = min(lag.bit_length(), MAX_BITS - 1)
        text = _behind(lag) if lag < LAGGING else f"{1 << width - 1} to {(1 << width) - 1} behind"
        return -width, text, "warn" if lag >= LAGGING else "good"

    def _by_node(self, names: list[str]) -> list[Group]:
        """Return the nodes with unhealthy replicas, the worst first, and one group of all others."""
        nodes = {name: (self._services[name].node or DASH).split(",") for name in names}
        total = Counter(node for name in names for node in nodes[name])
        bad = Counter(node for name in filter(self._is_unhealthy, names) for node in nodes[name])
        worst = [node for node, _ in sorted(bad.items(), key=lambda item: (-item[1], item[0]))][:MAX_NODES]
        groups = [_group_of(f"{node[:12]}, {bad[node]} unhealthy,", total[node], "warn") for node in worst]
        others = total.keys() - {*worst}
        rest = sum(total[node] for node in others)
        tone = "warn" if any(bad[node] for node in others) else "good"
        name = f"{len(others)} {'other ' if worst else ''}nodes"
        return [*groups, *([_group_of(name, rest, tone)] if others else [])]

    def _worst(self, names: Iterable[str]) -> list[str]:
        """Return the worst of the unhealthy."""

        def badness(name: str) -> tuple[int, float, float]:
            tone, age_s = tone_of(state_of(self._services[name])), self._services[name].heartbeat_age_s
            return TONES.index(tone), -self._lag(name), -(age_s or 0.0)

        return sorted(filter(self._is_unhealthy, names), key=badness)[:MAX_WORST]

    def _is_unhealthy(self, name: str) -> bool:
        state = state_of(self._services[name])
        is_held = state == ServiceState.PINNED  # at an older version, on purpose
        return tone_of(state) != "good" or (self._lag(name) >= LAGGING and not is_held)

    def _lag(self, name: str) -> float:
        """Return by how many versions a replica is behind; 0 for one that has none, and for others."""
        number = self._services[name].number
        return max(0.0, self._newest - number) if number and kind_of(name) == "rollout" else 0.0

    def _state(self, name: str) -> str:
        service = self._services[name]
        return state_of(service) + (" (standby)" if service.standby else "")

    def _row(self, name: str) -> Service:
        service: ServiceView = self._services[name]
        is_replica, version, age_s = kind_of(name) == "rollout", service.number, service.heartbeat_age_s
        return {
            "name": name,
            "is_replica": is_replica,
            "state": self._state(name),
            "tone": tone_of(state_of(service)),
            "version": count_of(version or None) if is_replica else "",
            "behind": _behind(self._newest - version) if is_replica and version and self._newest else "",
            "heartbeat": DASH if age_s is None else f"{age_s:.1f} s",
            "restarts": count_of(service.restarts),
            "gateway": service.gateway or "",
        }


def _behind(versions: float) -> str:
    return "newest" if versions <= 0 else f"{versions:.0f} behind"


def _groups_of(ranked: Iterable[_Ranked]) -> list[Group]:
    counts = sorted(Counter(ranked).items(), key=lambda item: (item[0][0], -item[1], item[0][1]))
    return [_group_of(name, count, tone) for (_, name, tone), count in counts]


def _group_of(name: str, count: int, tone: str) -> Group:
    return {"name": name, "count": count_of(count), "tone": tone}
