"""A man in the middle of gloo, who can make bytes of any digest: none of his reach a receiver."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch.distributed import TCPStore

from asyncrl.core.config.tree import Config
from asyncrl.core.errors import SyncError
from asyncrl.core.files.private import make_secret
from asyncrl.core.runtime.threads import ThreadRuntime
from asyncrl.core.service import ServiceContext
from asyncrl.core.sockets.keys import make_run_keys
from tests.weight_sync.cluster import WAIT_S
from weight_sync.backends.contract import Broadcast, Group, Transport
from weight_sync.backends.gloo import GlooTransport
from weight_sync.backends.rendezvous import open_store
from weight_sync.backends.tags import TAG_BYTES, TaggedTransport, Tags
from weight_sync.composition import transports_of
from weight_sync.protocol.rounds import TRANSPORT
from weight_sync.transfer_executor import TransferExecutor, TransferOrder

CLOCK = ThreadRuntime()
SECRET = make_secret()
NUM_BYTES, NUM_BUCKETS = 1000, 4
CHANGED = "brought what the publisher has not sent"
Change = Callable[[list[torch.Tensor]], torch.Tensor]
"""Returns what goes on instead of the last of the parts that were sent: tags and buckets in turn."""


def until() -> float:
    return CLOCK.now() + WAIT_S


class MeddlingTransport:
    """Stands for the network between the publisher and the others, with somebody in it who changes bytes."""

    def __init__(self, transport: Transport, change: Change) -> None:
        self._transport = transport
        self._change = change
        self._sent: list[torch.Tensor] = []

    def form(self, group: Group, until: float) -> None:
        self._transport.form(group, until)

    def start(self, bucket: torch.Tensor, until: float, name: str = "") -> Broadcast:
        self._sent.append(bucket.clone())
        return self._transport.start(self._change(self._sent), until)

    def broadcast(self, bucket: torch.Tensor, until: float, name: str = "") -> None:
        self.start(bucket, until).wait()

    def abort(self) -> None:
        self._transport.abort()

    def close(self) -> None:
        self._transport.close()


def nothing(sent: list[torch.Tensor]) -> torch.Tensor:
    return sent[-1]


def flip(index: int, size: int) -> Change:
    """Change one bit of byte `index` of the third part of `size` bytes."""

    def change(sent: list[torch.Tensor]) -> torch.Tensor:
        if len(sent[-1]) == size and [len(part) for part in sent].count(size) == 3:
            sent[-1][index] ^= 1
        return sent[-1]

    return change


def repeat(sent: list[torch.Tensor]) -> torch.Tensor:
    """Send the second bucket with its tag in the third one's place."""
    return sent[-3] if len(sent) in (5, 6) else sent[-1]


def zeros(sent: list[torch.Tensor]) -> torch.Tensor:
    """Send zeros for all."""
    return torch.zeros_like(sent[-1])


class Ends:
    """One transfer of four buckets to one receiver, over real gloo."""

    def __init__(self, store: TCPStore, change: Change, sender_secret: str) -> None:
        self.sent = [torch.full((NUM_BYTES,), 1 + i, dtype=torch.uint8) for i in range(NUM_BUCKETS)]
        self.received = [torch.zeros_like(bucket) for bucket in self.sent]
        self.told: list[int] = []
        self._ends: queue.Queue[tuple[str, str]] = queue.Queue()
        publisher = TaggedTransport(
            MeddlingTransport(GlooTransport(CLOCK, SECRET, store), change), sender_secret
        )
        receiver = TaggedTransport(GlooTransport(CLOCK, SECRET, store), SECRET)
        self._carriers = [
            TransferExecutor(CLOCK, lambda _: publisher),
            TransferExecutor(CLOCK, lambda _: receiver),
        ]
        group = Group(1, 0, 2, "127.0.0.1", store.port)
        order = TransferOrder(1, 1, group, frozenset({1}), WAIT_S)
        self._carriers[0].carry(order, self.sent, lambda *_: None, lambda *_: None)
        order = replace(order, group=replace(group, rank=1))
        self._carriers[1].carry(order, self.received, self._take, self._end)

    def _take(self, index: int, bucket: torch.Tensor) -> None:
        """Note a bucket, whose digest is right: he has seen to that."""
        self.told.append(index)

    def _end(self, order: TransferOrder, cause: str, message: str) -> None:
        self._ends.put((cause, message))

    def receiver_end(self) -> tuple[str, str]:
        return self._ends.get(timeout=WAIT_S)

    def close(self) -> None:
        for transfers in self._carriers:
            transfers.close()


