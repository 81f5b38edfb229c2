"""The learner against what one would write by hand: whole training steps, and advantage and loss.

Steps: `MegatronBackend.update` against a Hugging Face model, its loss, `clip_grad_norm_` and torch's
fused AdamW, on one batch; Hugging Face pads to the longest row. Advantage and loss: see
`benchmarks.learner.verl_loss`. Everything is float32 on one thread; sides take turns in one process, and what
counts is the processor time of this process, so that other programs on the machine do not.
A ratio is the median over the turns of both sides' times within a turn; that of each side's best turn
is shown besides, for machines whose caches others use.
Invariant: both sides must find the same loss and the same gradient norm.

Shapes: N packed positions; padded: B rows, T columns.
"""

from __future__ import annotations

import dataclasses
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

import numpy as np
import torch

from asyncrl.core.experience import Group
from benchmarks.harness.options import Verdict, judge, make_parser, report
from benchmarks.learner import shared_prompt, verl_loss
from benchmarks.learner.inputs import make_trajectory
from benchmarks.learner.kinds import TARGETS, Model, Shape, Step
from learner.batching.batch import PackedBatch, build_batch

NUM_PROMPT_TOKENS = 16
SIGMA, MEDIAN_TOKENS, MAX_TOKENS = 1.0, 112, 496
LENGTHS = ("equal", "ragged")
LOSS_TARGETS = {"padded": 1.0, "packed": 2.0}
TARGET_ERROR = 1e-4


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of the measurement; `num_rows` rows, each of `num_tokens` positions where lengths are equal."""

    shapes: tuple[Shape, ...]
    num_rows: int = 8
    num_tokens: int = 256
    loss_rows: int = 512
    loss_columns: int = 4096
    loss_turns: int = 9


SMALL = Shape("10M", 256, 8, 8192, 3)
EXPERTS = Shape("14M, 2 of 8 experts", 256, 4, 8192, 3, "experts")
ADAPTERS = Shape("10M, adapters", 256, 8, 8192, 3, "adapters")
QUICK = Sizes((SMALL, EXPERTS, ADAPTERS), loss_turns=5)
FULL = Sizes(
    (
        *(dataclasses.replace(shape, num_turns=7) for shape in QUICK.shapes),
        Shape("50M", 512, 12, 16384, 5),
    )
)
ONLY = {"dense": "dense", "moe": "experts", "lora": "adapters"}
"""`--only` -> the kind of the shapes."""


def main(arguments: Sequence[str]) -> int:
    """Measure as the command line says and return the exit code."""
    parser = make_parser("asyncrl bench learner", __doc__, quick="the small model only: under a minute")
    parser.add_argument("--verl", type=Path, metavar="DIR", help="the folder that holds the package verl")
    parser.add_argument(
        "--only",
        choices=["shared_prompt", "steps", *ONLY],
        help="prompts once per group against per row; all steps; those of one kind of model",
    )
    given = parser.parse_args(arguments)
    if given.only == "shared_prompt":
        return shared_prompt.run(given)
    sizes = choose_sizes(given.quick, given.only)
    results = measure(sizes, given.verl) | {"quick": given.quick, "only": given.only}
    return report(given, results, table, check)


def choose_sizes(is_quick: bool, only: str | None) -> Sizes:
    """Return what is measured. The quick form has the dense model alone, if nothing else is asked for."""
    sizes = QUICK if is_quick else FULL
    kind = ONLY.get(only or "", "dense" if is_quick and only is None else None)
    shapes = tuple(shape for shape in sizes.shapes if kind in (None, shape.kind))
    return dataclasses.replace(sizes, shapes=shapes, loss_turns=0 if only else sizes.loss_turns)


def measure(sizes: Sizes, verl_folder: Path | None) -> dict[str, Any]:
    """Return all figures; `loss` is None where verl cannot be imported."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        functions = verl_loss.load_verl(verl_folder) if sizes.loss_turns else None
        found = functions and verl_loss.measure(
            functions, sizes.loss_rows, sizes.loss_columns, sizes.loss_turns
        )
        steps = [result for shape in sizes.shapes for result in measure_steps(shape, sizes)]
    finally:
        torch.set_num_threads(num_threads)
    return {
        "benchmark": "learner",
        "machine": {"processor": platform.machine(), "python": platform.python_version()},
        "steps": steps,
        "loss": found,
    }


def measure_steps(shape: Shape, sizes: Sizes) -> list[dict[str, Any]]:
    """Return a result for equal and one for ragged lengths of one model."""
    return [_measure_step(shape, lengths, make_batch(shape, sizes, lengths)) for lengths in LENGTHS]


