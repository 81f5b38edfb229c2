"""Stall of a learner that publishes, against a plain copy of the same bytes in the same run.

    python -m benchmarks.weight_sync.publish [--quick] [--json FILE] [--check]

`tensors`: a learner whose tensors are ready. `tp 1`, `tp 2`, ...: learners of so many ranks, each of which
writes its own parts of the tensors into the segment. `tp 2, gathered`: as with ranks on several hosts:
shares are gathered over gloo, and rank 0 writes. The plain copy, by rank 0 alone, goes into shared memory
of the same kind, whose pages are touched, as the publish does; both take turns.
"""

from __future__ import annotations

import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from asyncrl.control.machine.ports import HeldPort
from asyncrl.core.config.tree import LearnerSection
from asyncrl.core.errors import ServiceFailed
from asyncrl.core.runtime.threads import ThreadRuntime
from asyncrl.core.service import ServiceContext
from asyncrl.core.staleness import PolicyVersion
from benchmarks.harness.options import Verdict, judge, make_parser, report
from benchmarks.weight_sync.peers.peers import Peer, obey
from benchmarks.weight_sync.peers.services import COORDINATOR_NAME, PUBLISHER_NAME, make_context, run_service
from benchmarks.weight_sync.peers.weights import count_bytes, make_weights
from learner.backend import LearnerBackend, Placement
from learner.ranks import Ranks
from weight_sync.memory import segments
from weight_sync.memory.sharded_publish import TogetherWriter
from weight_sync.publisher_client import PublisherClient, PublishTimes, publish_sharded

MAX_RATIO = 1.5
BUCKET_BYTES = 64 << 20
WARM_UP_ROUNDS = 4
"""Until each of the three segments has been mapped."""
PAUSE_S = 0.1
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp 1": {},
    "tp 2": {"tp": 2},
    "pp 2": {"pp": 2},
    "dp 2": {"dp": 2},
    "tp 2, pp 2": {"tp": 2, "pp": 2},
    "fsdp2, dp 2": {"backend": "fsdp2"},
    "tp 2, gathered": {"tp": 2},
}
WORLD_SIZES = {"tp 1": 1, "tp 2, pp 2": 4}
"""The other layouts have two ranks."""
GATHERED = ", gathered"
SHOWN = ("fsdp2, dp 2", "tp 2, gathered")
"""Not judged: the one reads float32, twice the bytes that a plain copy reads; the other uses a network."""
TIMEOUT_S = 120.0

Tensors = Callable[[], Iterator[tuple[str, torch.Tensor]]]
Publish = Callable[[PolicyVersion], bool]


@dataclass(frozen=True)
class Stall:
    """Seconds of one round: a plain copy of the bytes, a publish of them, its parts, and an empty call."""

    copy_s: float
    publish_s: float
    call_s: float
    times: PublishTimes


class PlainCopy:
    """Copies tensors into a segment, the plainest way."""

    def __init__(self, context: ServiceContext, tensors: Tensors) -> None:
        self._copied = [tensor.clone() for _, tensor in tensors()]
        num_bytes = sum(tensor.numel() * tensor.itemsize for tensor in self._copied)
        path = segments.create(f"{context.shm_prefix}plain", num_bytes)
        self._bytes_B = torch.frombuffer(segments.attach(path, num_bytes), dtype=torch.uint8)

    def run(self) -> None:
        """Copy all."""
        end = 0
        for tensor in self._copied:
            start, end = end, end + tensor.numel() * tensor.itemsize
            self._bytes_B[start:end].view(tensor.dtype).copy_(tensor.view(-1))


class RankPublish:
    """One rank of a learner that publishes `backend` again and again; `publisher_client` is rank 0's."""

    def __init__(
        self,
        backend: LearnerBackend,
        ranks: Ranks,
        publisher_client: PublisherClient | None,
        is_gathered: bool,
    ) -> None:
        self._backend, self._ranks, self._publisher_client = backend, ranks, publisher_client
        self._together = TogetherWriter(ranks)
        self._is_gathered = is_gathered

    def __call__(self, version: PolicyVersion) -> bool:
        found = self._path() if self._publisher_client is not None else None
        path = self._ranks.share_bytes(found).decode()  # the learner's order brings it
        return publish_sharded(self._publisher_client, self._together, path, version, self._backend)

    def _path(self) -> bytes:
        assert self._publisher_client is not None, "rank 0 asks for segments"
        if not self._publisher_client.has_room() or self._is_gathered:
            return b""
        return self._publisher_client.shared_path.encode()