@pytest.fixture
def carry() -> Iterator[Callable[..., Ends]]:
    started: list[Ends] = []
    store = open_store("127.0.0.1", 0, timedelta(seconds=WAIT_S))

    def start(change: Change, sender_secret: str = SECRET) -> Ends:
        started.append(Ends(store, change, sender_secret))
        return started[-1]

    yield start
    for ends in started:
        ends.close()


def test_what_nobody_has_changed_arrives(carry: Callable[..., Ends]) -> None:
    ends = carry(nothing)
    assert ends.receiver_end() == ("", "") and ends.told == [0, 1, 2, 3]
    assert all(torch.equal(*pair) for pair in zip(ends.sent, ends.received, strict=True))


@pytest.mark.parametrize(
    "change",
    [flip(NUM_BYTES - 1, NUM_BYTES), *(flip(index, TAG_BYTES) for index in (0, 12, TAG_BYTES - 1)), repeat],
    ids=["bucket", "nonce", "place", "mac", "repeated"],
)
def test_a_bucket_that_was_changed_on_its_way_is_refused_whatever_its_digest(
    carry: Callable[..., Ends], change: Change
) -> None:
    ends = carry(change)
    cause, message = ends.receiver_end()
    assert cause == TRANSPORT and f"broadcast 2 {CHANGED}" in message
    assert ends.told == [0, 1], "it was taken"


@pytest.mark.parametrize(
    ("change", "secret"), [(nothing, make_secret()), (zeros, SECRET)], ids=["own", "none"]
)
def test_who_lacks_the_secret_makes_no_tag(carry: Callable[..., Ends], change: Change, secret: str) -> None:
    ends = carry(change, secret)
    cause, message = ends.receiver_end()
    assert cause == TRANSPORT and f"broadcast 0 {CHANGED}" in message and not ends.told


def test_the_tags_of_one_membership_are_none_of_another() -> None:
    bucket = torch.ones(NUM_BYTES, dtype=torch.uint8)
    tag = Tags(SECRET, 1).make(0, bucket)
    Tags(SECRET, 1).check(0, bucket, tag)
    with pytest.raises(SyncError, match=CHANGED):
        Tags(SECRET, 2).check(0, bucket, tag)


def config_of(bucket_bytes: int = 1 << 20) -> Config:
    return Config.model_validate(
        {
            "model": {"path": "builtin:digit_sort"},
            "data": {"train": "builtin:digit_sort"},
            "reward": {"fn": "digit_sort"},
            "weight_sync": {"bucket_bytes": bucket_bytes},
        }
    )


@pytest.mark.parametrize("has_keys", [True, False])
def test_the_transports_of_a_run_with_keys_are_tagged(has_keys: bool, tmp_path: Path) -> None:
    keys = make_run_keys() if has_keys else None
    context = ServiceContext(config_of(), "receiver.0", tmp_path, "x", keys=keys)
    made = transports_of(context, None)(Group(1, 1, 2, "127.0.0.1", 1))
    assert isinstance(made, TaggedTransport if has_keys else GlooTransport)


def test_a_bucket_too_large_for_a_tag_is_a_config_error() -> None:
    """AES-GCM takes 2^31 - 1 bytes here."""
    assert config_of(1 << 30).weight_sync.bucket_bytes == 1 << 30
    with pytest.raises(ValueError, match="bucket_bytes"):
        config_of(1 << 31)
