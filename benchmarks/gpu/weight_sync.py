"""Parts of a weight sync that one GPU can show, each measured by itself.

Run: `python -m benchmarks.gpu.weight_sync --json FILE`. Export from the device tensor by tensor, as a
library would do it; as the learner does it, through two pinned buffers into a mapped segment; and packed on
the device and copied into pinned memory in buckets, which is the bus alone. The export's copies without its
digests (`export_bounced`) are judged. The digest alone and while the
next bucket is copied; one member's share of a broadcast over gloo. A load of the segment's tensors one by
one, and through two pinned buffers, as the engine does it, against pinned memory; and into another process's
tensors over CUDA IPC, against the same load from host memory.
`--quick` checks the logic on a CPU (gloo, shared memory); its figures say nothing. Not run on a GPU.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.multiprocessing as torch_processes
import xxhash

from asyncrl.core.errors import ServiceFailed
from asyncrl.core.files.private import make_secret
from asyncrl.core.runtime.clock import SystemClock
from benchmarks.gpu.frame import find_device, make_part_parser, name_device, run_part, time_turns
from benchmarks.harness.options import Verdict, judge
from benchmarks.harness.rows import Case, Row
from benchmarks.weight_sync.peers.peers import FORKED
from benchmarks.weight_sync.peers.weights import NamedTensors, count_bytes, make_weights
from weight_sync.backends.contract import Group
from weight_sync.backends.gloo import LOOPBACK, GlooTransport
from weight_sync.backends.rendezvous import open_store
from weight_sync.copies.pinned import BUFFER_BYTES, PinnedPipeline
from weight_sync.copies.to_gpu import PinnedCopies
from weight_sync.memory import segments
from weight_sync.memory.manifest import TensorSpec, plan
from weight_sync.memory.parts import Part, PartWriter
from weight_sync.memory.staging import view_tensor
from weight_sync.memory.writer import WriteTimes, bytes_of

TARGET_SHARE = 0.8
"""Of the bus's rate."""
GPU_BYTES, QUICK_BYTES = 4 * 10**9, 2 * 10**6
NUM_TURNS, WAIT_S = 7, 60.0


def main(arguments: Sequence[str]) -> int:
    """Measure as the command line says and return the exit code."""
    parser = make_part_parser("weight_sync", __doc__)
    parser.add_argument("--bytes", type=int, help="of the model; 4 GB on a GPU")
    parser.add_argument("--bucket-bytes", type=int, default=64 << 20)
    given = parser.parse_args(arguments)
    device = torch.device("cpu") if given.quick else find_device()
    num_bytes = given.bytes or (QUICK_BYTES if given.quick else GPU_BYTES)
    return run_part(given, lambda: [measure(device, num_bytes, given.bucket_bytes)], check)


def measure(device: torch.device, num_bytes: int, bucket_bytes: int) -> Row:
    """Return the row of bytes per second of every stretch."""
    weights = [(name, tensor.to(device)) for name, tensor in make_weights(num_bytes)]
    packing, segment = Packing(weights, bucket_bytes), Segment(weights, bucket_bytes)
    stretches: dict[str, Callable[[], None]] = {
        "export_by_tensor": partial(_export, weights),
        "export_as_learner": segment.export,
        "pack_on_device": packing.pack,
        "copy_to_host_pinned": packing.copy,
        "digest": packing.digest,
        "copy_and_digest_at_once": packing.copy_and_digest,
        "load_by_tensor": segment.load,
        "load_as_engine": segment.load_as_engine,
        "copy_to_device_pinned": packing.copy_back,
    }
    seconds = {name: time_turns(stretch, NUM_TURNS) for name, stretch in stretches.items()}
    seconds["export_bounced"] = segment.copy_s[-NUM_TURNS:]
    seconds["broadcast_one_member"] = _broadcast_s(packing.host_buckets)
    seconds |= _load_s(device, weights)
    assert packing.is_exact() and segment.is_exact(), "bytes differ after a copy"
    total = count_bytes(weights)
    case: Case = {"device": name_device(), "num_bytes": total, "bucket_bytes": bucket_bytes}
    rates = {f"{name}_bytes_per_s": [total / one for one in found] for name, found in seconds.items()}
    return Row.of("gpu.weight_sync", case, rates)


def check(rows: Sequence[Row]) -> Verdict:
    """Judge the learner's export against the bus and tensor by tensor, and the load over CUDA IPC."""
    rates = {name.removesuffix("_bytes_per_s"): rate for name, rate in rows[0].values.items()}
    bounced = rates["export_bounced"]
    return judge(
        {
            f"export of a bare pinned copy, target {TARGET_SHARE}": bounced
            / (TARGET_SHARE * rates["copy_to_host_pinned"]),
            "export of tensor by tensor": bounced / rates["export_by_tensor"],
            "CUDA IPC of host memory": rates["load_ipc"] / rates["load_host"],
        }
    )


