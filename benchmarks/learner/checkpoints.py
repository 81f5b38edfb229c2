"""Cost of a checkpoint to training: the stall, the write beside it, the load.

    asyncrl bench checkpoints [--layers 8] [--hidden 512] [--model 0.6B] [--quick] [--json FILE] [--check]

The target: training stands still for at most half of a checkpoint's total time. One process, a
randomly initialised model, AdamW state in float32, the best of three of each. `--model 0.6B` takes a Qwen3 of
that size in bfloat16, on the GPU if there is one.
"""

from __future__ import annotations

import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from asyncrl.core.config.tree import LearnerSection
from benchmarks.harness.options import Verdict, judge, make_parser, report
from benchmarks.learner.inputs import QWEN3, save_qwen3
from learner.backend import Placement
from learner.checkpoint import CheckpointStore

REPEATS = 3


STALL, WRITE, SEAL = (
    "stall: copy to the host",
    "beside training: write, digest and sync",
    "beside training: seal: sync, rename",
)
MAX_STALL_SHARE = 0.5


def main(arguments: Sequence[str]) -> int:
    """Measure as the command line says and return the exit code."""
    parser = make_parser("asyncrl bench checkpoints", __doc__, quick="two layers: under a minute")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--model", choices=QWEN3, help="in place of --layers and --hidden")
    given = parser.parse_args(arguments)
    size = given.model and ("tiny" if given.quick else given.model)
    fields = QWEN3[size] if size else make_fields(2 if given.quick else given.layers, given.hidden)
    with tempfile.TemporaryDirectory() as name:
        figures = measure(Path(name), fields, "bfloat16" if size else "float32", is_on_gpu=bool(size))
    return report(given, figures, table, check)


def table(figures: dict[str, float]) -> str:
    """Return the figures as text, one a line."""
    return "\n".join(f"{title:<44} {value:10.3f}" for title, value in figures.items())


def check(figures: dict[str, float]) -> Verdict:
    """Return whether the stall is a small enough part of a checkpoint, and the ratio as a sentence."""
    share = figures[STALL] / (figures[STALL] + figures[WRITE] + figures[SEAL])
    return judge({f"stall {share:.2f} of a checkpoint, target {MAX_STALL_SHARE}": MAX_STALL_SHARE / share})


def measure(folder: Path, fields: Mapping[str, Any], dtype: str, *, is_on_gpu: bool) -> dict[str, float]:
    """Return the figures by title, in seconds unless the title says otherwise.

    Args:
        fields: Of the Qwen3 that is trained.
        is_on_gpu: Whether it is on a GPU, if there is one.
    """
    from learner.megatron.backend import MegatronBackend

    gpus = int(is_on_gpu and torch.cuda.is_available())
    save_qwen3(folder / "model", getattr(torch, dtype), "cuda" if gpus else "cpu", **fields)
    backend = MegatronBackend(folder / "model", LearnerSection(gpus=gpus), Placement(), dtype=dtype)
    store = CheckpointStore(folder / "checkpoints", keep=1)
    figures: dict[str, float] = {}
    try:
        first_s, snapshot = timed(backend.snapshot_state)
        figures["parameters [millions]"] = snapshot.num_bytes / 12e6
        figures["state [MB]"] = snapshot.num_bytes / 1e6
        figures["stall: copy to the host, first"] = first_s
        figures[STALL] = best(backend.snapshot_state)
        target = store.prepare(1)
        figures[WRITE] = best(lambda: snapshot.write(target))
        digests = snapshot.write(target)
        figures[SEAL] = timed(lambda: store.seal(1, 1, digests=digests))[0]
        figures["load"] = best(lambda: backend.load_state(store.folder(1)))
        figures["longest pause of a running thread meanwhile"] = longest_pause(
            lambda: snapshot.write(store.prepare(2))
        )
    finally:
        backend.close()
    return figures


def make_fields(num_layers: int, hidden_size: int) -> dict[str, Any]:
    """Return a Qwen3 of this shape, with a small vocabulary."""
    num_heads = hidden_size // 64
    fields = {"vocab_size": 8192, "hidden_size": hidden_size, "intermediate_size": 4 * hidden_size}
    fields |= {"num_hidden_layers": num_layers, "num_attention_heads": num_heads, "head_dim": 64}
    return fields | {"num_key_value_heads": num_heads, "tie_word_embeddings": True}


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    """Return (seconds, result)."""
    began = time.perf_counter()
    result = call()
    return time.perf_counter() - began, result


def best(call: Callable[[], Any]) -> float:
    """Return the least seconds of a few calls."""
    return min(timed(call)[0] for _ in range(REPEATS))


def longest_pause(call: Callable[[], Any]) -> float:
    """Return how long this thread was kept from running at most while another makes the call."""
    thread = threading.Thread(target=call)
    thread.start()
    longest, last = 0.0, time.perf_counter()
    while thread.is_alive():
        time.sleep(0.0005)
        now = time.perf_counter()
        longest, last = max(longest, now - last), now
    return longest


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
