"""Parts of a weight sync that one GPU can show, each measured by itself.

Run: `python -m benchmarks.gpu.weight_sync --json FILE`. Export from the device tensor by tensor, as a
learner does it, against packed on the device and copied into pinned memory in buckets; the digest alone
and while the next bucket is copied; one member's share of a broadcast over gloo; and a load into another
process's tensors over CUDA IPC, against the same load from host memory.
`--quick` checks the logic on a CPU (gloo, shared memory); its figures say nothing. Not run on a GPU.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.multiprocessing as torch_processes
import xxhash

from asyncrl.core.errors import ServiceFailed
from asyncrl.core.files.private import make_secret
from asyncrl.core.runtime.clock import SystemClock
from benchmarks.harness.options import Verdict, judge, make_parser, report
from benchmarks.weight_sync.peers.peers import FORKED
from benchmarks.weight_sync.peers.weights import NamedTensors, count_bytes, make_weights
from weight_sync.backends.contract import Group
from weight_sync.backends.gloo import LOOPBACK, GlooTransport
from weight_sync.backends.rendezvous import open_store
from weight_sync.memory.writer import bytes_of

GPU_BYTES, QUICK_BYTES = 4 * 10**9, 2 * 10**6
NUM_TURNS, WAIT_S = 7, 60.0


def main(arguments: Sequence[str]) -> int:
    """Measure as the command line says and return the exit code."""
    parser = make_parser("benchmarks.gpu.weight_sync", __doc__, quick="2 MB on the CPU, on any machine")
    parser.add_argument("--bytes", type=int, help="of the model; 4 GB on a GPU")
    parser.add_argument("--bucket-bytes", type=int, default=64 << 20)
    given = parser.parse_args(arguments)
    if not given.quick and not torch.cuda.is_available():
        print("no GPU here; --quick checks this benchmark's logic on a CPU", file=sys.stderr)
        return 1
    device = torch.device("cpu" if given.quick else "cuda")
    num_bytes = given.bytes or (QUICK_BYTES if given.quick else GPU_BYTES)
    return report(given, measure(device, num_bytes, given.bucket_bytes), table, check)


def measure(device: torch.device, num_bytes: int, bucket_bytes: int) -> dict[str, Any]:
    """Return bytes per second of every stretch, by name."""
    weights = [(name, tensor.to(device)) for name, tensor in make_weights(num_bytes)]
    total = count_bytes(weights)
    packing = Packing(weights, bucket_bytes)
    stretches: dict[str, Callable[[], None]] = {
        "export_by_tensor": partial(_export, weights),
        "pack_on_device": packing.pack,
        "copy_to_host_pinned": packing.copy,
        "digest": packing.digest,
        "copy_and_digest_at_once": packing.copy_and_digest,
    }
    rates = {name: total / _median_s(device, stretch) for name, stretch in stretches.items()}
    rates["broadcast_one_member"] = total / _broadcast_s(device, packing.host_buckets)
    rates |= {name: total / seconds for name, seconds in _load_s(device, weights).items()}
    return {
        "benchmark": "gpu/weight_sync",
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "CPU",
        "num_bytes": total,
        "bucket_bytes": bucket_bytes,
        "is_exact": packing.is_exact(),
        "bytes_per_s": rates,
        "overlap": rates["copy_and_digest_at_once"] / rates["copy_to_host_pinned"],
    }


def table(results: dict[str, Any]) -> str:
    """Return the rate of every stretch."""
    lines = [f"{results['device']}: {results['num_bytes'] / 1e6:.0f} MB, exact: {results['is_exact']}", ""]
    lines += ["| stretch | GB/s |", "|---|---|"]
    lines += [f"| {name} | {rate / 1e9:.3g} |" for name, rate in results["bytes_per_s"].items()]
    return "\n".join([*lines, "", f"copy with digests of copy alone: {results['overlap']:.2f}"])


def check(results: dict[str, Any]) -> Verdict:
    """Judge the export in packed buckets against tensor by tensor, and the load over CUDA IPC."""
    rates = results["bytes_per_s"]
    return judge(
        {
            "packed of tensor by tensor": rates["copy_to_host_pinned"] / rates["export_by_tensor"],
            "CUDA IPC of host memory": rates["load_ipc"] / rates["load_host"],
        }
    )


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
    """Bring each tensor to the host by itself, as the learner's publisher_client does."""
    for _, tensor in weights:
        bytes_of(tensor)


def _median_s(device: torch.device, stretch: Callable[[], None]) -> float:
    seconds = []
    for _ in range(NUM_TURNS + 1):
        began = time.perf_counter()
        stretch()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[1:])


def _broadcast_s(device: torch.device, buckets: list[torch.Tensor]) -> float:
    """Return the seconds of broadcasting host buckets to nobody: what one member adds to a collective."""
    clock, timeout = SystemClock(), timedelta(seconds=WAIT_S)
    store = open_store(LOOPBACK, 0, timeout)
    transport = GlooTransport(clock, make_secret(), store)
    transport.form(Group(1, 0, 1, LOOPBACK, store.port), clock.now() + WAIT_S)

    def broadcast() -> None:
        for bucket in buckets:
            transport.broadcast(bucket, clock.now() + WAIT_S)

    try:
        return _median_s(device, broadcast)
    finally:
        transport.close()


def _load_s(device: torch.device, weights: NamedTensors) -> dict[str, float]:
    """Return the seconds in which another process copies `weights` into tensors of its own."""
    context: Any = torch_processes.get_context(FORKED)
    ours, theirs = context.Pipe()
    on_host = [(name, tensor.cpu()) for name, tensor in weights]
    child = context.Process(target=load_in_child, args=(theirs, device, weights, on_host), daemon=True)
    child.start()
    try:
        if not ours.poll(WAIT_S):
            raise ServiceFailed("the loading process said nothing")
        seconds: dict[str, float] = ours.recv()
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
    pipe.send({name: _median_s(device, partial(load, weights)) for name, weights in given.items()})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