class Segment:
    """The weights' segment in shared memory, as a publisher has it, and the engine's tensors."""

    def __init__(self, weights: NamedTensors, bucket_bytes: int) -> None:
        specs = [TensorSpec(name, "bfloat16", tuple(tensor.shape)) for name, tensor in weights]
        layout = plan(specs, bucket_bytes)
        path = segments.create(f"asyncrl-bench-{os.getpid()}", layout.total_bytes)
        mapping = segments.attach(path, layout.total_bytes)
        segments.unlink(path)
        self._bytes_B = np.frombuffer(mapping, dtype=np.uint8)
        self._on_host = [view_tensor(mapping, entry) for entry in layout.tensors]
        self._own = [torch.empty_like(tensor) for _, tensor in weights]
        self._sources = [tensor for _, tensor in weights]
        parts = [
            Part(
                name,
                tuple(tensor.shape),
                0,
                0,
                tensor.view(len(tensor), -1) if tensor.dim() > 1 else tensor[None],
            )
            for name, tensor in weights
        ]
        self._writer = PartWriter(layout, parts)
        self.copy_s: list[float] = []
        self._pipeline = PinnedPipeline(BUFFER_BYTES) if self._own[0].is_cuda else None

    def export(self) -> None:
        """Write all parts, with the digests of their buckets; keep the seconds of the copies alone."""
        times = WriteTimes()
        self._writer.write(self._bytes_B, times)
        self.copy_s.append(times.copy_s)

    def load(self) -> None:
        """Copy each tensor to the device from the mapping."""
        for own, tensor in zip(self._own, self._on_host, strict=True):
            own.copy_(tensor)

    def load_as_engine(self) -> None:
        """Copy each tensor as vLLM's workers do on a GPU: through two pinned buffers."""
        with nullcontext() if self._pipeline is None else PinnedCopies(self._pipeline):
            self.load()

    def is_exact(self) -> bool:
        """Tell whether the device got back what it gave."""
        pairs = zip(self._own, self._sources, strict=True)
        return all(torch.equal(*(one.view(torch.uint8) for one in pair)) for pair in pairs)


class Packing:
    """The weights packed into one run of bytes on the device, and its buckets in host memory."""

    def __init__(self, weights: NamedTensors, bucket_bytes: int) -> None:
        self._flat = [tensor.reshape(-1).view(torch.uint8) for _, tensor in weights]
        is_on_gpu = self._flat[0].is_cuda
        self._packed_B = torch.cat(self._flat)
        host_B = torch.empty(self._packed_B.numel(), dtype=torch.uint8, pin_memory=is_on_gpu)
        self.host_buckets = list(host_B.split(bucket_bytes))
        self._device_buckets = list(self._packed_B.split(bucket_bytes))
        self._is_on_gpu = is_on_gpu

    def pack(self) -> None:
        torch.cat(self._flat, out=self._packed_B)

    def copy(self) -> None:
        for host, device in zip(self.host_buckets, self._device_buckets, strict=True):
            host.copy_(device, non_blocking=True)

    def copy_back(self) -> None:
        for host, device in zip(self.host_buckets, self._device_buckets, strict=True):
            device.copy_(host, non_blocking=True)

    def digest(self) -> None:
        for bucket in self.host_buckets:
            digest(bucket)

    def copy_and_digest(self) -> None:
        """Digest each bucket in a second thread while the next one is copied."""
        with ThreadPoolExecutor(1) as pool:
            for host, device in zip(self.host_buckets, self._device_buckets, strict=True):
                host.copy_(device, non_blocking=True)
                if self._is_on_gpu:
                    torch.cuda.current_stream().synchronize()
                pool.submit(digest, host)

    def is_exact(self) -> bool:
        """Tell whether the host has what the device has."""
        self.copy()
        if self._is_on_gpu:
            torch.cuda.synchronize()
        expected = torch.cat([tensor.cpu() for tensor in self._flat])
        return torch.equal(torch.cat(self.host_buckets), expected)


def digest(bucket_B: torch.Tensor) -> str:
    """Return the xxh3-128 digest of a bucket in host memory, in hex."""
    return str(xxhash.xxh3_128(bucket_B.numpy().data).hexdigest())


def _export(weights: NamedTensors) -> None:
    """Bring each tensor to the host by itself."""
    for _, tensor in weights:
        bytes_of(tensor)


def _broadcast_s(buckets: list[torch.Tensor]) -> list[float]:
    """Return the seconds of broadcasting host buckets to nobody: what one member adds to a collective."""
    clock, timeout = SystemClock(), timedelta(seconds=WAIT_S)
    store = open_store(LOOPBACK, 0, timeout)
    transport = GlooTransport(clock, make_secret(), store)
    transport.form(Group(1, 0, 1, LOOPBACK, store.port), clock.now() + WAIT_S)

    def broadcast() -> None:
        for bucket in buckets:
            transport.broadcast(bucket, clock.now() + WAIT_S)

    try:
        return time_turns(broadcast, NUM_TURNS)
    finally:
        transport.close()


def _load_s(device: torch.device, weights: NamedTensors) -> dict[str, list[float]]:
    """Return the seconds in which another process copies `weights` into tensors of its own."""
    context: Any = torch_processes.get_context(FORKED)
    ours, theirs = context.Pipe()
    on_host = [(name, tensor.cpu()) for name, tensor in weights]
    child = context.Process(target=load_in_child, args=(theirs, device, weights, on_host), daemon=True)
    child.start()
    try:
        if not ours.poll(WAIT_S):
            raise ServiceFailed("the loading process said nothing")
        seconds: dict[str, list[float]] = ours.recv()
        return seconds
    finally:
        child.kill()
        child.join()


def load_in_child(pipe: Any, device: torch.device, by_handle: NamedTensors, on_host: NamedTensors) -> None:
    """Entry of the loading process: `by_handle` is memory of the parent, on the GPU by CUDA IPC."""
    torch.set_num_threads(1)
    own = {name: torch.empty_like(tensor, device=device) for name, tensor in by_handle}

    def load(weights: NamedTensors) -> None:
        for name, tensor in weights:
            own[name].copy_(tensor)

    given = {"load_ipc": by_handle, "load_host": on_host}
    pipe.send({name: time_turns(partial(load, weights), NUM_TURNS) for name, weights in given.items()})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
