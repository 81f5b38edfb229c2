"""`asyncrl eval`: a model's answers to held-out prompts, without a run; as a table or JSON."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from asyncrl.cli.exits import say, show
from asyncrl.cli.reports.table import align
from asyncrl.control.machine.resources import count_gpus
from asyncrl.core.config.load import find_run_folder, load_config, load_resolved
from asyncrl.core.config.tree import Config
from asyncrl.core.errors import ConfigError
from asyncrl.core.metrics.tallies import HIGH, LOW
from asyncrl.core.variants import function
from asyncrl.planner.plan.prepare import MODEL_FILE, is_builtin, is_model, make_builtin, prepare
from asyncrl.planner.plan.sources import check_sources

DTYPES = ("float32", "bfloat16", "float16")
DEFAULT_TOKENS = 1024
"""Of an answer to a model that stands alone, if it can see twice as many; of a prompt twice that."""
ALL_PROMPTS = 1 << 30


@dataclass(frozen=True)
class Wishes:
    """Options of the command line; None keeps the run's value, or the default."""

    data: Sequence[str] = ()
    reward: str | None = None
    samples: int | None = None
    temperature: float | None = None
    prompts: int | None = None
    max_tokens: int | None = None
    max_prompt_tokens: int | None = None

    def overrides(self) -> list[str]:
        """Return them in the form of `--set`."""
        values = {
            "data.eval": list(self.data) or None,
            "eval.samples": self.samples,
            "eval.temperature": self.temperature,
            "eval.prompts": self.prompts,
            "rollout.max_tokens": self.max_tokens,
            "data.max_prompt_tokens": self.max_prompt_tokens,
        }
        found = [f"{key}={json.dumps(value)}" for key, value in values.items() if value is not None]
        if self.reward is not None:
            is_section = self.reward.startswith("{")
            found.append(f"reward.fn={self.reward if is_section else json.dumps(self.reward)}")
        return found


def print_evaluation(target: str, runs_dir: str, step: str, wishes: Wishes, as_json: bool) -> None:
    """Evaluate a model folder, or a checkpoint of a run, and print what came out.

    Raises:
        ConfigError: There is no such model, run or checkpoint, or the data or the reward cannot be used.
    """
    with tempfile.TemporaryDirectory(prefix="asyncrl-eval-") as scratch:
        config = read_target(target, runs_dir, step, wishes, Path(scratch))
        with talk_on_stderr():
            metrics = function("rollout_service.evaluation.standalone:evaluate_model")(config)
    if as_json:
        print(json.dumps({"target": target, "metrics": metrics}, indent=2))
        return
    show(*table_of(metrics))


@contextlib.contextmanager
def talk_on_stderr() -> Iterator[None]:
    """Send what this process and its children write to stdout to stderr: vLLM logs there."""
    sys.stdout.flush()
    kept = os.dup(1)
    try:
        os.dup2(2, 1)
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


def read_target(target: str, runs_dir: str, step: str, wishes: Wishes, scratch: Path) -> Config:
    """Return a configuration whose model and held-out data are those to evaluate.

    Args:
        scratch: An empty folder, which a run's checkpoint is written to.
    """
    if is_model(target):
        config = _read_model(target, runs_dir, wishes, scratch)
    else:
        config = _read_run(target, runs_dir, step, wishes, scratch)
    held_out, has_environment = config.data.model_copy(update={"train": ()}), config.rollout.environment
    problems = list(check_sources(held_out, Path(config.model.path), is_builtin, has_environment is not None))
    if problems:
        raise ConfigError("\n".join(problems))
    gpus = min(config.rollout.gpus or 1, count_gpus())
    return config.model_copy(update={"rollout": config.rollout.model_copy(update={"gpus": gpus})})


def _read_model(target: str, runs_dir: str, wishes: Wishes, scratch: Path) -> Config:
    missing = [name for name, value in (("--data", wishes.data), ("--reward", wishes.reward)) if not value]
    if missing:
        raise ConfigError(f"a model folder alone says no {' and no '.join(missing)}", hint="Give both")
    folder = make_builtin(target, Path(runs_dir) / "builtin", say) if is_builtin(target) else Path(target)
    table = _read_table(folder)
    max_tokens = wishes.max_tokens or min(DEFAULT_TOKENS, _positions(table) // 2)
    values = {
        "run": {"dir": runs_dir},
        "model": {"path": str(folder), "dtype": _dtype(table)},
        "data": {
            "train": list(wishes.data),
            "max_prompt_tokens": max(1, min(2 * DEFAULT_TOKENS, _positions(table) - max_tokens)),
        },
        "rollout": {"max_tokens": max_tokens},
        "eval": {"prompts": ALL_PROMPTS},
    }
    file = scratch / "eval.yaml"
    file.write_text(json.dumps(values))
    return prepare(load_config(file, wishes.overrides()), say)


def _read_run(target: str, runs_dir: str, step: str, wishes: Wishes, scratch: Path) -> Config:
    folder = find_run_folder(target, runs_dir)
    config = load_resolved(folder, wishes.overrides())
    if config.data.eval is None:
        raise ConfigError(f"run '{folder.name}' has no data.eval", hint="Name prompts with --data")
    config = prepare(config, say)
    exported = function("learner.checkpoint.export:export_run")(target, runs_dir, step, scratch / "model")
    return config.model_copy(update={"model": config.model.model_copy(update={"path": str(exported)})})


def _read_table(folder: Path) -> Mapping[str, object]:
    try:
        table = json.loads((folder / MODEL_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder}: {MODEL_FILE} cannot be read: {error}") from error
    if not isinstance(table, dict):
        raise ConfigError(f"{folder}: {MODEL_FILE} holds no object")
    return table


def _dtype(table: Mapping[str, object]) -> str:
    """Return the dtype that a model names, `bfloat16` if it names none of ours."""
    named = table.get("dtype") or table.get("torch_dtype")
    return named if isinstance(named, str) and named in DTYPES else "bfloat16"


def _positions(table: Mapping[str, object]) -> int:
    """Return how many tokens a model can see at once, as far as it says."""
    size = table.get("max_position_embeddings")
    return size if isinstance(size, int) and size > 1 else 4 * DEFAULT_TOKENS


def table_of(metrics: dict[str, float]) -> list[str]:
    """Return the metrics as lines: name, value and 95 % interval."""
    rows = [("metric", "value", "95 % interval")]
    for name, value in metrics.items():
        if not name.startswith("val-") or name.rpartition("/")[2] in (LOW, HIGH):
            continue
        bounds = [metrics[key] for key in (f"{name}/{LOW}", f"{name}/{HIGH}") if key in metrics]
        interval = f"{bounds[0]:.4f} to {bounds[1]:.4f}" if bounds else "-"
        rows.append((name, f"{value:.4f}".rstrip("0").rstrip("."), interval))
    return align(rows)
