"""Striped publish: a version goes to several publishers, each of which keeps a stripe of it; one rank's side.

A publisher's stripe is written by one rank of its node, from the full tensors that all ranks see one after
another; the digests of all stripes are merged, so each publisher gets the manifest of the whole version.
Every method is collective: all ranks call it in the same order, and all come to the same outcome. Every wait
ends with the deadline of a call or the process group's timeout. Invariant: a version counts as published only
once every publisher has taken it; what some of them have taken before is replaced by the next one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import torch

from asyncrl.core.errors import AsyncrlError, SegmentGone
from asyncrl.core.staleness import PolicyVersion
from learner.ranks import Ranks
from weight_sync.memory.manifest import Layout, Probe, TensorSpec, plan
from weight_sync.memory.parts import merge_digests
from weight_sync.memory.sharded_publish import Collectives, Waits, Written, agree, buckets_of
from weight_sync.memory.writer import WriteTimes
from weight_sync.protocol.lanes.stripes import Stripe
from weight_sync.publisher_client import Exporter, PublisherClient, Timed, in_layout, name_of


class Connect(Protocol):
    """Connects to the publisher of a stripe with the learner's fencing token."""

    def __call__(self, token: int, stripe: Stripe) -> PublisherClient: ...


def own_stripes(addresses: Iterable[str], ranks: Ranks) -> tuple[list[Stripe], int]:
    """Return the stripes that this rank writes, and how many there are; collective.

    Args:
        addresses: Names of the services that this rank may call. `publisher.0` is rank 0's, all know it;
            another one is named only to the rank that writes its stripe.
    """
    named = [name.partition(".") for name in addresses]
    found = sorted(int(index) for kind, _, index in named if kind == "publisher")
    own = [index for index in found if index or ranks.is_leader]
    count = len(ranks.gather(own))
    return [Stripe(index, count) for index in own], count


class StripedPublish:
    """See the module.

    Args:
        stripes: Those that this rank writes; none on most.
    """

    def __init__(
        self, connect: Connect, stripes: Sequence[Stripe], collectives: Collectives, bucket_bytes: int
    ) -> None:
        self._connect, self._stripes = connect, stripes
        self._collectives = collectives
        self._bucket_bytes = bucket_bytes
        self._clients: list[PublisherClient] = []
        self._layout: Layout | None = None

    def has_room(self, token: int, leader_client: PublisherClient | None, model: Exporter) -> bool:
        """Tell whether every publisher has room for the next version; the first time, learn its layout.

        Args:
            leader_client: Rank 0's, of stripe 0; it is used as it is.
        """
        if self._layout is None:
            tensors = model.named_tensors()
            specs = [TensorSpec(name, name_of(one.dtype), tuple(one.shape)) for name, one in tensors]
            self._layout = plan(specs, self._bucket_bytes)
        layout = self._layout

        def find_room() -> bool:
            if leader_client is not None and not self._clients:
                self._clients.append(leader_client)
            for stripe in self._stripes[len(self._clients) :]:
                self._clients.append(self._connect(token, stripe))
            for client in self._clients:
                client.layout = layout
            found = [client.has_room() for client in self._clients]
            return all(found)

        return self._all(find_room)

    def publish(self, version: PolicyVersion, model: Exporter, probe: Probe | None = None) -> bool:
        """Publish `model`, which every publisher has room for.

        Returns:
            False if a publisher has died meanwhile: a newer version is to be published.

        Raises:
            SyncError: The tensors are not those of the versions before; on every rank.
        """
        assert self._layout is not None, "has_room was asked"
        began, times, digests, waits = time.perf_counter(), WriteTimes(), dict[int, bytes](), Waits()
        source = Timed(model.named_tensors())
        if not self._all(lambda: self._write(source, times, digests)):
            return False
        with waits:
            merged = merge_digests([digests], self._layout.num_buckets)
            merged = self._collectives.merge_bytes(merged)
        buckets = tuple(buckets_of(self._layout, merged))
        written = Written(buckets, times, source.seconds + waits.seconds)
        before = [client.published for client in self._clients]

        def commit() -> bool:
            taken = [client.commit_parts(version, written, began, probe) for client in self._clients]
            return all(taken)

        if self._all(commit):
            return True
        for client, published in zip(self._clients, before, strict=True):
            client.published = published
        return False

    def has_lost(self) -> bool:
        """Tell whether a publisher has lost the newest version."""
        return not self._all(lambda: not any(client.has_lost() for client in self._clients))

    def _write(
        self, tensors: Iterable[tuple[str, torch.Tensor]], times: WriteTimes, digests: dict[int, bytes]
    ) -> bool:
        """Write this rank's stripes and fill in the digests; read `tensors` to their end in any case."""
        assert self._layout is not None
        try:
            writers = [client.open_writer() for client in self._clients]
            for tensor in in_layout(self._layout, tensors):
                for writer in writers:
                    writer.write(tensor)
        finally:
            for _ in tensors:  # other ranks take part in the gathers
                pass
        for client, writer in zip(self._clients, writers, strict=True):
            own = client.stripe.buckets(self._layout.num_buckets)
            found = [bytes.fromhex(bucket.digest) for bucket in writer.finish()]
            digests |= dict(zip(own, found, strict=True))
            times.copy_s += writer.times.copy_s
            times.digest_s += writer.times.digest_s
        return True

    def _all(self, step: Callable[[], bool]) -> bool:
        """Tell whether `step` succeeds on every rank; raises on all if it raises on one."""
        error: AsyncrlError | None = None
        try:
            if not step():
                error = SegmentGone("a publisher has no room, or is away")
        except AsyncrlError as caught:
            error = caught
        return agree(self._collectives, error)
