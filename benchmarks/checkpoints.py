"""What a checkpoint costs training: the stall, the write beside it, the load.

    asyncrl bench checkpoints [--layers 8] [--hidden 512] [--quick] [--json FILE] [--check]

The target: training stands still for at most half of what a checkpoint takes in all. One process, a
randomly initialised model, AdamW state in float32, the best of three of each.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from asyncrl.config.tree import LearnerSection
from learner.backend import Placement
from learner.checkpoint import CheckpointStore

REPEATS = 3


STALL, WRITE, SEAL = (
    "stall: copy to the host",
    "beside training: write and sync",
    "beside training: digests, sync, rename",
)
MAX_STALL_SHARE = 0.5


def main(arguments: Sequence[str]) -> int:
    """Measure as the command line says and return the exit code."""
    parser = argparse.ArgumentParser(prog="asyncrl bench checkpoints", description=__doc__)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--quick", action="store_true", help="two layers: under a minute")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures as JSON")
    parser.add_argument("--check", action="store_true", help="print the worst ratio last; exit 1 on a miss")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as name:
        figures = measure(Path(name), 2 if options.quick else options.layers, options.hidden)
    for title, value in figures.items():
        print(f"{title:<44} {value:10.3f}")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")
    if not options.check:
        return 0
    share = figures[STALL] / (figures[STALL] + figures[WRITE] + figures[SEAL])
    ratio = MAX_STALL_SHARE / share
    print(
        f"worst ratio to a target: {ratio:.2f} (stall {share:.2f} of a checkpoint, target {MAX_STALL_SHARE})"
    )
    return 0 if ratio >= 1 else 1


def measure(folder: Path, num_layers: int, hidden_size: int) -> dict[str, float]:
    """Return the figures by title, in seconds unless the title says otherwise."""
    from learner.megatron.backend import MegatronBackend

    model = save_model(folder / "model", num_layers, hidden_size)
    backend = MegatronBackend(model, LearnerSection(), Placement(), dtype="float32")
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
        figures[SEAL] = timed(lambda: store.seal(1, 1))[0]
        figures["load"] = best(lambda: backend.load_state(store.folder(1)))
        figures["longest pause of a running thread meanwhile"] = longest_pause(
            lambda: snapshot.write(store.prepare(2))
        )
    finally:
        backend.close()
    return figures


def save_model(folder: Path, num_layers: int, hidden_size: int) -> Path:
    """Write a randomly initialised Qwen3 and return its folder."""
    from transformers import AutoModelForCausalLM, Qwen3Config

    config = Qwen3Config(
        vocab_size=8192,
        hidden_size=hidden_size,
        intermediate_size=4 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=hidden_size // 64,
        num_key_value_heads=hidden_size // 64,
        head_dim=64,
        tie_word_embeddings=True,
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


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
