"""Replay of recorded steps on a GPU bit for bit, and the distance of bfloat16's log-probs from float32's.

Run: `python -m benchmarks.gpu.exactness replay --check`, or `gap`. `replay` records steps of ragged rows as a
run does, has `asyncrl replay` train them, takes its metrics and weights as the record, and has it train them
again: nothing may differ. `gap` computes log-probs of the same rows with the same weights in both dtypes; it
is told, not judged, and random weights have less of it than trained ones. `--quick` is for any machine. Not
run on a GPU.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import torch

from asyncrl.core.config.load import dump_resolved
from asyncrl.core.config.tree import Config
from benchmarks.gpu.frame import make_part_parser, run_part
from benchmarks.gpu.learner import Work, make_batch, make_config, make_groups, save_model
from benchmarks.harness.options import Verdict, judge
from benchmarks.harness.rows import Row
from benchmarks.learner.inputs import QWEN3
from learner.backend import Placement
from learner.batching.batch import PackedBatch
from learner.composition import open_policy
from learner.orders import Adjust, Train
from learner.record.batch_store import FOLDER, BatchStore, RecordedStep, RecordedWeights
from learner.record.comparison import WEIGHTS, Comparison
from learner.record.replay import replay_run
from learner.record.settings import settings_of

NUM_STEPS, LR = 3, 1e-4
"""A rate that bfloat16's weights feel."""
UNKNOWN = "not trained yet"


def main(arguments: Sequence[str]) -> int:
    """Measure as the command line says and return the exit code."""
    parser = make_part_parser("exactness", __doc__)
    parser.add_argument("measurement", choices=("replay", "gap"))
    parser.add_argument("--model", choices=QWEN3, default="0.6B")
    given = parser.parse_args(arguments)
    work = Work("tiny", "float32", 128, 2, 0) if given.quick else Work(given.model, "bfloat16", 8192, 2, 0)
    if given.measurement == "replay":
        return run_part(given, lambda: [measure_replay(work)], check)
    return run_part(given, lambda: [measure_gap(work)])


def measure_replay(work: Work) -> Row:
    """Return the numbers of what was compared, and of what differs."""
    with tempfile.TemporaryDirectory(prefix="asyncrl-bench-") as name:
        model, run = Path(name, "model"), Path(name, "run")
        save_model(model, work.model, work.dtype)
        config = make_config(model, work, int(torch.cuda.is_available()), lr=LR, deterministic="true")
        batch_store = record(run, config, work)
        take_over(batch_store, replay_run(str(run), name))
        again = replay_run(str(run), name)
    differences = [found for step in again.steps for found in step.differences]
    for found in differences:
        print(found, file=sys.stderr)
    values = {
        "steps": float(len(again.steps)),
        "metrics": float(sum(step.num_metrics for step in again.steps)),
        "weights": float(sum(step.has_weights for step in again.steps)),
        "different_metrics": float(sum(step.num_different for step in again.steps)),
        "different_weights": float(sum(found.name == WEIGHTS for found in differences)),
    }
    return Row.of("gpu.replay", {"model": work.model, "dtype": work.dtype}, values)


def record(run: Path, config: Config, work: Work) -> BatchStore:
    """Make the folder of a run that has recorded its batches, but not yet what came of them."""
    batch_store = BatchStore(run / FOLDER)
    batch_store.folder.mkdir(parents=True)
    (run / "resolved.yaml").write_text(dump_resolved(config))
    for step in range(NUM_STEPS):
        groups = make_groups(work, "ragged", QWEN3[work.model]["vocab_size"], step)
        counts = {group.ticket: group.num_tokens for group in groups}
        order = Train(step, 1, list(counts), list(counts.values()), [(1, step)])
        settings = settings_of(config)
        batch_store.write(
            RecordedStep(order, Adjust(1.0, False), groups, {}, config.run.seed, settings=settings)
        )
        batch_store.write_weights(RecordedWeights(step + 1, UNKNOWN, config.weight_sync.bucket_bytes))
    return batch_store


def take_over(batch_store: BatchStore, first: Comparison) -> None:
    """Put the results of the first replay into the record, as those of the run."""
    digests = {found.replayed for step in first.steps for found in step.differences if found.name == WEIGHTS}
    assert len(digests) == NUM_STEPS, "each step has changed the weights"
    for compared in first.steps:
        found = {difference.name: difference.replayed for difference in compared.differences}
        weights = batch_store.read_weights(compared.step + 1)
        assert weights is not None, "they were recorded as unknown"
        batch_store.write_weights(replace(weights, digest=str(found.pop(WEIGHTS))))
        metrics = {name: value for name, value in found.items() if isinstance(value, float)}
        batch_store.write(replace(batch_store.read(compared.step, 0), metrics=metrics))


def measure_gap(work: Work) -> Row:
    """Return how far bfloat16's log-probs and entropies of the same weights are from float32's."""
    with tempfile.TemporaryDirectory(prefix="asyncrl-bench-") as name:
        model = Path(name)
        save_model(model, work.model, "bfloat16")
        batch = make_batch(work, "ragged", QWEN3[work.model]["vocab_size"])
        outputs = [compute(model, replace(work, dtype=dtype), batch) for dtype in ("bfloat16", "float32")]
    (near_N, near_entropy_N), (true_N, true_entropy_N) = outputs
    gap_N = near_N - true_N
    values = {
        "tokens": float(len(gap_N)),
        "logprob_mean": float(true_N.mean()),
        "gap_mean": float(gap_N.mean()),
        "gap_abs_mean": float(gap_N.abs().mean()),
        "gap_abs_p99": float(gap_N.abs().quantile(0.99)),
        "gap_abs_max": float(gap_N.abs().max()),
        "kl_k3": float((gap_N.exp() - 1 - gap_N).mean()),
        "entropy_gap_abs_mean": float((near_entropy_N - true_entropy_N).abs().mean()),
    }
    return Row.of("gpu.gap", {"model": work.model}, values)


def compute(model: Path, work: Work, batch: PackedBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log-probs and entropies of the trained tokens."""
    config = make_config(model, work, gpus=int(torch.cuda.is_available()))
    with closing(open_policy(config, Placement(), is_frozen=True)) as backend:
        logprobs_N, entropy_N = backend.logprobs(batch)
    is_trained_N = batch.loss_mask_N.bool()
    return logprobs_N[is_trained_N].float(), entropy_N[is_trained_N].float()


def check(rows: Sequence[Row]) -> Verdict:
    """Judge the replay: nothing differs, or something does."""
    values = rows[0].values
    num_different = values["different_metrics"] + values["different_weights"]
    return judge({f"{num_different:.0f} metrics and weights differ, target none": float(not num_different)})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
