"""The composition root of the two services that hold data: publisher and receiver."""

from __future__ import annotations

from datetime import timedelta
from hashlib import sha256
from socket import gethostname
from urllib.parse import urlsplit

from torch.distributed import TCPStore

from asyncrl.core.files.private import make_private
from asyncrl.core.runtime.interface import Runtime
from asyncrl.core.service import ServiceContext
from weight_sync.backends.contract import Group, Transport
from weight_sync.backends.folder import Folder, Shelf
from weight_sync.backends.gloo import LOOPBACK, GlooTransport
from weight_sync.backends.rendezvous import open_store, own_address
from weight_sync.backends.store import Store
from weight_sync.backends.tags import TaggedTransport
from weight_sync.bounds import bounds_of
from weight_sync.direct.desk import Desk
from weight_sync.memory.pool import SegmentPool
from weight_sync.memory.segments import SHM_DIR, mark_node
from weight_sync.memory.staging_area import StagingArea
from weight_sync.protocol.copies.slots import NUM_SLOTS
from weight_sync.protocol.lanes.stripes import Stripe
from weight_sync.protocol.rounds import Timing
from weight_sync.publisher import Endpoint, PublisherService
from weight_sync.receiving.inbound_rounds import OnBucket
from weight_sync.receiving.receiver import ReceiverService, ignore_bucket
from weight_sync.transfer_executor import MakeTransport

COORDINATOR = "weight_sync.0"
STORE_TIMEOUT = timedelta(seconds=30)


def build_publisher(
    context: ServiceContext, num_segments: int = NUM_SLOTS, node: str | None = None
) -> PublisherService:
    """Return the publisher of stripe `context.rank` of `context.world_size`, on the host of a learner's rank.

    Args:
        node: Mark of its node, see `segments.mark_node`; it is looked for without one.
    """
    address = context.addresses[COORDINATOR]
    host, uses_delta = reachable_host(address), context.config.weight_sync.uses_delta
    store = open_store(host, 0, STORE_TIMEOUT)
    runtime, num_segments = context.runtime, num_segments + uses_delta
    stripe = Stripe(context.rank, context.world_size)
    make_private(SHM_DIR / context.shm_prefix)
    folder = open_folder(context, is_publisher=True)
    return PublisherService(
        address,
        _incarnation(runtime),
        SegmentPool(
            f"{context.shm_prefix}{stripe.publisher}-", str(runtime.pid), num_segments, uses_delta, stripe
        ),
        Endpoint(host, store.port),
        transports_of(context, store, folder),
        runtime,
        context.bind,
        context.keys,
        bounds_of(context.config),
        folder.shelf if folder is not None else None,
        _mark_of(context) if node is None else node,
        _make_desk(context) if stripe.index == 0 else None,
    )


def build_receiver(
    context: ServiceContext,
    lost_s: float | None = None,
    on_bucket: OnBucket = ignore_bucket,
    node: str | None = None,
) -> ReceiverService:
    """Return the receiver `receiver.<n>`, which runs on the host of `rollout.<n>`.

    Args:
        node: As of the publisher.
    """
    runtime = context.runtime
    make_private(SHM_DIR / context.shm_prefix)
    address, section = context.addresses[COORDINATOR], context.config.weight_sync
    timing = Timing.of(section.deadline_s)
    if node is None:
        node = "" if section.all_by_folder else _mark_of(context)
    folder = open_folder(context) if section.all_by_folder or not is_here(address) else None
    return ReceiverService(
        address,
        context.name,
        _incarnation(runtime),
        StagingArea(
            f"{context.shm_prefix}{context.name}-",
            runtime.new_id()[:8],
            keeps_base=section.uses_delta,
        ),
        transports_of(context, None, folder),
        runtime,
        lost_s=timing.silence_s + timing.poll_s if lost_s is None else lost_s,
        on_bucket=on_bucket,
        bind=context.bind,
        keys=context.keys,
        bounds=bounds_of(context.config),
        by_folder=folder is not None,
        node=node,
        desk=_make_desk(context),
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


def is_here(address: str) -> bool:
    """Tell whether the peer at `address` is on this host."""
    return reachable_host(address) in (LOOPBACK, urlsplit(address).hostname)


def open_folder(context: ServiceContext, *, is_publisher: bool = False) -> Folder | None:
    """Return the folder through which versions reach this service, None without one.

    Raises:
        ConfigError: Its URL cannot be opened here.
    """
    url, runtime = context.config.weight_sync.folder, context.runtime
    if url is None:
        return None
    store, shelf = Store(runtime, url), None
    if is_publisher:
        run_dir = context.run_dir.absolute()
        stripe = f"//{context.rank}" if context.rank else ""
        mark = sha256(f"{gethostname()}:{run_dir}{stripe}".encode()).hexdigest()[:16]  # of no other run
        shelf = Shelf(runtime, store, context.secret, f"asyncrl-{run_dir.name}-{mark}")
    return Folder(runtime, store, context.secret, shelf)


def transports_of(
    context: ServiceContext, store: TCPStore | None, folder: Folder | None = None
) -> MakeTransport:
    """Return the maker of transports: the folder's, or gloo's, with tags where the run's sockets have keys.

    Services of weight sync have no GPU: weights travel between hosts, and each engine loads them itself.
    """
    clock, secret = context.runtime, context.secret

    def make(group: Group) -> Transport:
        if folder is not None and group.folder:
            return folder.make_transport()
        transport = GlooTransport(clock, secret, store)
        return TaggedTransport(transport, secret) if context.keys is not None else transport

    return make


def _make_desk(context: ServiceContext) -> Desk | None:
    if not context.config.weight_sync.is_direct:
        return None
    return Desk(context.runtime, context.secret, is_tagged=context.keys is not None)


def _mark_of(context: ServiceContext) -> str:
    return mark_node(context.shm_prefix, context.runtime.new_id())


def _incarnation(runtime: Runtime) -> str:
    return f"{runtime.pid}-{runtime.wall_ns()}"
