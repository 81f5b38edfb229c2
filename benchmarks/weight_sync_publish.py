"""How long a learner stands still to publish, against a plain copy of the same bytes in the same run.

    python -m benchmarks.weight_sync_publish [--quick] [--json FILE] [--check]

`tensors`: a learner whose tensors are ready. `tp 1`, `tp 2`, `pp 2`: Megatron learners that export them:
a fused weight is taken apart, shares are gathered over gloo, a tensor of another stage is sent here. The
plain copy goes into shared memory of the same kind, whose pages are touched, as the publish does; both
take turns in one process.
"""

from __future__ import annotations

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

from asyncrl.config.tree import LearnerSection
from asyncrl.control.launch.ports import HeldPort
from asyncrl.errors import ServiceFailed
from asyncrl.service import ServiceContext
from asyncrl.versions import PolicyVersion
from benchmarks.options import Verdict, judge, make_parser, report
from benchmarks.weight_sync_peers.peers import Peer, obey
from benchmarks.weight_sync_peers.services import COORDINATOR_NAME, PUBLISHER_NAME, make_context, run_service
from benchmarks.weight_sync_peers.weights import count_bytes, make_weights
from weight_sync.handoff import Handoff, PublishTimes
from weight_sync.memory import segments

MAX_RATIO = 1.5
BUCKET_BYTES = 64 << 20
WARM_UP_ROUNDS = 4
"""Until each of the three segments has been mapped."""
PAUSE_S = 0.1
LAYOUTS = {"tp 1": {}, "tp 2": {"tp": 2}, "pp 2": {"pp": 2}}
TIMEOUT_S = 120.0

Tensors = Callable[[], Iterator[tuple[str, torch.Tensor]]]


@dataclass(frozen=True)
class Stall:
    """Seconds of one round: a plain copy of the bytes, a publish of them, and the parts of that."""

    copy_s: float
    publish_s: float
    times: PublishTimes


class Learner:
    """Publishes `tensors` again and again, and copies them plainly in between."""

    def __init__(self, context: ServiceContext, tensors: Tensors) -> None:
        self._tensors = tensors
        self._copied = [tensor.clone() for _, tensor in tensors()]
        num_bytes = sum(tensor.numel() * tensor.itemsize for tensor in self._copied)
        path = segments.create(f"{context.shm_prefix}plain", num_bytes)
        self._bytes_B = torch.frombuffer(segments.attach(path, num_bytes), dtype=torch.uint8)
        address, keys = context.addresses[PUBLISHER_NAME], context.client_keys
        self._handoff = Handoff(address, context.shm_prefix, BUCKET_BYTES, token=1, keys=keys)
        self._number = 0

    def measure(self) -> Stall:
        """Return the figures of one round."""
        began = time.perf_counter()
        self._copy()
        copied = time.perf_counter()
        self._number += 1
        if not self._handoff.publish(PolicyVersion(self._number, self._number), self._tensors()):
            raise ServiceFailed("no segment was free, though nobody receives")
        return Stall(copied - began, time.perf_counter() - copied, self._handoff.take_times())

    def close(self) -> None:
        self._handoff.close()

    def _copy(self) -> None:
        end = 0
        for tensor in self._copied:
            start, end = end, end + tensor.numel() * tensor.itemsize
            self._bytes_B[start:end].view(tensor.dtype).copy_(tensor.view(-1))


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
        segments.unlink_all(self.context.shm_prefix)


def measure_publish(num_bytes: int, rounds: int) -> dict[str, Any]:
    """Return the row of a learner in this process whose tensors are ready."""
    weights = make_weights(num_bytes)
    with (
        closing(Publisher()) as publisher,
        closing(Learner(publisher.context, lambda: iter(weights))) as learner,
    ):
        stalls = measure_rounds(learner, rounds)
    return summarise("tensors", count_bytes(weights), stalls)


def measure_rounds(learner: Learner, rounds: int) -> list[Stall]:
    """Return `rounds` rounds after those that warm up."""
    stalls = []
    for _ in range(WARM_UP_ROUNDS + rounds):
        stalls.append(learner.measure())
        time.sleep(PAUSE_S)
    return stalls[WARM_UP_ROUNDS:]


def measure_ranks(name: str, model: Path, num_bytes: int, rounds: int) -> dict[str, Any]:
    """Return the row of Megatron learners in the layout `name`."""
    changes = LAYOUTS[name]
    world = max(changes.values(), default=1)
    with closing(Publisher()) as publisher, closing(HeldPort()) as port:
        ranks = [
            Peer(
                f"rank {rank}", run_rank, rank, world, port.number, model, changes, publisher.context, rounds
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
    pipe: Connection,
    rank: int,
    world: int,
    port: int,
    model: Path,
    changes: Mapping[str, int],
    context: ServiceContext,
    rounds: int,
) -> None:
    """Entry of a learner rank: rank 0 publishes and sends its rounds; the others take part in the export."""
    from learner.backend import Placement
    from learner.megatron.backend import MegatronBackend

    placement = Placement(rank, world, f"127.0.0.1:{port}", timeout_s=TIMEOUT_S)
    section = LearnerSection.model_validate({"lr": 1e-6, **changes})
    backend = MegatronBackend(
        model, section, placement, dtype="bfloat16", seed=0, temperature=1.0, is_frozen=True
    )
    if rank == 0:
        with closing(Learner(context, backend.named_tensors)) as learner:
            pipe.send(measure_rounds(learner, rounds))
    else:
        for _ in range(1 + WARM_UP_ROUNDS + rounds):
            for _ in backend.named_tensors():
                pass
    obey(pipe, {})


def summarise(name: str, num_bytes: int, stalls: list[Stall]) -> dict[str, Any]:
    """Return the medians in milliseconds, and the ratio of the medians."""
    copy_s = statistics.median(stall.copy_s for stall in stalls)
    publish_s = statistics.median(stall.publish_s for stall in stalls)
    parts = {
        part.replace("_s", "_ms"): 1e3 * statistics.median(asdict(stall.times)[part] for stall in stalls)
        for part in asdict(stalls[0].times)
    }
    row = {"learner": name, "num_bytes": num_bytes, "rounds": len(stalls)}
    return row | {
        "copied_ms": 1e3 * copy_s,
        "publish_ms": 1e3 * publish_s,
        **parts,
        "ratio": publish_s / copy_s,
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
    """Judge the learners that gather nothing over a network; the others are shown."""
    alone = [row for row in results["rows"] if row["learner"] in ("tensors", "tp 1")]
    return judge({f"{row['learner']}, {row['num_bytes']} bytes": MAX_RATIO / row["ratio"] for row in alone})


def main(arguments: Sequence[str]) -> int:
    """Measure as the command line says and return the exit code."""
    parser = make_parser("benchmarks.weight_sync_publish", __doc__, "100 MB of ready tensors only")
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
