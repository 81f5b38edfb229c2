"""Packed rows in dynamic microbatches against padded rows: tokens per second of whole updates.

Both ways do the same updates with the same model, backend and microbatch budget on one batch whose
response lengths are log-normal; the padded way stretches every row to the longest. Updates alternate
in one process. Only real tokens count. The gradients of the first update are compared: padding must
change nothing but the time.
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

from asyncrl.core.config.tree import LearnerSection
from asyncrl.core.experience import Group
from benchmarks.harness.options import Verdict, judge, make_parser, report
from benchmarks.learner.inputs import loss, make_trajectory, save_qwen3
from learner.backend import Placement
from learner.batching.batch import PackedBatch, build_batch
from learner.megatron.backend import MegatronBackend

SIGMA, MEDIAN_TOKENS, NUM_PROMPT_TOKENS = 1.0, 64, 16
FIRST_MOMENT_DECAY = 0.9
NO_CLIPPING = 1e9
TARGET_SPEED_UP, TARGET_ERROR = 2.0, 1e-5


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of the measurement; lengths are cut at `max_response_tokens`."""

    num_groups: int = 8
    group_size: int = 8
    max_response_tokens: int = 1008
    max_tokens_per_microbatch: int = 4096
    hidden_size: int = 128
    num_layers: int = 4
    vocab_size: int = 2048
    num_updates: int = 5


QUICK = Sizes(group_size=4, hidden_size=64, num_layers=2, vocab_size=512, num_updates=3)


def main(arguments: Sequence[str]) -> int:
    """Measure as the command line says and return the exit code."""
    parser = make_parser("asyncrl bench packing", __doc__, quick="a smaller model and batch: under a minute")
    given = parser.parse_args(arguments)
    results = measure(QUICK if given.quick else Sizes()) | {"quick": given.quick}
    return report(given, results, table, check)


def measure(sizes: Sizes) -> dict[str, Any]:
    """Run the updates of both ways and return all figures."""
    packed = make_batch(sizes)
    batches = {"packed": packed, "padded": pad_rows(packed)}
    with tempfile.TemporaryDirectory(prefix="asyncrl-bench-") as folder:
        _save_model(Path(folder), sizes)
        backends = {way: _open_backend(Path(folder), sizes) for way in batches}
        for way, backend in backends.items():  # also warms up
            backend.update(batches[way], loss)
        gradients = {way: read_gradients(backend) for way, backend in backends.items()}
        seconds: dict[str, list[float]] = {way: [] for way in batches}
        for _ in range(sizes.num_updates):
            for way, backend in backends.items():
                began = time.perf_counter()
                backend.update(batches[way], loss)
                seconds[way].append(time.perf_counter() - began)
        for backend in backends.values():
            backend.close()
    speeds = {way: packed.num_tokens / statistics.median(found) for way, found in seconds.items()}
    return {
        "benchmark": "packing",
        "machine": {"processor": platform.machine(), "python": platform.python_version()},
        "sizes": dataclasses.asdict(sizes),
        "lengths": f"log-normal: sigma {SIGMA}, median {MEDIAN_TOKENS}, prompts {NUM_PROMPT_TOKENS}",
        "num_rows": packed.num_rows,
        "num_tokens": packed.num_tokens,
        "num_padded_tokens": batches["padded"].num_tokens,
        "seconds": seconds,
        "tokens_per_s": speeds,
        "speed_up": speeds["packed"] / speeds["padded"],
        "gradient_error": compare(gradients["packed"], gradients["padded"]),
    }


def make_batch(sizes: Sizes, seed: int = 0) -> PackedBatch:
    """Return groups whose response lengths are log-normal, packed."""
    generator = np.random.default_rng(seed)
    groups = []
    for ticket in range(sizes.num_groups):
        drawn = MEDIAN_TOKENS * np.exp(SIGMA * generator.standard_normal(sizes.group_size))
        lengths = np.clip(drawn.round(), 1, sizes.max_response_tokens).astype(int)
        prompt_ids = generator.integers(0, sizes.vocab_size, NUM_PROMPT_TOKENS).astype(np.int32)
        trajectories = tuple(make_trajectory(generator, int(length), sizes.vocab_size) for length in lengths)
        groups.append(Group(ticket=ticket, attempt=0, prompt_ids=prompt_ids, trajectories=trajectories))
    return build_batch(groups, 0, {1: 0})


