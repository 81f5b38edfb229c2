"""Members of direct transfers: learner ranks with parts of a checkpoint, and sinks of its regions."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from random import Random

import torch
from msgspec.structs import replace

from asyncrl.core.files.private import make_secret
from asyncrl.core.runtime.threads import ThreadRuntime
from tests.weight_sync.rectangles.models import Model
from weight_sync.backends.rendezvous import open_store
from weight_sync.direct.carrier import Carrier
from weight_sync.direct.orders import SeatOrder
from weight_sync.direct.party import Party
from weight_sync.direct.snapshot import Snapshots
from weight_sync.direct.transports.choice import HOST
from weight_sync.memory.parts import Part
from weight_sync.protocol.state import ID_BITS
from weight_sync.rectangles.packs import Pack, view_parcel
from weight_sync.rectangles.parcels import Region
from weight_sync.rectangles.rectangle import Rectangle

RUNTIME = ThreadRuntime()
WAIT_S = 60.0
FIRST_ROUND = (1_795_865_337_013 << ID_BITS) + 1
"""As a coordinator counts that was started today."""
TIMEOUT = timedelta(seconds=WAIT_S)
MODEL = Model("qwen2")
MAX_BYTES = 4096
"""Of a pack: a tiny model makes many."""
Checkpoint = dict[str, torch.Tensor]


def make_checkpoint(number: int, dtype: torch.dtype = torch.float32) -> Checkpoint:
    """Return the weights of a version, other ones for each."""
    generator = torch.Generator().manual_seed(number)
    made = {spec.name: torch.rand(spec.shape, generator=generator).sub_(0.5) for spec in MODEL.specs()}
    return {name: values.to(dtype) for name, values in made.items()}


def parts_at(number: int, rank: int) -> list[Part]:
    """Return what a rank of Megatron's with TP2 and PP2 holds, copies that others hold included."""
    from tests.weight_sync.rectangles.learner_ranks import Layout, parts_of  # Megatron: processes need it not

    return list(parts_of(MODEL, make_checkpoint(number), Layout(tp=2, pp=2), rank))


def take(source: Snapshots, number: int, rank: int, dtype: str = "float32") -> bool:
    return source.take(number, parts_at(number, rank), dict.fromkeys(make_checkpoint(number), dtype))


def make_source(rank: int, dtype: str = "float32") -> Snapshots:
    """Return a learner rank that has taken version 1."""
    source = Snapshots(RUNTIME)
    assert take(source, 1, rank, dtype)
    return source


class ScriptedSink:
    """Party that keeps each version's packs where it can look at them."""

    def __init__(self, regions: Sequence[Region], device: torch.device = HOST) -> None:
        self.regions, self.dtypes, self.device = regions, {}, device
        self.stages: dict[int, _Stage] = {}
        self.kept: Collection[int] = ()
        self.has_opened = threading.Event()
        self.on_close: Callable[[], object] = lambda: None

    def open(
        self, number: int, packs: Sequence[Pack], until: float, base: int = 0, device: torch.device = HOST
    ) -> _Stage:
        self.stages[number] = _Stage(packs, self.on_close, device)
        self.has_opened.set()
        return self.stages[number]

    def keep(self, numbers: Collection[int]) -> None:
        self.kept = numbers

    def has_all(self, number: int, full: Checkpoint) -> bool:
        """Tell whether all that it wants of a version is here, and equal to `full` to the bit."""
        found = {name: torch.full_like(values, torch.nan) for name, values in full.items()}
        for pack, data_B in zip(self.stages[number].packs, self.stages[number].data, strict=True):
            for parcel, offset in zip(pack.parcels, pack.offsets, strict=True):
                into = found[parcel.tensor][parcel.rectangle.slices]
                into.copy_(view_parcel(parcel, offset, data_B, into.dtype))
        return all(torch.equal(found[name][r.slices], full[name][r.slices]) for name, r in self.regions)


class _Stage:
    def __init__(self, packs: Sequence[Pack], on_close: Callable[[], object], device: torch.device) -> None:
        self.packs, self._on_close = packs, on_close
        self.data = [torch.zeros(pack.num_bytes, dtype=torch.uint8, device=device) for pack in packs]
        self.is_whole: bool | None = None
        self.has_closed = threading.Event()

    def pack(self, index: int) -> torch.Tensor:
        return self.data[index]

    def close(self, is_whole: bool) -> None:
        self.is_whole = is_whole
        self._on_close()
        self.has_closed.set()


def random_regions(seed: int) -> list[Region]:
    """Return rectangles of some tensors, which may overlap, and all of others."""
    random, regions = Random(seed), []
    for name, full in make_checkpoint(1).items():
        for _ in range(random.choice((0, 1, 1, 2))):
            edges = [sorted(random.sample(range(size + 1), 2)) for size in full.shape]
            is_whole = random.random() < 0.5
            some = Rectangle(tuple(first for first, _ in edges), tuple(last for _, last in edges))
            regions.append((name, Rectangle.whole(full.shape) if is_whole else some))
    return regions


def make_order(port: int, num_sources: int, world: int, deadline_s: float = WAIT_S) -> SeatOrder:
    """Return the first order of a membership, for rank 0."""
    return SeatOrder(
        round=FIRST_ROUND,
        number=1,
        membership=1,
        world=world,
        num_sources=num_sources,
        store_host="127.0.0.1",
        store_port=port,
        secret=make_secret(),
        deadline_s=deadline_s,
    )


class Members:
    """One membership, each member in a thread named after its rank."""

    def __init__(
        self,
        parties: Sequence[Party],
        num_sources: int,
        *,
        is_tagged: bool = False,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        self.store = open_store("127.0.0.1", 0, TIMEOUT)
        self._world = len(parties)
        order = make_order(self.store.port, num_sources, self._world)
        self.order = replace(order, is_tagged=is_tagged)
        self.carriers = [Carrier(RUNTIME, party, self.order.secret, max_bytes) for party in parties]
        self._pool = ThreadPoolExecutor(self._world)

    def run(self, number: int, deadline_s: float = WAIT_S, base: int = 0) -> list[BaseException | None]:
        """Carry out a transfer; return how it ended for each member."""
        return [future.exception(2 * WAIT_S) for future in self.start(number, deadline_s, base)]

    def start(self, number: int, deadline_s: float = WAIT_S, base: int = 0) -> list[Future[int]]:
        until = RUNTIME.now() + deadline_s
        order = replace(self.order, round=self.order.round + number, number=number, base=base)
        return [self._pool.submit(self._work, order, rank, until) for rank in range(self._world)]

    def _work(self, order: SeatOrder, rank: int, until: float) -> int:
        threading.current_thread().name = f"member-{rank}"
        return self.carriers[rank].run(replace(order, rank=rank), until)

    def close(self) -> None:
        for carrier in self.carriers:
            carrier.abort()
            carrier.close()
        self._pool.shutdown()
