"""A prompt computed once per group against once per row: whole learner steps, by both backends.

A step is a pass for prox log-probs and an update, of one group of eight answers to one prompt. Both ways run
in one process, on one thread, and take turns; what counts is the processor time. The gradients of
the first update are compared.
"""

from __future__ import annotations

import argparse
import dataclasses
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from asyncrl.core.config.tree import LearnerSection
from asyncrl.core.experience import Group
from benchmarks.harness.options import Verdict, judge, report
from benchmarks.learner.inputs import loss, make_trajectory, save_plain
from benchmarks.learner.packing import FIRST_MOMENT_DECAY, NO_CLIPPING, compare, read_gradients
from learner.backend import Placement
from learner.batching.batch import PackedBatch, build_batch
from learner.batching.shared_prompts import measure_work
from learner.fsdp2.backend import Fsdp2Backend
from learner.megatron.backend import MegatronBackend

BACKENDS: Mapping[str, Callable[..., Any]] = {"megatron": MegatronBackend, "fsdp2": Fsdp2Backend}
WAYS = {"shared": "auto", "packed": "off"}
TARGETS = {16: 0.98, 128: 1.6, 1024: 4.5}
TARGET_GRADIENTS = 1e-5


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of the measurement, and the turns of each length of prompt."""

    turns: Mapping[int, int]
    backends: tuple[str, ...] = tuple(BACKENDS)
    hidden_size: int = 512
    num_layers: int = 8
    vocab_size: int = 4096
    group_size: int = 8
    num_answer_tokens: int = 128


QUICK = Sizes({16: 1, 128: 2}, backends=("megatron",))
FULL = Sizes({16: 7, 128: 5, 1024: 2})


def run(given: argparse.Namespace) -> int:
    """Measure as the command line says and return the exit code."""
    results = measure(QUICK if given.quick else FULL) | {"quick": given.quick}
    return report(given, results, table, check)


def measure(sizes: Sizes) -> dict[str, Any]:
    """Return all figures."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with tempfile.TemporaryDirectory(prefix="asyncrl-bench-") as folder:
            save_plain(Path(folder), sizes.hidden_size, sizes.num_layers, sizes.vocab_size)
            found = [one for name in sizes.backends for one in _measure_backend(name, Path(folder), sizes)]
    finally:
        torch.set_num_threads(num_threads)
    return {
        "benchmark": "shared_prompt",
        "machine": {"processor": platform.machine(), "python": platform.python_version()},
        "sizes": dataclasses.asdict(sizes) | {"turns": dict(sizes.turns)},
        "steps": found,
    }


def make_batch(num_prompt: int, sizes: Sizes, size: int | None = None) -> PackedBatch:
    """Return one group, of `size` answers."""
    generator = np.random.default_rng(num_prompt)
    prompt_ids = generator.integers(0, sizes.vocab_size, num_prompt).astype(np.int32)
    answers = [
        make_trajectory(generator, sizes.num_answer_tokens, sizes.vocab_size)
        for _ in range(size or sizes.group_size)
    ]
    return build_batch([Group(1, 0, prompt_ids, tuple(answers))], 0, {1: 0})


def _measure_backend(name: str, folder: Path, sizes: Sizes) -> list[dict[str, Any]]:
    backends = {way: _open(name, folder, value) for way, value in WAYS.items()}
    first = make_batch(min(sizes.turns), sizes)
    gradients = {}
    for way, backend in backends.items():  # also warms up
        backend.update(first, loss)
        gradients[way] = read_gradients(backend)
    error = compare(gradients["shared"], gradients["packed"])
    found = [
        {"backend": name, "num_prompt_tokens": num_prompt, "gradient_error": error}
        | _measure_step(make_batch(num_prompt, sizes), backends, num_turns)
        for num_prompt, num_turns in sizes.turns.items()
    ]
    for backend in backends.values():
        backend.close()
    return found


def _measure_step(batch: PackedBatch, backends: Mapping[str, Any], num_turns: int) -> dict[str, Any]:
    seconds: dict[str, list[float]] = {way: [] for way in backends}
    for _ in range(num_turns):
        for way, backend in backends.items():
            began = time.process_time()
            backend.logprobs(batch)
            backend.update(batch, loss)
            seconds[way].append(time.process_time() - began)
    turns = zip(seconds["shared"], seconds["packed"], strict=True)
    return {
        "num_tokens": {way: measure_work(batch, is_shared=way == "shared").num_tokens for way in backends},
        "seconds": seconds,
        "ratio": statistics.median(packed / shared for shared, packed in turns),
    }


def _open(name: str, folder: Path, shared_prompt: Any) -> Any:
    section = LearnerSection(
        backend=name,
        shared_prompt=shared_prompt,
        lr=1e-7,  # both ways keep the same weights but for a little
        betas=(FIRST_MOMENT_DECAY, 0.999),
        grad_clip=NO_CLIPPING,
    )
    return BACKENDS[name](folder, section, Placement(), dtype="float32")


def table(results: dict[str, Any]) -> str:
    """Return the figures as text."""
    sizes = results["sizes"]
    answers = f"{sizes['group_size']} answers of {sizes['num_answer_tokens']} tokens"
    model = f"hidden size {sizes['hidden_size']}, {sizes['num_layers']} layers"
    lines = [f"a prox pass and an update of {answers}, {model}; processor time, one thread, float32"]
    for step in results["steps"]:
        tokens = step["num_tokens"]
        times = {way: statistics.median(found) for way, found in step["seconds"].items()}
        lines.append(
            f"{step['backend']}, prompt of {step['num_prompt_tokens']}: "
            f"once per row {tokens['packed']} tokens, {times['packed']:.2f} s; "
            f"once per group {tokens['shared']} tokens, {times['shared']:.2f} s; ratio {step['ratio']:.2f} "
            f"(gradients differ by {step['gradient_error']:.1e})"
        )
    return "\n".join(lines)


def check(results: dict[str, Any]) -> Verdict:
    """Return whether every target is met, and the worst ratio to a target as a sentence."""
    ratios: dict[str, float] = {}
    for step in results["steps"]:
        target = TARGETS[step["num_prompt_tokens"]]
        name = f"{step['backend']} prompt of {step['num_prompt_tokens']}"
        ratios[f"{name}, target {target:g}"] = step["ratio"] / target
        error = max(step["gradient_error"], 1e-12)
        ratios[f"{step['backend']} gradients, target {TARGET_GRADIENTS:g}"] = TARGET_GRADIENTS / error
    return judge(ratios)
