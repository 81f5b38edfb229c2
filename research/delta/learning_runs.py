"""Share of weight elements that changes in a step of real runs: vLLM, rewards, learner and all.

Owns the runs: `asyncrl up` as the shipped `quickstart`, with another dtype, rate or model, a checkpoint after
every step. A run publishes its checkpoint in the run's dtype, so checkpoints are compared.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from asyncrl.core.config.load import load_config
from benchmarks.fleet.parts.whole_run import run_to_end
from benchmarks.learner.inputs import save_qwen3
from configs import shipped
from learner.checkpoint.reader import StateReader
from learner.checkpoint.store import CheckpointStore
from learner.numerics.precision import DTYPES
from rollout_service.tasks.digit_sort.folder import make_folder
from rollout_service.tasks.digit_sort.vocabulary import VOCABULARY, build_tokenizer

REWARD = '''
def share_of_digits(response, ground_truth):
    """Return the share of places that hold the right digit: a model of random weights can learn from it."""
    return sum(a == b for a, b in zip(response, ground_truth)) / len(ground_truth)
'''


@dataclass(frozen=True)
class LearningRun:
    """One run: which model, in which dtype, at which learning rate, for how many steps."""

    model: str
    dtype: str
    learning_rate: float
    num_steps: int
    groups_per_step: int


RUNS = (
    LearningRun("demo", "bfloat16", 1e-6, 12, 16),
    LearningRun("demo", "bfloat16", 1e-4, 12, 16),
    LearningRun("demo", "float32", 1e-4, 12, 16),
    LearningRun("25 M", "bfloat16", 1e-6, 8, 8),
    LearningRun("25 M", "bfloat16", 1e-5, 8, 8),
)


def measure(learning_run: LearningRun, say: Callable[[str], None]) -> dict[str, Any]:
    """Do the run and return the share of elements whose bits change from one step to the next.

    Raises:
        ServiceFailed: The run failed, or did not end.
    """
    with tempfile.TemporaryDirectory(prefix="asyncrl-bench-") as scratch:
        task = make_folder(Path(scratch) / "task")
        model = task if learning_run.model == "demo" else save_large(Path(scratch) / "model")
        config = load_config(shipped()["quickstart"], settings_of(learning_run, task, model, Path(scratch)))
        folder = run_to_end(config, say)
        store = CheckpointStore(folder.path / "checkpoints", learning_run.num_steps + 1, 1)
        dtype = DTYPES[learning_run.dtype]
        shares = [share_changed(old, new, dtype) for old, new in pairwise(read_versions(store))]
        num_elements = sum(shape.numel() for shape in _shapes(store))
    return {
        "model": learning_run.model,
        "elements": num_elements,
        "dtype": learning_run.dtype,
        "learning_rate": learning_run.learning_rate,
        "changed_median": statistics.median(shares),
        "changed_min": min(shares),
        "changed_max": max(shares),
    }


def settings_of(learning_run: LearningRun, task: Path, model: Path, scratch: Path) -> list[str]:
    """Return the `--set` values of the run."""
    reward = scratch / "reward.py"
    reward.write_text(REWARD)
    values = {
        "run.name": "changes",
        "run.dir": scratch,
        "model.path": model,
        "model.dtype": learning_run.dtype,
        "data.train": task / "train.parquet",
        "data.eval": task / "eval.parquet",
        "reward.fn": f"{reward}:share_of_digits",
        "rollout.replicas": 1,
        "learner.lr": learning_run.learning_rate,
        "learner.lr_schedule": "constant",
        "learner.warmup_steps": 0,
        "learner.groups_per_step": learning_run.groups_per_step,
        "learner.minibatches": 1,
        "learner.steps": learning_run.num_steps,
        "eval.every_steps": 0,
        "checkpoint.every_steps": 1,
        "checkpoint.keep": learning_run.num_steps + 1,
        "buffer.journal": "none",
    }
    return [f"{key}={value}" for key, value in values.items()]


def save_large(folder: Path) -> Path:
    """Write a model of random weights and 25 million parameters that speaks the demo's vocabulary."""
    save_qwen3(
        folder,
        vocab_size=len(VOCABULARY),
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=64,
        tie_word_embeddings=True,
    )
    build_tokenizer().save_pretrained(folder)
    return folder


def read_versions(store: CheckpointStore) -> Iterator[torch.Tensor]:
    """Yield the weights of each checkpoint in order, flat."""
    for step in store.steps():
        with StateReader(store.folder(step)) as reader:
            yield torch.cat([reader.read_whole(name).reshape(-1) for name in reader.shapes])


def share_changed(old: torch.Tensor, new: torch.Tensor, dtype: torch.dtype) -> float:
    """Return the share of elements whose bits differ, once both are in `dtype`, as they are published."""
    bits = torch.int16 if dtype is torch.bfloat16 else torch.int32
    return float((old.to(dtype).view(bits) != new.to(dtype).view(bits)).float().mean())


def _shapes(store: CheckpointStore) -> list[torch.Size]:
    with StateReader(store.folder(store.steps()[-1])) as reader:
        return [torch.Size(shape) for shape in reader.shapes.values()]
