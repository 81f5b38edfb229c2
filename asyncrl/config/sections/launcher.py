"""How services reach each other: weights on their way, addresses and keys."""

from __future__ import annotations

from ipaddress import IPv4Address
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from asyncrl.config.sections.section import Count, NonNegative, Seconds, Section


class WeightSyncSection(Section):
    """How new weights reach the replicas.

    Every `probe_every` steps a version brings the learner's log-probs of a fixed sequence, and a replica
    that has loaded it serves it only if its engine computes the same; 0 turns that off. With `encoding:
    delta` receivers that hold the version before get what has changed, where that is shorter; publisher and
    receivers keep one version more in shared memory for it.
    """

    backend: Literal["auto", "gloo", "nccl"] = "auto"
    parallelism: Count = 1
    deadline_s: Seconds = 60.0
    bucket_bytes: Annotated[int, Field(ge=1 << 10)] = 16 << 20
    probe_every: NonNegative = 10
    encoding: Literal["full", "delta"] = "full"


def check_host(host: str | None) -> str | None:
    """Raise ValueError unless `host` is an IPv4 address that others can connect to."""
    if host is None:
        return None
    address = IPv4Address(host)
    if address.is_unspecified or address.is_multicast:
        raise ValueError("the address of one interface, which other services can connect to")
    return host


class LauncherSection(Section):
    """`ray: local` starts Ray on this machine. `api_port: 0` takes a free port for the control API.

    `host` is the IPv4 address of the interface that services listen on; null keeps their sockets in a
    folder that only this user can open. With `curve` their connections are encrypted, and only holders
    of a key that was made for this start get in; `auto`: when the host is not loopback.
    """

    ray: Literal["local"] = "local"
    host: Annotated[str | None, AfterValidator(check_host)] = None
    curve: Literal["auto", "on", "off"] = "auto"
    api_port: Annotated[int, Field(ge=0, le=65535)] = 0
    start_deadline_s: Seconds = 300.0

    @property
    def is_local(self) -> bool:
        """Whether nobody on another machine can reach the services' sockets."""
        return self.host is None or IPv4Address(self.host).is_loopback

    @property
    def has_curve(self) -> bool:
        """Whether the services' sockets have keys."""
        return self.curve == "on" or (self.curve == "auto" and not self.is_local)
