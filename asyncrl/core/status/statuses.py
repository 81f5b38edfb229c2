"""The statuses of a run's services, and the way of each across the edge of a process (pure).

Invariant: what arrives is a struct of the kind that the service's name says, or it is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TypeVar

import msgspec

from asyncrl.core.errors import WireError
from asyncrl.core.rpc.message import Message
from asyncrl.core.states import ServiceState
from asyncrl.core.status.replica import EngineStatus, ReplicaStatus
from asyncrl.core.status.service import (
    BUFFER,
    COORDINATOR,
    LEARNER,
    PUBLISHER,
    BufferStatus,
    CoordinatorStatus,
    LearnerStatus,
    PublisherStatus,
    ReceiverStatus,
    ServiceStatus,
    SupervisorStatus,
    kind_of,
)

S = TypeVar("S", bound=ServiceStatus)


class Statuses(Mapping[str, ServiceStatus]):
    """The statuses of a run's services by name, as they were last heard."""

    def __init__(self, found: Mapping[str, ServiceStatus] | None = None) -> None:
        self._found = dict(found or {})

    def __getitem__(self, name: str) -> ServiceStatus:
        return self._found[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)

    def __or__(self, newer: Mapping[str, ServiceStatus]) -> Statuses:
        return Statuses({**self._found, **newer})

    def state(self, name: str) -> ServiceState | None:
        """Return the state of a service, None of one that is not there."""
        found = self._found.get(name)
        return None if found is None else found.state

    @property
    def buffer(self) -> BufferStatus | None:
        """Status of the buffer, None while it has none."""
        return self._told(BUFFER, BufferStatus)

    @property
    def learner(self) -> LearnerStatus | None:
        """Status of the learner's leader, None while it has none."""
        return self._told(LEARNER, LearnerStatus)

    @property
    def coordinator(self) -> CoordinatorStatus | None:
        """Status of the coordinator of weight sync, None while it has none."""
        return self._told(COORDINATOR, CoordinatorStatus)

    @property
    def publisher(self) -> PublisherStatus | None:
        """Status of the publisher, None while it has none."""
        return self._told(PUBLISHER, PublisherStatus)

    def of_kind(self, kind: str) -> dict[str, ServiceStatus]:
        """Return the services of a kind by name."""
        return {name: status for name, status in self._found.items() if kind_of(name) == kind}

    @property
    def replicas(self) -> dict[str, ServiceStatus]:
        """The replicas by name."""
        return self.of_kind("rollout")

    @property
    def told_replicas(self) -> dict[str, ReplicaStatus]:
        """Statuses of the replicas that have reported one."""
        return {name: one for name, one in self._found.items() if isinstance(one, ReplicaStatus)}

    @property
    def engines(self) -> dict[str, EngineStatus]:
        """Statuses of the engines of the replicas that report one."""
        return {name: one.engine for name, one in self.told_replicas.items() if one.engine is not None}

    def cache_gauges(self) -> dict[str, float]:
        """Return the use of the fullest KV cache and the tightest limit; nothing without caches that tell."""
        told = [one for one in self.told_replicas.values() if one.engine and one.engine.cache]
        shares = [one.limit.places / one.limit.bound for one in told if one.limit is not None]
        used = [one.engine.cache.usage for one in told if one.engine and one.engine.cache]
        found = {"perf/rollout_kv_usage": max(used)} if used else {}
        return found | ({"perf/rollout_limit": min(shares)} if shares else {})

    def _told(self, name: str, kind: type[S]) -> S | None:
        found = self._found.get(name)
        return found if isinstance(found, kind) else None


# --- the edge ---------------------------------------------------------------------------------------

KINDS: Mapping[str, type[ServiceStatus]] = {
    "buffer": BufferStatus,
    "rollout": ReplicaStatus,
    "learner": LearnerStatus,
    "weight_sync": CoordinatorStatus,
    "publisher": PublisherStatus,
    "receiver": ReceiverStatus,
    "supervisor": SupervisorStatus,
}


class _Envelope(Message, frozen=True, array_like=True):
    """`is_told`: the service itself has spoken, so that the status is of its kind."""

    is_told: bool
    status: msgspec.Raw


def pack_status(status: ServiceStatus) -> bytes:
    """Return a status as bytes, see `read_status`."""
    is_told = type(status) is not ServiceStatus
    try:
        return _pack_envelope(is_told, status)
    except UnicodeEncodeError:  # a file name, or what a library has said, may hold half of a character
        return _pack_envelope(is_told, _whole(msgspec.to_builtins(status)))


def _pack_envelope(is_told: bool, status: object) -> bytes:
    return msgspec.msgpack.encode(_Envelope(is_told, msgspec.Raw(msgspec.msgpack.encode(status))))


def _whole(value: object) -> object:
    """Return plain values with a question mark for each half of a character in their texts."""
    if isinstance(value, str):
        return value.encode(errors="replace").decode()
    if isinstance(value, dict):
        return {_whole(name): _whole(one) for name, one in value.items()}
    return [_whole(one) for one in value] if isinstance(value, list | tuple) else value


def read_status(kind: str, data: bytes) -> ServiceStatus:
    """Return the status of a service of `kind`.

    Raises:
        WireError: The bytes are none: of another kind, damaged, or of another version of asyncrl.
    """
    try:
        envelope = msgspec.msgpack.decode(data, type=_Envelope)
        form = KINDS.get(kind, ServiceStatus) if envelope.is_told else ServiceStatus
        return msgspec.msgpack.decode(envelope.status, type=form)
    except (msgspec.MsgspecError, TypeError, RecursionError) as error:
        raise WireError(f"what it sent is no status of a {kind}: {error}") from None