class Publisher:
    """A coordinator and a publisher in processes of their own."""

    def __init__(self) -> None:
        self._peers: list[Peer] = []
        self.context = make_context(BUCKET_BYTES)
        for name in (COORDINATOR_NAME, PUBLISHER_NAME):
            peer = Peer(name, run_service, replace(self.context, name=name))
            self._peers.append(peer)
            addresses = {**self.context.addresses, name: peer.hear()}
            self.context = replace(self.context, addresses=addresses)

    def close(self) -> None:
        """End both and remove what they leave."""
        for peer in reversed(self._peers):
            peer.close()
        shutil.rmtree(segments.SHM_DIR / self.context.shm_prefix, ignore_errors=True)


def open_handoff(context: ServiceContext) -> PublisherClient:
    """Return rank 0's way to the publisher."""
    address, keys = context.addresses[PUBLISHER_NAME], context.client_keys
    return PublisherClient(ThreadRuntime(), address, context.shm_prefix, BUCKET_BYTES, token=1, keys=keys)


def measure_publish(num_bytes: int, rounds: int) -> dict[str, Any]:
    """Return the row of a learner in this process whose tensors are ready."""
    weights = make_weights(num_bytes)
    with closing(Publisher()) as publisher, closing(open_handoff(publisher.context)) as publisher_client:
        plain = PlainCopy(publisher.context, lambda: iter(weights))

        def publish(version: PolicyVersion) -> bool:
            return publisher_client.publish(version, iter(weights))

        stalls = measure_rounds(plain, publish, publisher_client, rounds)
    return summarise("tensors", count_bytes(weights), stalls)


def measure_rounds(
    plain: PlainCopy, publish: Publish, publisher_client: PublisherClient, rounds: int
) -> list[Stall]:
    """Return `rounds` rounds after those that warm up."""
    stalls = []
    for number in range(1, WARM_UP_ROUNDS + rounds + 1):
        began = time.perf_counter()
        plain.run()
        copied = time.perf_counter()
        if not publish(PolicyVersion(number, number)):
            raise ServiceFailed("no segment was free, though nobody receives")
        published = time.perf_counter()
        time.sleep(PAUSE_S)
        asked = time.perf_counter()
        publisher_client.has_lost()
        call_s, times = time.perf_counter() - asked, publisher_client.take_times()
        stalls.append(Stall(copied - began, published - copied, call_s, times))
    return stalls[WARM_UP_ROUNDS:]


def measure_ranks(name: str, model: Path, num_bytes: int, rounds: int) -> dict[str, Any]:
    """Return the row of the learner `name` of `LAYOUTS`."""
    world = WORLD_SIZES.get(name, 2)
    with closing(Publisher()) as publisher, closing(HeldPort()) as port:
        context = publisher.context
        ranks = [
            Peer(
                f"rank {rank}",
                run_rank,
                Placement(rank, world, port.address, TIMEOUT_S),
                name,
                model,
                context,
                rounds,
            )
            for rank in range(world)
        ]
        try:
            stalls = ranks[0].hear(TIMEOUT_S)
        finally:
            for rank in ranks:
                rank.close()
    return summarise(name, num_bytes, stalls)


def run_rank(
    pipe: Connection, placement: Placement, name: str, model: Path, context: ServiceContext, rounds: int
) -> None:
    """Entry of a learner rank: all publish; rank 0 copies plainly in between and sends its rounds."""
    backend = open_backend(model, placement, LAYOUTS[name])
    ranks = Ranks(placement.rank, placement.world_size, torch.device("cpu"))
    is_gathered = name.endswith(GATHERED)
    if ranks.is_leader:
        with closing(open_handoff(context)) as publisher_client:
            plain = PlainCopy(context, backend.named_tensors)
            publish = RankPublish(backend, ranks, publisher_client, is_gathered)
            pipe.send(measure_rounds(plain, publish, publisher_client, rounds))
    else:
        for _ in backend.named_tensors():  # for the plain copy
            pass
        publish = RankPublish(backend, ranks, None, is_gathered)
        for number in range(1, WARM_UP_ROUNDS + rounds + 1):
            publish(PolicyVersion(number, number))
    obey(pipe, {})


