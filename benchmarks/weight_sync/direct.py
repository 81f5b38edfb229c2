"""Direct transfer of a matrix from one rank to the others, beside bare sends of the same packs.

Run: `python -m benchmarks.weight_sync.direct`. A rank for each GPU (`--ranks` takes fewer), over NCCL: the
first has a snapshot, the others a stage on their GPU each, and packs go along them with their digests. `bare`
is a batch of torch's sends and receives between the first two. `--quick` takes two ranks over gloo on a CPU.
Not run on a GPU.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from msgspec.structs import replace
from torch.multiprocessing.spawn import spawn

from asyncrl.core.files.private import make_secret
from asyncrl.core.runtime.threads import ThreadRuntime
from benchmarks.gpu.frame import make_part_parser, name_device, run_part, time_turns
from benchmarks.harness.rows import Row
from learner.numerics.device import BACKENDS
from weight_sync.backends.rendezvous import open_store
from weight_sync.direct.carrier import PACK_BYTES, Carrier
from weight_sync.direct.orders import SeatOrder
from weight_sync.direct.snapshot import Snapshots
from weight_sync.direct.stage import Stages
from weight_sync.memory.manifest import TensorSpec, plan
from weight_sync.memory.parts import Part
from weight_sync.rectangles.rectangle import Rectangle

GPU_BYTES, QUICK_BYTES = 4 << 30, 1 << 20
NUM_TURNS, WAIT_S = 5, 60.0
NUM_COLUMNS = 1 << 10
TIMEOUT, LOOPBACK = timedelta(seconds=WAIT_S), "127.0.0.1"
NOT_RUN = "not run: direct transfers over NCCL need two GPUs"


def main(arguments: Sequence[str]) -> int:
    """Measure as the command line says and return the exit code."""
    parser = make_part_parser("direct", __doc__)
    parser.add_argument("--ranks", type=int, help="at most one for each GPU")
    given = parser.parse_args(arguments)
    num_ranks = 2 if given.quick else (given.ranks or torch.cuda.device_count())
    if num_ranks < 2 and not given.quick:
        print(NOT_RUN, file=sys.stderr)
        return 1
    device, size = ("cpu", QUICK_BYTES) if given.quick else ("cuda", GPU_BYTES)
    return run_part(given, lambda: [measure(device, num_ranks, size)])


def measure(device: str, num_ranks: int, num_bytes: int) -> Row:
    """Return the row of this many ranks."""
    store = open_store(LOOPBACK, 0, TIMEOUT)
    order = make_order(store.port, num_ranks)
    with tempfile.TemporaryDirectory(prefix="asyncrl-bench-") as name:
        words = (order.secret, store.port, device, num_ranks, num_bytes, Path(name))
        spawn(run_rank, words, num_ranks)
        seconds: dict[str, list[float]] = json.loads(Path(name, "seconds").read_text())
    where = name_device() if device == "cuda" else "CPU"
    case: dict[str, str | int | float] = {"ranks": num_ranks, "device": where, "num_bytes": num_bytes}
    rates = {f"{way}_bytes_per_s": [num_bytes / one for one in taken] for way, taken in seconds.items()}
    return Row.of("gpu.direct", case, rates)


def make_order(port: int, num_ranks: int, secret: str = "") -> SeatOrder:
    """Return the order of the first version, for rank 0."""
    return SeatOrder(
        round=1,
        number=1,
        membership=1,
        world=num_ranks,
        num_sources=1,
        store_host=LOOPBACK,
        store_port=port,
        secret=secret or make_secret(),
    )


def run_rank(
    rank: int, secret: str, port: int, device: str, num_ranks: int, num_bytes: int, folder: Path
) -> None:
    """Entry of one rank; the first writes what it measured."""
    place = torch.device(device, rank) if device == "cuda" else torch.device(device)
    if device == "cuda":
        torch.cuda.set_device(place)
    store = f"file://{folder / 'store'}"
    dist.init_process_group(
        BACKENDS[device], init_method=store, rank=rank, world_size=num_ranks, timeout=TIMEOUT
    )
    try:
        dist.barrier()
        order = make_order(port, num_ranks, secret)
        seconds = {"direct": carry_versions(order, rank, place, num_bytes, dist.barrier)}
        seconds["bare"] = send_bare(rank, place, num_bytes)
    finally:
        dist.destroy_process_group()
    if rank == 0:
        (folder / "seconds").write_text(json.dumps(seconds))


def carry_versions(
    order: SeatOrder, rank: int, place: torch.device, num_bytes: int, meet: Callable[[], object]
) -> list[float]:
    """Return the seconds of each transfer but the first, from when all ranks have met; check what arrived."""
    runtime = ThreadRuntime()
    shape = (num_bytes // NUM_COLUMNS // 2, NUM_COLUMNS)
    whole = ("weight", Rectangle.whole(shape))
    source, sink = Snapshots(runtime), Stages([whole], runtime)
    party = source if rank == 0 else sink
    if rank:
        sink.device = place
    carrier = Carrier(runtime, party, order.secret)
    layout = plan([TensorSpec("weight", "bfloat16", shape)], 16 << 20)
    seconds = []
    for number in range(1, NUM_TURNS + 2):
        if rank == 0:
            values = torch.full(shape, number, dtype=torch.bfloat16, device=place)
            assert source.take(number, [Part("weight", shape, 0, 0, values)], {"weight": "bfloat16"})
        sink.keep([number])
        meet()
        began = runtime.now()
        carrier.run(replace(order, rank=rank, round=number, number=number), began + WAIT_S)
        meet()
        seconds.append(runtime.now() - began)
        if rank:
            ((_, found),) = sink.tensors(number, layout)
            assert bool((found == number).all()), "every element has come"
    carrier.abort()
    carrier.close()
    return seconds[1:]


def send_bare(rank: int, place: torch.device, num_bytes: int) -> list[float]:
    """Return the seconds in which the first two ranks send and receive all bytes in packs."""
    if rank > 1:
        return []
    data_B = torch.zeros(num_bytes, dtype=torch.uint8, device=place)
    move = dist.isend if rank == 0 else dist.irecv

    def send() -> None:
        moves = [dist.P2POp(move, pack_B, 1 - rank) for pack_B in data_B.split(PACK_BYTES)]
        for work in dist.batch_isend_irecv(moves):
            work.wait()

    return time_turns(send, NUM_TURNS)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
