"""Whole updates of the learner on one GPU: time, model FLOPs utilisation, peak memory beside that of `plan`.

Run: `python -m benchmarks.gpu.learner --model 1.7B --check`. It makes a Qwen3 with random weights, trains
microbatches of 8,192 packed tokens (forward, loss, backward, optimizer), with rows of 4,096 and with ragged
ones, and divides the FLOPs that the model asks for by the time and by the GPU's peak. Nothing is counted
that a better program would not have to compute: no recomputation, no padding. `--quick` checks the logic on
a CPU; its figures say nothing. Not run on a GPU.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

import numpy as np

from asyncrl.core.config.load import load_config
from asyncrl.core.config.tree import Config
from asyncrl.core.experience import Group
from asyncrl.core.variants import backend_names
from asyncrl.models.architectures import ModelSize
from asyncrl.planner.plan.footprint.memory import LEARNER_GPU, count_parts
from asyncrl.planner.plan.footprint.sizes import estimate_activations
from benchmarks.gpu.frame import find_device, make_part_parser, measure_peak, run_part, time_call
from benchmarks.harness.options import Verdict, judge
from benchmarks.harness.rows import Row
from benchmarks.learner.inputs import QWEN3, loss, make_trajectory, save_qwen3
from configs import shipped
from learner.backend import LearnerBackend, Placement
from learner.batching.batch import PackedBatch, build_batch
from learner.composition import open_policy
from learner.report.efficiency import find_peak_flops, read_model_size

TARGET_MFU = 0.45
NUM_PROMPT_TOKENS, MEDIAN_SHARE, SIGMA = 16, 8, 0.8
"""The median of ragged rows is an eighth of a microbatch."""
LENGTHS = ("equal", "ragged")


@dataclass(frozen=True)
class Work:
    """The model, the batch and the way it is trained."""

    model: str
    dtype: str
    num_tokens: int
    num_microbatches: int
    num_updates: int
    backend: str = "megatron"
    recompute: str = "none"
    offload: bool = False


def main(arguments: Sequence[str]) -> int:
    """Measure as the command line says and return the exit code."""
    parser = make_part_parser("learner", __doc__)
    parser.add_argument("--model", choices=QWEN3, default="1.7B")
    parser.add_argument("--backend", choices=backend_names(), default="megatron")
    parser.add_argument("--recompute", choices=("none", "selective", "full"), default="none")
    parser.add_argument("--offload", action="store_true", help="keep AdamW and its state on the host")
    parser.add_argument("--updates", type=int, default=6)
    given = parser.parse_args(arguments)
    return run_part(given, lambda: list(measure(make_work(given))), check)


def make_work(given: argparse.Namespace) -> Work:
    """Return what the command line asks for."""
    if given.quick:
        sizes = Work("tiny", "float32", 128, 2, 2)
    else:
        sizes = Work(given.model, "bfloat16", 8192, 4, given.updates)
    return replace(sizes, backend=given.backend, recompute=given.recompute, offload=given.offload)


def measure(work: Work) -> Iterator[Row]:
    """Yield a row for each kind of lengths, of one model and optimizer."""
    with tempfile.TemporaryDirectory(prefix="asyncrl-bench-") as name:
        folder = Path(name)
        num_parameters = save_model(folder, work.model, work.dtype)
        size = read_model_size(folder)
        assert size is not None, "the model was written here"
        plan_bytes = plan_memory(make_config(folder, work, gpus=1), num_parameters, size)
        config = make_config(folder, work, gpus=int(torch.cuda.is_available()))
        with closing(open_policy(config, Placement())) as backend:
            for lengths in LENGTHS:
                yield _measure_updates(backend, work, lengths, size, plan_bytes)


def _measure_updates(
    backend: LearnerBackend, work: Work, lengths: str, size: ModelSize, plan_bytes: int
) -> Row:
    """Train one batch again and again; the first update warms up, and shows the most memory."""
    batch = make_batch(work, lengths, size.vocab_size)
    peak_bytes = torch.cuda.memory_allocated() + measure_peak(lambda: train(backend, batch))
    times = [train(backend, batch) for _ in range(work.num_updates)]
    flops = 3 * size.forward_flops(batch.num_tokens, count_pairs(batch))
    seconds = [sum(parts) for parts in times]
    peak = find_peak_flops(work.dtype)
    samples: dict[str, float | list[float]] = {
        "update_s": seconds,
        "optimizer_s": [optimizer_s for _, optimizer_s in times],
        "tokens_per_s": [batch.num_tokens / taken_s for taken_s in seconds],
        "mfu": [flops / taken_s / peak for taken_s in seconds],
        "peak_bytes": peak_bytes,
        "plan_bytes": plan_bytes,
    }
    case = {"model": work.model, "lengths": lengths, "backend": work.backend, "recompute": work.recompute}
    return Row.of("gpu.learner", case | {"offload": int(work.offload), "dtype": work.dtype}, samples)


def train(backend: LearnerBackend, batch: PackedBatch) -> tuple[float, float]:
    """Do one update; return the seconds of its gradient and of its optimizer."""
    began = time.perf_counter()
    metrics = backend.accumulate([batch], loss, is_last=True)  # returns numbers: it has waited for the device
    gradient_s = time.perf_counter() - began
    return gradient_s, time_call(lambda: backend.apply([batch], metrics, 1.0))


def make_config(model: Path, work: Work, gpus: int, **others: object) -> Config:
    """Return a shipped configuration with this model and this work, and other keys of the learner's."""
    values = {
        "model.path": model,
        "model.dtype": work.dtype,
        "learner.gpus": gpus,
        "learner.max_tokens_per_microbatch": work.num_tokens,
        "learner.backend": work.backend,
        "learner.recompute": work.recompute,
        "learner.offload": str(work.offload).lower(),
        "rollout.max_tokens": work.num_tokens // 2,
        "data.max_prompt_tokens": NUM_PROMPT_TOKENS,
        "algorithm.correction": "disabled",  # nobody has sampled these tokens
    } | {f"learner.{key}": value for key, value in others.items()}
    return load_config(shipped()["grpo"], [f"{key}={value}" for key, value in values.items()])