def pad_rows(batch: PackedBatch) -> PackedBatch:
    """Return the batch with every row stretched to the longest, by positions that train nothing."""
    longest = max(batch.row_lengths)
    starts = torch.tensor(batch.cu_seqlens[:-1])
    columns_N = torch.arange(batch.num_tokens) - starts[batch.row_N]
    target_N = batch.row_N * longest + columns_N
    padded: dict[str, Any] = {}
    for field in dataclasses.fields(batch):
        value = getattr(batch, field.name)
        if field.name.endswith("_N") and value is not None:
            padded[field.name] = value.new_zeros(batch.num_rows * longest)
            padded[field.name][target_N] = value
    padded["row_N"] = torch.arange(batch.num_rows).repeat_interleave(longest)
    cu_seqlens = tuple(range(0, (batch.num_rows + 1) * longest, longest))
    return dataclasses.replace(batch, **padded, cu_seqlens=cu_seqlens)


def read_gradients(backend: MegatronBackend) -> dict[str, torch.Tensor]:
    """Return the gradient of the only update so far: AdamW's first moment is a fixed share of it."""
    pieces = backend.snapshot_state().pieces
    return {
        f"{state.piece.name}{state.piece.rows}{state.piece.columns}": state.values["exp_avg"].clone()
        / (1 - FIRST_MOMENT_DECAY)
        for state in pieces
    }


def compare(ours: Mapping[str, torch.Tensor], reference: Mapping[str, torch.Tensor]) -> float:
    """Return the largest difference of two gradients, relative to the largest entry of each tensor."""
    assert ours.keys() == reference.keys(), "the two ways hold different parameters"
    return max(
        float((tensor - reference[name]).abs().max() / reference[name].abs().max().clamp(min=1e-12))
        for name, tensor in ours.items()
    )


def _open_backend(folder: Path, sizes: Sizes) -> MegatronBackend:
    section = LearnerSection(
        lr=1e-5,
        betas=(FIRST_MOMENT_DECAY, 0.999),
        grad_clip=NO_CLIPPING,
        max_tokens_per_microbatch=sizes.max_tokens_per_microbatch,
    )
    return MegatronBackend(folder, section, Placement(), dtype="float32")


def _save_model(folder: Path, sizes: Sizes) -> None:
    save_qwen3(
        folder,
        vocab_size=sizes.vocab_size,
        hidden_size=sizes.hidden_size,
        intermediate_size=3 * sizes.hidden_size,
        num_hidden_layers=sizes.num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=sizes.hidden_size // 4,
        max_position_embeddings=2048,
    )


def table(results: dict[str, Any]) -> str:
    """Return the figures as text, the speed-up last."""
    counts = {"packed": results["num_tokens"], "padded": results["num_padded_tokens"]}
    budget = results["sizes"]["max_tokens_per_microbatch"]
    lines = [f"{results['num_rows']} rows; {results['lengths']}; {budget} tokens per microbatch"]
    for way, count in counts.items():
        seconds = statistics.median(results["seconds"][way])
        speed = results["tokens_per_s"][way]
        lines.append(f"{way}: {count} positions, {seconds:.2f} s per update, {speed:.0f} real tokens/s")
    lines.append(f"largest difference of the gradients: {results['gradient_error']:.1e}")
    lines.append(f"speed-up of packed over padded: {results['speed_up']:.2f}")
    return "\n".join(lines)


def check(results: dict[str, Any]) -> Verdict:
    """Return whether every target is met, and the worst ratio to a target as a sentence."""
    ratios = {
        f"speed-up, target {TARGET_SPEED_UP:g}": results["speed_up"] / TARGET_SPEED_UP,
        f"gradients, target {TARGET_ERROR:g}": TARGET_ERROR / max(1e-12, results["gradient_error"]),
    }
    return judge(ratios)
