"""Configuration sections of connections between services: weight sync, addresses and keys."""

from __future__ import annotations

import contextlib
import re
from ipaddress import IPv4Address
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from asyncrl.core.config.sections.section import Count, NonNegative, Seconds, Section, refuse


class WeightSyncSection(Section):
    """Transport of new weights to the replicas.

    Versions bring the learner's log-probs of some tokens. A replica compares the first ten versions that it
    loads, and then one every `probe_every` steps, and serves them only if its engine's log-probs have changed
    alike; 0 is never. With `encoding: delta` receivers that hold the version before get what has changed,
    where that is shorter; publisher, receivers and learner ranks that send keep a version more for it.

    With a `folder` that both sides reach, replicas on other hosts than the learner's read versions there
    (`auto`), or all do (`folder`); objects are encrypted. For an object store install its fsspec package.

    With `direct` learner ranks send engine workers what they load, after the first version: by NCCL or gloo.
    """

    backend: Literal["auto", "gloo", "direct", "folder", "nccl"] = "auto"
    """Transport of weights; auto is gloo, and `folder` for replicas on other hosts. `nccl` is refused."""
    folder: Annotated[str | None, Field(pattern=r"^[a-z][a-z0-9+.-]*://[^\s?#]+$")] = None
    """URL for fsspec where replicas without a common network read weights. For example: s3://bucket/run"""
    parallelism: Count = 1
    """[replicas] Replicas that load a version at once; the others continue to generate."""
    max_unavailable: Annotated[float, Field(gt=0, le=1)] | None = None
    """[1] Share of the replicas that may load at once; the smaller of it and `parallelism` counts."""
    deadline_s: Seconds = 60.0
    """[s] Deadline of a sync round; late replicas are left out and catch up."""
    bucket_bytes: Annotated[int, Field(ge=1 << 10, le=1 << 30)] = 16 << 20
    """[bytes] Size of a bucket of weights."""
    probe_every: NonNegative = 10
    """[steps] Steps between versions whose log-probs are checked by replicas; 0 for never."""
    encoding: Literal["full", "delta"] = "full"
    """Whether all weights are sent, or only differences."""

    @property
    def all_by_folder(self) -> bool:
        """Whether replicas beside the publisher read the folder too."""
        return self.backend == "folder"

    @property
    def is_direct(self) -> bool:
        """Whether learner ranks send to engine workers; what that does not reach goes over gloo."""
        return self.backend == "direct"

    @property
    def uses_delta(self) -> bool:
        """Whether differences are sent; publisher and receivers keep a version more for them."""
        return self.encoding == "delta"


def check_host(host: str | None) -> str | None:
    """Raise ValueError unless `host` is an IPv4 address that others can connect to."""
    if host is None:
        return None
    with contextlib.suppress(ValueError):
        address = IPv4Address(host)
        if not address.is_unspecified and not address.is_multicast:
            return host
    raise ValueError("the IPv4 address of one interface, which other services can connect to")


LOCAL = "local"
CLUSTER = re.compile(r"auto|[A-Za-z0-9][A-Za-z0-9.-]*:[0-9]{1,5}")


def check_ray(ray: str) -> str:
    """Raise ValueError unless `ray` is `local` or names a cluster that a driver can join."""
    if ray == LOCAL or CLUSTER.fullmatch(ray):
        return ray
    hint = "Write the address that 'ray start --head' prints, or auto on one of the cluster's nodes"
    raise refuse("local, auto, or the HOST:PORT of a Ray cluster", hint)


class LauncherSection(Section):
    """`ray: local` starts Ray on this machine; `HOST:PORT` joins the cluster there, of which this machine is
    a node, and `auto` the one that runs on this machine (docs/cluster.md). Replicas then go to all of its
    nodes. `api_port: 0` takes a free port for the control API.

    `host` is the IPv4 address of the interface that services listen on; null keeps their sockets in a
    folder that only this user can open. With `curve` their connections are encrypted, and only holders
    of a key that was made for this start get in; `auto`: when the host is not loopback.

    A service that dies is started again, at most `max_restarts` times in ten minutes without a step (of a
    replica: an answer) in between. Over that a replica is left alone for minutes while another one works,
    and for any other service the run ends with what went wrong. 0 ends it at the first death.
    """

    ray: Annotated[str, AfterValidator(check_ray)] = LOCAL
    """Ray of the run: local, auto, or HOST:PORT of a Ray cluster."""
    host: Annotated[str | None, AfterValidator(check_host)] = None
    """IPv4 address that services listen on; null takes socket files. For example: 10.0.0.5"""
    curve: Literal["auto", "on", "off"] = "auto"
    """Whether connections of services are encrypted, with keys."""
    api_port: Annotated[int, Field(ge=0, le=65535)] = 0
    """[port] Port of the control API on loopback; 0 takes a free port."""
    start_deadline_s: Seconds = 300.0
    """[s] Deadline for all services to be ready."""
    max_restarts: NonNegative = 5
    """[restarts] Restarts of a service within ten minutes without work in between."""

    @property
    def is_cluster(self) -> bool:
        """Whether there may be other nodes than this machine."""
        return self.ray != LOCAL

    @property
    def is_local(self) -> bool:
        """Whether nobody on another machine can reach the services' sockets."""
        return self.host is None or IPv4Address(self.host).is_loopback

    @property
    def has_curve(self) -> bool:
        """Whether the services' sockets have keys."""
        return self.curve == "on" or (self.curve == "auto" and not self.is_local)