def plan_memory(config: Config, num_parameters: int, size: ModelSize) -> int:
    """Return what `asyncrl plan` counts on the learner's GPU, its estimate of activations included."""
    parts = [*count_parts(config, num_parameters, 0), estimate_activations(config, size)]
    return sum(part.num_bytes for part in parts if part.where == LEARNER_GPU)


def count_pairs(batch: PackedBatch) -> float:
    """Return the (query, key) pairs of causal attention within rows."""
    return float(sum(length * (length + 1) / 2 for length in batch.row_lengths))


def make_batch(work: Work, lengths: str, vocab_size: int) -> PackedBatch:
    """Return random rows that fill the microbatches: equal ones to the last token, ragged ones almost."""
    return build_batch(make_groups(work, lengths, vocab_size), 0, {1: 0})


def make_groups(work: Work, lengths: str, vocab_size: int, seed: int = 0) -> list[Group]:
    """Return the rows of a batch, two in a group: one alone would have no advantage."""
    generator = np.random.default_rng(seed)
    rows = [
        make_trajectory(generator, length - NUM_PROMPT_TOKENS, vocab_size)
        for length in draw_lengths(work, lengths, generator)
    ]
    return [
        Group(
            ticket=ticket,
            attempt=0,
            prompt_ids=generator.integers(0, vocab_size, NUM_PROMPT_TOKENS).astype(np.int32),
            trajectories=tuple(rows[2 * ticket : 2 * ticket + 2]),
        )
        for ticket in range((len(rows) + 1) // 2)
    ]


def draw_lengths(work: Work, lengths: str, generator: np.random.Generator) -> list[int]:
    """Return the lengths of rows that fill the microbatches."""
    if lengths == "equal":
        return [work.num_tokens // 2] * (2 * work.num_microbatches)
    drawn, left = list[int](), work.num_tokens * work.num_microbatches
    while left > 2 * NUM_PROMPT_TOKENS:
        length = int(generator.lognormal(np.log(work.num_tokens / MEDIAN_SHARE), SIGMA))
        drawn.append(min(left, work.num_tokens, max(2 * NUM_PROMPT_TOKENS, length)))
        left -= drawn[-1]
    return drawn


def save_model(folder: Path, model: str, dtype: str) -> int:
    """Write a Qwen3 with random weights; return the number of its parameters."""
    num_parameters = save_qwen3(folder, getattr(torch, dtype), find_device().type, **QWEN3[model])
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return num_parameters


def check(rows: Sequence[Row]) -> Verdict:
    """Judge the MFU at equal lengths; ragged ones have fewer pairs to compute for their time."""
    return judge(
        {
            f"MFU, target {TARGET_MFU:.0%}": row.values["mfu"] / TARGET_MFU
            for row in rows
            if row.case["lengths"] == "equal"
        }
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
