"""Cost and saving of differences between versions, and the share of the weights that changes in a step.

    python -m research.delta.study [--quick] [--json FILE] [--check] [--through-up]

First table: bfloat16 weights of which a share of the elements changed, anywhere; encoding and applying
against sending all of the bytes over bare gloo to one receiver in the same run. `break_even_mb_per_s` is
the rate of a network below which the difference arrives first. Second table: the share of elements whose
bits change from one published version to the next: Megatron's learner and AdamW, one update per step, on
made-up trajectories with random rewards; a model with the demo's shape and one of 25 M parameters.
`--through-up` measures the second table in real runs instead (`learning_runs`), minutes.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from asyncrl.core.config.tree import LearnerSection
from asyncrl.core.experience import Group
from benchmarks.harness.options import Verdict, judge, make_parser, report
from benchmarks.learner.inputs import make_trajectory, save_qwen3
from benchmarks.weight_sync.peers.gloo import BUCKETED, BareGroup
from learner.backend import Placement
from learner.batching.batch import PackedBatch, build_batch
from learner.megatron.backend import MegatronBackend
from research.delta import learning_runs
from weight_sync.encoding.choice import choose
from weight_sync.encoding.sparse import Bytes, decode

SHARES = (0.001, 0.01, 0.03, 0.1, 0.3, 0.5)
JUDGED_SHARE, MAX_SIZE = 0.03, 0.12
BUCKET_BYTES = 64 << 20
WIDTH = 2
NUM_STEPS = 4
CHANGES = (("bfloat16", 1e-6), ("bfloat16", 1e-5), ("bfloat16", 1e-4), ("float32", 1e-6), ("float32", 1e-4))
"""Dtypes and learning rates: 1e-6 is the learner's default, 1e-4 the demo's. The rest are its defaults."""


@dataclass(frozen=True)
class Shape:
    """Of a model."""

    hidden_size: int
    num_layers: int
    vocab_size: int


MODELS = {"demo": Shape(hidden_size=64, num_layers=2, vocab_size=32), "25 M": Shape(512, 7, 4096)}


def measure_sizes(num_bytes: int, rounds: int) -> list[dict[str, float]]:
    """Return one row per share of changed elements."""
    generator = np.random.default_rng(0)
    new = generator.integers(0, 256, num_bytes, dtype=np.uint8)
    whole_s = measure_whole(num_bytes, rounds)
    return [measure_share(share, new, generator, whole_s, rounds) for share in SHARES]


def measure_whole(num_bytes: int, rounds: int) -> float:
    """Return the seconds in which bare gloo brings all of the bytes to one receiver."""
    with closing(BareGroup(1, num_bytes, BUCKET_BYTES)) as group:
        return statistics.median([group.seconds(BUCKETED) for _ in range(rounds + 2)][2:])


def measure_share(
    share: float, new: Bytes, generator: np.random.Generator, whole_s: float, rounds: int
) -> dict[str, float]:
    """Return the figures of one share of changed elements."""
    old = new.copy()
    old.view(np.uint16)[generator.random(len(new) // WIDTH) < share] ^= 1
    target = old.copy()
    encode_s, apply_s = [], []
    for _ in range(rounds):
        began = time.perf_counter()
        sparse = choose(old, new, WIDTH)
        encoded = time.perf_counter()
        assert sparse is not None, f"a share of {share} gave no difference"
        np.copyto(target, old)
        decode(target, sparse)
        encode_s.append(encoded - began)
        apply_s.append(time.perf_counter() - encoded)
    assert sparse is not None and np.array_equal(target, new), "not exact"
    work_s = statistics.median(encode_s) + statistics.median(apply_s)
    size = len(sparse.data) / len(new)
    return {
        "share": share,
        "size": size,
        "encode_ms": 1e3 * statistics.median(encode_s),
        "apply_ms": 1e3 * statistics.median(apply_s),
        "whole_ms": 1e3 * whole_s,
        "delta_ms": 1e3 * (work_s + size * whole_s),
        "break_even_mb_per_s": (1 - size) * len(new) / work_s / 1e6,
    }


def measure_changes(name: str, dtype: str, learning_rate: float, folder: Path) -> dict[str, Any]:
    """Return how much of what a learner publishes changes with a step; the model lies in `folder`."""
    backend = MegatronBackend(folder, LearnerSection(lr=learning_rate), Placement(), dtype=dtype)
    shares, before = [], read_bits(backend)
    for step in range(NUM_STEPS):
        backend.update(make_batch(MODELS[name], step), policy_gradient)
        after = read_bits(backend)
        shares.append(float((after != before).float().mean()))
        before = after
    backend.close()
    row = {"model": name, "elements": len(before), "dtype": dtype, "learning_rate": learning_rate}
    return row | {"changed_first": shares[0], "changed_later": statistics.mean(shares[1:])}


def policy_gradient(
    logprobs_N: torch.Tensor, entropy_N: torch.Tensor, part: PackedBatch
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return REINFORCE's loss, with the reward, a normal number, as the advantage."""
    weight_N = part.rewards_R[part.row_N] * part.loss_mask_N
    return -(weight_N * logprobs_N).sum() / part.totals.num_tokens, {}


