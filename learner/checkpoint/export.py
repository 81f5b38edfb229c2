"""`asyncrl export`: a checkpoint of a run as a Hugging Face folder, without starting anything.

Reads checkpoints of any backend and any number of ranks. Must never touch the
run. Invariant: the folder appears whole, or not at all.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch

from asyncrl.core.config.load import find_run_folder, load_resolved
from asyncrl.core.config.tree import LoraSection
from asyncrl.core.errors import ConfigError
from learner.checkpoint.reader import StateReader
from learner.checkpoint.store import CheckpointStore
from learner.lora.folder import save_adapter, save_merged
from learner.numerics.precision import DTYPES

NEWEST, BEST = "newest", "best"


def export_run(
    run: str, runs_dir: str, step: str, to: Path | None = None, *, has_adapter: bool = False
) -> Path:
    """Write the weights of a checkpoint, in the run's dtype, and return their folder.

    Args:
        has_adapter: Write the adapters of `model.lora` alone, in float32 as PEFT does; else they are merged.
        run: Name below `runs_dir`, or a path.
        step: A step, `newest`, or `best`.
        to: Must not exist, or be empty; by default `export/step-<n>` in the run's folder.

    Raises:
        ConfigError: There is no such run, checkpoint, or model; or `to` is in use.
        CheckpointError: The checkpoint is torn, altered, or of a format that is not read.
    """
    folder = find_run_folder(run, runs_dir)
    config = load_resolved(folder)
    source = Path(config.model.path)
    if not (source / "config.json").is_file():
        raise ConfigError(
            f"{source}, the model that run '{folder.name}' began with, is gone",
            hint="Its config and tokenizer go into the export: bring it back, or correct model.path in "
            f"{folder / 'resolved.yaml'}",
        )
    store = CheckpointStore(
        folder / "checkpoints", config.checkpoint.keep, max(1, config.checkpoint.keep_best)
    )
    number = find_step(store, step, folder)
    lora = config.model.lora
    if has_adapter and not lora.rank:
        raise ConfigError(
            f"run '{folder.name}' trains all weights, and has no adapter", hint="Leave out --adapter"
        )
    target = to or folder / "export" / f"step-{number:08d}"
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{target} exists", hint="Name a folder that is not there yet with --to")
    store.verify_whole(number)
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        if has_adapter:
            with StateReader(store.folder(number)) as reader:
                save_adapter(config.model.path, partial, _tensors(reader, torch.float32), lora)
        else:
            export_state(store.folder(number), source, partial, DTYPES[config.model.dtype], lora)
        partial.replace(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return target


def export_state(
    state: Path, source: Path, target: Path, dtype: torch.dtype, lora: LoraSection | None = None
) -> None:
    """Write the model of the `state` folder as a Hugging Face folder with the side files of `source`."""
    with StateReader(state) as reader:
        save_merged(source, target, _tensors(reader, dtype), dtype, lora or LoraSection())


def find_step(store: CheckpointStore, step: str, folder: Path) -> int:
    """Return the step that `step` means. Raises ConfigError if it has no checkpoint."""
    steps = store.steps()
    if not steps:
        raise ConfigError(
            f"run '{folder.name}' has no checkpoint yet",
            hint="It writes one every checkpoint.every_steps, and when it ends",
        )
    if step == NEWEST:
        return steps[-1]
    if step == BEST:
        if not (best := store.best()):
            raise ConfigError(
                f"no checkpoint of run '{folder.name}' has a score", hint="Set checkpoint.keep_best"
            )
        return best[0]
    if not step.isascii() or not step.isdigit() or int(step) not in steps:
        raise ConfigError(
            f"run '{folder.name}' has no checkpoint of step '{step}'",
            hint=f"There are: {', '.join(map(str, steps))}",
        )
    return int(step)


def _tensors(reader: StateReader, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    for name in reader.shapes:
        yield name, reader.read_whole(name).to(dtype)