def open_backend(model: Path, placement: Placement, changes: Mapping[str, Any]) -> LearnerBackend:
    """Return a rank of a learner that is never trained."""
    section = LearnerSection.model_validate({"lr": 1e-6, **changes})
    options: dict[str, Any] = {"dtype": "bfloat16", "seed": 0, "temperature": 1.0, "is_frozen": True}
    if section.backend == "fsdp2":
        from learner.fsdp2.backend import Fsdp2Backend

        return Fsdp2Backend(model, section, placement, **options)
    from learner.megatron.backend import MegatronBackend

    return MegatronBackend(model, section, placement, **options)


def summarise(name: str, num_bytes: int, stalls: list[Stall]) -> dict[str, Any]:
    """Return the medians in milliseconds, and the ratio of the medians; `floor` is what cannot be saved of
    it: the copy, the digest, and one call.
    """
    copy_s = statistics.median(stall.copy_s for stall in stalls)
    publish_s = statistics.median(stall.publish_s for stall in stalls)
    parts = {
        part.replace("_s", "_ms"): 1e3 * statistics.median(asdict(stall.times)[part] for stall in stalls)
        for part in asdict(stalls[0].times)
    }
    row = {"learner": name, "num_bytes": num_bytes, "rounds": len(stalls)}
    call_s = statistics.median(stall.call_s for stall in stalls)
    return row | {
        "copied_ms": 1e3 * copy_s,
        "publish_ms": 1e3 * publish_s,
        **parts,
        "ratio": publish_s / copy_s,
        "floor": 1 + (parts["digest_ms"] / 1e3 + call_s) / copy_s,
    }


def save_model(folder: Path, num_layers: int) -> int:
    """Write a model of random bfloat16 weights, and return their bytes: 3.7 MB per layer and 34 MB."""
    from transformers import AutoModelForCausalLM, Qwen3Config

    sizes = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": num_layers, "head_dim": 64}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 16384}
    config = Qwen3Config(**sizes, **heads, tie_word_embeddings=False)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    return count_bytes(list(model.named_parameters()))


def make_table(results: Mapping[str, Any]) -> str:
    """Return the rows as a table."""
    columns = ("copied_ms", "publish_ms", "gather_ms", "copy_ms", "digest_ms", "call_ms", "other_ms")
    lines = ["| learner | MB | " + " | ".join(columns) + " | ratio |", "|---" * (len(columns) + 3) + "|"]
    for row in results["rows"]:
        figures = " | ".join(f"{row[column]:.1f}" for column in columns)
        lines.append(f"| {row['learner']} | {row['num_bytes'] / 1e6:.0f} | {figures} | {row['ratio']:.2f} |")
    return "\n".join(lines)


def check(results: Mapping[str, Any]) -> Verdict:
    """Judge all learners but those that are only shown."""
    judged = [row for row in results["rows"] if row["learner"] not in SHOWN]
    return judge({f"{row['learner']}, {row['num_bytes']} bytes": MAX_RATIO / row["ratio"] for row in judged})


def main(arguments: Sequence[str]) -> int:
    """Measure as the command line says and return the exit code."""
    parser = make_parser("benchmarks.weight_sync.publish", __doc__, "100 MB of ready tensors only")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    rows = [measure_publish(100 << 20, rounds=11)]
    if not given.quick:
        rows.append(measure_publish(400 << 20, rounds=11))
        with tempfile.TemporaryDirectory() as folder:
            num_bytes = save_model(Path(folder), num_layers=18)
            rows += [measure_ranks(name, Path(folder), num_bytes, rounds=11) for name in LAYOUTS]
    return report(given, {"rows": rows}, make_table, check)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