def _measure_step(shape: Shape, lengths: str, batch: PackedBatch) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="asyncrl-bench-") as folder:
        model = Model(Path(folder), shape)
        backend = model.open()
        sides: dict[str, Step] = {
            "asyncrl": lambda: backend.update(batch, loss),
            "huggingface": model.make_plain_step(batch),
        }
        first = {side: step() for side, step in sides.items()}  # also warms up
        seconds: dict[str, list[float]] = {side: [] for side in sides}
        for _ in range(shape.num_turns):
            for side, step in sides.items():
                began = time.process_time()
                step()
                seconds[side].append(time.process_time() - began)
        backend.close()
    medians = {side: statistics.median(found) for side, found in seconds.items()}
    return {
        "model": shape.name,
        "kind": shape.kind,
        "lengths": lengths,
        "num_parameters": model.num_parameters,
        "num_tokens": batch.num_tokens,
        "num_padded_tokens": batch.num_rows * max(batch.row_lengths),
        "seconds": seconds,
        "tokens_per_s": {side: batch.num_tokens / median for side, median in medians.items()},
        "ratio": statistics.median(
            plain / ours for ours, plain in zip(seconds["asyncrl"], seconds["huggingface"], strict=True)
        ),
        "best_ratio": min(seconds["huggingface"]) / min(seconds["asyncrl"]),
        "error": compare(first["asyncrl"], first["huggingface"]),
    }


def compare(ours: Mapping[str, float], reference: Mapping[str, float]) -> float:
    """Return the largest relative difference of loss and gradient norm."""
    return max(abs(ours[name] - value) / abs(value) for name, value in reference.items())


def make_batch(shape: Shape, sizes: Sizes, lengths: str, seed: int = 0) -> PackedBatch:
    """Return rows of `sizes.num_tokens`, or with log-normal response lengths, in groups of two."""
    generator = np.random.default_rng(seed)
    num_response = np.full(sizes.num_rows, sizes.num_tokens - NUM_PROMPT_TOKENS)
    if lengths == "ragged":
        drawn = MEDIAN_TOKENS * np.exp(SIGMA * generator.standard_normal(sizes.num_rows))
        num_response = np.clip(drawn.round(), 1, MAX_TOKENS).astype(int)
    groups = [
        Group(
            ticket=ticket,
            attempt=0,
            prompt_ids=generator.integers(0, shape.vocab_size, NUM_PROMPT_TOKENS).astype(np.int32),
            trajectories=tuple(make_trajectory(generator, int(size), shape.vocab_size) for size in pair),
        )
        for ticket, pair in enumerate(num_response.reshape(-1, 2))
    ]
    return build_batch(groups, 0, {1: 0})


def loss(
    logprobs_N: torch.Tensor, _entropy_N: torch.Tensor, microbatch: PackedBatch
) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
    """Return the policy gradient with the reward as advantage, token-mean."""
    rewards_N = microbatch.rewards_R[microbatch.row_N]
    total = -(rewards_N * logprobs_N * microbatch.loss_mask_N).sum() / microbatch.totals.num_tokens
    return total, {"actor/pg_loss": total.detach()}


def table(results: dict[str, Any]) -> str:
    """Return the figures as text."""
    lines = ["a whole training step, tokens/s of processor time, one thread, float32"]
    for step in results["steps"]:
        speed = step["tokens_per_s"]
        lines.append(
            f"{step['model']} ({step['num_parameters'] / 1e6:.1f} M), {step['lengths']} lengths, "
            f"{step['num_tokens']} tokens ({step['num_padded_tokens']} padded): "
            f"asyncrl {speed['asyncrl']:.0f}, Hugging Face {speed['huggingface']:.0f}, "
            f"ratio {step['ratio']:.2f} (best turns {step['best_ratio']:.2f}), difference {step['error']:.1e}"
        )
    found = results["loss"]
    if found is None:
        return "\n".join([*lines, *([] if results["only"] else [verl_loss.HOW_TO_GET])])
    lines.append(
        f"advantage, weights, loss on {found['num_rows']} x {found['num_columns']}, "
        f"{found['filled_share']:.0%} of it real; largest difference {found['error']:.1e}"
    )
    for side, medians in found["median_s"].items():
        parts = ", ".join(f"{stage} {1000 * seconds:.0f} ms" for stage, seconds in medians.items())
        ratios = ", ".join(f"{what} {ratio:.2f}" for what, ratio in found["speed_up"].get(side, {}).items())
        lines.append(f"{side}: {parts}" + (f"; speed-up in {ratios}" if ratios else ""))
    return "\n".join(lines)


def check(results: dict[str, Any]) -> Verdict:
    """Return whether every target is met, and the worst ratio to a target as a sentence."""
    ratios: dict[str, float] = {}
    for step in results["steps"]:
        name, target = f"{step['model']} {step['lengths']}", TARGETS[step["kind"]][step["lengths"]]
        ratios[f"{name}, target {target:g}"] = step["ratio"] / target
        ratios[f"{name} loss and norm, target {TARGET_ERROR:g}"] = TARGET_ERROR / max(step["error"], 1e-12)
    found = results["loss"]
    if results["only"]:
        return judge(ratios)
    if found is None:
        return False, f"advantage and loss were not measured: {verl_loss.HOW_TO_GET}"
    for side, target in LOSS_TARGETS.items():
        for what, ratio in found["speed_up"][side].items():
            ratios[f"{side} {what}, target {target:g}"] = ratio / target
    ratios[f"gradients, target {verl_loss.TARGET_ERROR:g}"] = verl_loss.TARGET_ERROR / max(
        found["error"], 1e-12
    )
    return judge(ratios)
