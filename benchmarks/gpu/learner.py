"""Model FLOPs utilisation of the learner: a Qwen3 of 1.7 B, bfloat16, packed rows of 8,192 tokens.

Run: `python -m benchmarks.gpu.learner --check`. It makes the model with random weights, does whole
updates (forward, loss, backward, optimizer) of `MegatronBackend` and divides the FLOPs that the model
asks for by the time and by the GPU's peak. Nothing is counted that a better program would not have to
compute: no recomputation, no padding. `--quick` checks the logic on a CPU; its figures say nothing.
"""

from __future__ import annotations

import dataclasses
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

import numpy as np

from asyncrl.core.config.tree import LearnerSection
from asyncrl.core.experience import Group
from benchmarks.harness.options import Verdict, judge, make_parser, report
from benchmarks.learner.inputs import make_trajectory, save_qwen3
from benchmarks.learner.packing import loss
from learner.backend import Placement
from learner.batching.batch import PackedBatch, build_batch
from learner.megatron.backend import MegatronBackend
from learner.report.efficiency import find_peak_flops, read_model_size

TARGET_MFU = 0.45
NUM_PROMPT_TOKENS = 16


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The model, the batch and how often it is trained. Rows of a microbatch fill its 8,192 tokens."""

    hidden_size: int = 2048
    intermediate_size: int = 6144
    num_layers: int = 28
    num_heads: int = 16
    num_key_value_heads: int = 8
    head_size: int = 128
    vocab_size: int = 151936
    dtype: str = "bfloat16"
    num_tokens: int = 8192
    rows_per_microbatch: int = 2
    num_microbatches: int = 4
    recompute: str = "none"
    num_updates: int = 8


TINY = Sizes(
    hidden_size=32,
    intermediate_size=64,
    num_layers=2,
    num_heads=2,
    num_key_value_heads=1,
    head_size=16,
    vocab_size=64,
    dtype="float32",
    num_tokens=128,
    num_microbatches=2,
    num_updates=2,
)


def main(arguments: Sequence[str]) -> int:
    """Measure as the command line says and return the exit code."""
    parser = make_parser("python -m benchmarks.gpu.learner", __doc__, quick="a tiny model, on any machine")
    parser.add_argument("--recompute", choices=("none", "selective", "full"), default="none")
    given = parser.parse_args(arguments)
    if not given.quick and not torch.cuda.is_available():
        print("no GPU here; --quick checks this benchmark's logic on a CPU", file=sys.stderr)
        return 1
    results = measure(dataclasses.replace(TINY if given.quick else Sizes(), recompute=given.recompute))
    return report(given, results, table, check)


def measure(sizes: Sizes) -> dict[str, Any]:
    """Train the same batch `num_updates` times, after two updates to warm up, and return all figures."""
    batch = make_batch(sizes)
    with tempfile.TemporaryDirectory(prefix="asyncrl-bench-") as name:
        folder = Path(name)
        num_parameters = save_model(folder, sizes)
        section = LearnerSection.model_validate(
            {
                "lr": 1e-6,
                "gpus": int(torch.cuda.is_available()),
                "max_tokens_per_microbatch": sizes.num_tokens,
                "recompute": sizes.recompute,
            }
        )
        model_size = read_model_size(folder)
        assert model_size is not None, "the model was written here"
        backend = MegatronBackend(folder, section, Placement(), dtype=sizes.dtype)
        seconds = []
        for update in range(2 + sizes.num_updates):
            began = time.perf_counter()
            backend.update(batch, loss)  # returns numbers: it has waited for the device
            if update >= 2:
                seconds.append(time.perf_counter() - began)
        backend.close()
    flops = 3 * model_size.forward_flops(batch.num_tokens, count_pairs(batch))
    median_s, peak = statistics.median(seconds), find_peak_flops(sizes.dtype)
    is_on_gpu = torch.cuda.is_available()
    return {
        "benchmark": "gpu/learner",
        "device": torch.cuda.get_device_name() if is_on_gpu else "CPU",
        "sizes": dataclasses.asdict(sizes),
        "num_parameters": num_parameters,
        "num_tokens": batch.num_tokens,
        "flops_per_update": flops,
        "seconds": seconds,
        "tokens_per_s": batch.num_tokens / median_s,
        "tflops": flops / median_s / 1e12,
        "peak_tflops": peak / 1e12,
        "mfu": flops / median_s / peak,
        "peak_memory_bytes": torch.cuda.max_memory_allocated() if is_on_gpu else 0,
    }


def count_pairs(batch: PackedBatch) -> float:
    """Return the (query, key) pairs of causal attention within rows."""
    return float(sum(length * (length + 1) / 2 for length in batch.row_lengths))


def make_batch(sizes: Sizes, seed: int = 0) -> PackedBatch:
    """Return rows of random tokens that fill every microbatch to the last token."""
    generator = np.random.default_rng(seed)
    num_response = sizes.num_tokens // sizes.rows_per_microbatch - NUM_PROMPT_TOKENS
    groups = [
        Group(
            ticket=ticket,
            attempt=0,
            prompt_ids=generator.integers(0, sizes.vocab_size, NUM_PROMPT_TOKENS).astype(np.int32),
            trajectories=tuple(
                make_trajectory(generator, num_response, sizes.vocab_size)
                for _ in range(sizes.rows_per_microbatch)
            ),
        )
        for ticket in range(sizes.num_microbatches)
    ]
    return build_batch(groups, 0, {1: 0})


def save_model(folder: Path, sizes: Sizes) -> int:
    """Write a Qwen3 with random weights and tied embeddings; return the number of its parameters."""
    num_parameters = save_qwen3(
        folder,
        dtype=getattr(torch, sizes.dtype),
        device="cuda" if torch.cuda.is_available() else "cpu",
        vocab_size=sizes.vocab_size,
        hidden_size=sizes.hidden_size,
        intermediate_size=sizes.intermediate_size,
        num_hidden_layers=sizes.num_layers,
        num_attention_heads=sizes.num_heads,
        num_key_value_heads=sizes.num_key_value_heads,
        head_dim=sizes.head_size,
        max_position_embeddings=sizes.num_tokens,
        tie_word_embeddings=True,
    )
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    return num_parameters


def table(results: dict[str, Any]) -> str:
    """Return the figures as text, the MFU last."""
    sizes, median_s = results["sizes"], statistics.median(results["seconds"])
    row_tokens = sizes["num_tokens"] // sizes["rows_per_microbatch"]
    model = f"{results['num_parameters'] / 1e9:.2f} B parameters, {sizes['dtype']}"
    batch = f"{sizes['num_tokens']} tokens a microbatch, rows of {row_tokens}"
    speed = f"{median_s:.3f} s per update of {results['num_tokens']} tokens"
    memory = f"{results['peak_memory_bytes'] / 2**30:.1f} GiB at most"
    lines = [
        f"{results['device']}: {model}, recompute {sizes['recompute']}; {batch}",
        f"{speed}, {results['tokens_per_s']:.0f} tokens/s, {memory}",
        f"{results['tflops']:.3g} of {results['peak_tflops']:.3g} TFLOP/s: MFU {results['mfu']:.1%}",
    ]
    return "\n".join(lines)


def check(results: dict[str, Any]) -> Verdict:
    """Return whether the target is met, and the ratio to it as a sentence."""
    return judge({f"MFU, target {TARGET_MFU:.0%}": results["mfu"] / TARGET_MFU})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