def make_batch(shape: Shape, seed: int) -> PackedBatch:
    """Return 8 made-up trajectories of 64 tokens in groups of two."""
    generator = np.random.default_rng(seed)
    groups = [
        Group(
            ticket=ticket,
            attempt=0,
            prompt_ids=generator.integers(0, shape.vocab_size, 16).astype(np.int32),
            trajectories=tuple(make_trajectory(generator, 48, shape.vocab_size) for _ in range(2)),
        )
        for ticket in range(4)
    ]
    return build_batch(groups, 0, {1: 0})


def read_bits(backend: MegatronBackend) -> torch.Tensor:
    """Return all that would be published, as whole numbers of the same width: bits decide."""
    weights = torch.cat([tensor.detach().reshape(-1) for _, tensor in backend.named_tensors()])
    return weights.view(torch.int16 if weights.dtype is torch.bfloat16 else torch.int32)


def save_model(shape: Shape, folder: Path) -> Path:
    """Write a model of random weights of the usual size, 0.02, and norms of one."""
    heads = max(1, shape.hidden_size // 64)
    save_qwen3(
        folder,
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=3 * shape.hidden_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=shape.hidden_size // heads,
        tie_word_embeddings=True,
    )
    return folder


def make_table(results: Mapping[str, Any]) -> str:
    """Return both tables."""
    return "\n\n".join(_table(results[name], _FORMATS) for name in ("sizes", "changes"))


_FORMATS: dict[str, Callable[[Any], str]] = {
    "share": "{:.1%}".format,
    "size": "{:.1%}".format,
    "learning_rate": "{:g}".format,
    "changed_first": "{:.2%}".format,
    "changed_later": "{:.2%}".format,
    "changed_median": "{:.2%}".format,
    "changed_min": "{:.2%}".format,
    "changed_max": "{:.2%}".format,
    "elements": "{:,}".format,
    "model": str,
    "dtype": str,
}


def _table(rows: list[dict[str, Any]], formats: Mapping[str, Callable[[Any], str]]) -> str:
    lines = ["| " + " | ".join(rows[0]) + " |", "|---" * len(rows[0]) + "|"]
    for row in rows:
        lines.append("| " + " | ".join(formats.get(key, "{:.0f}".format)(row[key]) for key in row) + " |")
    return "\n".join(lines)


def check(results: Mapping[str, Any]) -> Verdict:
    """Judge the bytes at 3 % against 12 % of all of them."""
    return judge(
        {
            f"bytes at {row['share']:.0%} changed": MAX_SIZE / row["size"]
            for row in results["sizes"]
            if row["share"] == JUDGED_SHARE
        }
    )


def measure_models(names: Sequence[str]) -> list[dict[str, Any]]:
    """Return a row per model, dtype and learning rate."""
    changes = []
    for name in names:
        with tempfile.TemporaryDirectory(prefix="asyncrl-bench-") as folder:
            model = save_model(MODELS[name], Path(folder))
            changes += [measure_changes(name, dtype, rate, model) for dtype, rate in CHANGES]
    return changes


def main(arguments: Sequence[str]) -> int:
    """Measure as the command line says and return the exit code."""
    parser = make_parser("research.delta.study", __doc__, "16 MB, the demo's model only")
    parser.add_argument("--through-up", action="store_true", help="real runs instead of made-up ones")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    num_bytes, rounds = (16 << 20, 3) if given.quick else (64 << 20, 7)
    if given.through_up:
        runs = learning_runs.RUNS[:1] if given.quick else learning_runs.RUNS
        changes = [learning_runs.measure(run, print) for run in runs]
    else:
        changes = measure_models(["demo"] if given.quick else list(MODELS))
    results = {"sizes": measure_sizes(num_bytes, rounds), "changes": changes}
    return report(given, results, make_table, check)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
