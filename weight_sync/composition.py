"""The composition root of the two services that hold data: publisher and receiver."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from urllib.parse import urlsplit

from torch.distributed import TCPStore

from asyncrl.core.files.private import make_private
from asyncrl.core.runtime.interface import Runtime
from asyncrl.core.service import ServiceContext
from weight_sync.backends.contract import Transport
from weight_sync.backends.gloo import LOOPBACK, GlooTransport
from weight_sync.backends.rendezvous import open_store, own_address
from weight_sync.backends.tags import TaggedTransport
from weight_sync.bounds import bounds_of
from weight_sync.memory.pool import SegmentPool
from weight_sync.memory.segments import SHM_DIR
from weight_sync.memory.staging_area import StagingArea
from weight_sync.protocol.rounds import Timing
from weight_sync.protocol.slots import NUM_SLOTS
from weight_sync.publisher import Endpoint, PublisherService
from weight_sync.receiving.inbound_rounds import OnBucket
from weight_sync.receiving.receiver import ReceiverService, ignore_bucket

COORDINATOR = "weight_sync.0"
STORE_TIMEOUT = timedelta(seconds=30)


def build_publisher(context: ServiceContext, num_segments: int = NUM_SLOTS) -> PublisherService:
    """Return the publisher; it runs on the host of the learner's rank 0."""
    address = context.addresses[COORDINATOR]
    host, uses_delta = reachable_host(address), context.config.weight_sync.uses_delta
    store = open_store(host, 0, STORE_TIMEOUT)
    runtime, num_segments = context.runtime, num_segments + uses_delta
    make_private(SHM_DIR / context.shm_prefix)
    return PublisherService(
        address,
        _incarnation(runtime),
        SegmentPool(f"{context.shm_prefix}publisher-", str(runtime.pid), num_segments, uses_delta),
        Endpoint(host, store.port),
        transports_of(context, store),
        runtime,
        context.bind,
        context.keys,
        bounds_of(context.config),
    )


def build_receiver(
    context: ServiceContext, lost_s: float | None = None, on_bucket: OnBucket = ignore_bucket
) -> ReceiverService:
    """Return the receiver `receiver.<n>`, which runs on the host of `rollout.<n>`."""
    runtime = context.runtime
    timing = Timing.of(context.config.weight_sync.deadline_s)
    make_private(SHM_DIR / context.shm_prefix)
    return ReceiverService(
        context.addresses[COORDINATOR],
        context.name,
        _incarnation(runtime),
        StagingArea(
            f"{context.shm_prefix}{context.name}-",
            runtime.new_id()[:8],
            keeps_base=context.config.weight_sync.uses_delta,
        ),
        transports_of(context, None),
        runtime,
        lost_s=timing.silence_s + timing.poll_s if lost_s is None else lost_s,
        on_bucket=on_bucket,
        bind=context.bind,
        keys=context.keys,
        bounds=bounds_of(context.config),
    )


def reachable_host(address: str) -> str:
    """Return the address of this host as the peer at `address` sees it; loopback if that is ipc."""
    peer = urlsplit(address)
    if peer.scheme == "ipc":
        return LOOPBACK
    assert peer.hostname is not None, f"'{address}' is no address"
    if peer.hostname in (LOOPBACK, "localhost"):
        return LOOPBACK
    return own_address(peer.hostname)


def transports_of(context: ServiceContext, store: TCPStore | None) -> Callable[[], Transport]:
    """Return the maker of transports, with tags where the run's sockets have keys.

    Services of weight sync have no GPU: weights travel between hosts, and each engine loads them itself.
    """
    clock, secret = context.runtime, context.secret

    def make() -> Transport:
        transport = GlooTransport(clock, secret, store)
        return TaggedTransport(transport, secret) if context.keys is not None else transport

    return make


def _incarnation(runtime: Runtime) -> str:
    return f"{runtime.pid}-{runtime.wall_ns()}"
