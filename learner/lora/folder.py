"""Adapters on disk: a model's folder with them merged, and the folders that PEFT reads and writes.

Must never hold a whole model: merged tensors are made one by one. Invariant: what is written is what engines
compute with, by the same merge.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch

from asyncrl.core.config.tree import LoraSection
from asyncrl.core.errors import ConfigError
from learner.checkpoint.pretrained import PretrainedTensors, write_folder
from learner.checkpoint.tensor_file import write_tensors
from weight_sync.encoding.low_rank import merge_factors

ADAPTER, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
PREFIX = "base_model.model."
"""Of PEFT's names, before those of the model's files."""
OTHER_KINDS = (
    *("use_rslora", "use_dora", "fan_in_fan_out", "lora_bias", "bias", "modules_to_save", "rank_pattern"),
    *("alpha_pattern", "layers_to_transform", "layer_replication", "trainable_token_indices"),
)
"""Settings of PEFT under which factors mean something else, or are not all that is trained."""
NOTHING: tuple[object, ...] = (None, False, "none", {}, [])
"""Values of theirs under which they do nothing."""
Tensors = Iterable[tuple[str, torch.Tensor]]


def save_merged(source: Path, target: Path, tensors: Tensors, dtype: torch.dtype, lora: LoraSection) -> None:
    """Write the model of `tensors` as a Hugging Face folder; factors go into the matrices of `source`."""
    if lora.rank:
        tensors = _merged(source, {name: one.clone() for name, one in tensors}, dtype, lora)
    write_folder(source, target, tensors, dtype)


def save_adapter(base: str, target: Path, factors: Tensors, lora: LoraSection) -> None:
    """Write `factors` as PEFT does, for its `PeftModel.from_pretrained` or an engine that serves adapters.

    Args:
        base: The model that they belong to, a folder or a hub id.
    """
    target.mkdir(parents=True, exist_ok=True)
    named = {PREFIX + name: tensor.contiguous().cpu() for name, tensor in factors}
    write_tensors(target / ADAPTER, named, {"format": "pt"})
    table = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": int(lora.alpha) if lora.alpha.is_integer() else lora.alpha,
        "target_modules": list(lora.targets),
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }
    (target / ADAPTER_CONFIG).write_text(json.dumps(table, indent=2) + "\n")


def open_adapter(folder: Path, lora: LoraSection) -> PretrainedTensors:
    """Return the tensors of the PEFT adapter in `folder`, by PEFT's names.

    Raises:
        ConfigError: There is none, it is not the one that `lora` describes, or its kind is not trained here.
    """
    try:
        table = json.loads((folder / ADAPTER_CONFIG).read_text())
    except (OSError, ValueError) as error:
        hint = "Name a folder that PEFT's save_pretrained has written"
        raise ConfigError(f"model.lora.path: {folder / ADAPTER_CONFIG}: {error}", hint=hint) from error
    wanted = {"r": lora.rank, "lora_alpha": lora.alpha, "target_modules": sorted(lora.targets)}
    found = {name: table.get(name) for name in wanted}
    if isinstance(found["target_modules"], list):
        found["target_modules"] = sorted(found["target_modules"])
    if found != wanted:
        names = ("model.lora.rank", "model.lora.alpha", "model.lora.targets")
        told = ", ".join(f"{name}: {value}" for name, value in zip(names, found.values(), strict=True))
        raise ConfigError(f"model.lora.path: {folder} is another adapter", hint=f"It has {told}")
    if kinds := sorted(name for name in OTHER_KINDS if table.get(name) not in NOTHING):
        raise ConfigError(
            f"model.lora.path: {folder} has {', '.join(kinds)}, which is not trained here",
            hint="Merge it into its model with PEFT's merge_and_unload, and start from that model",
        )
    return PretrainedTensors(folder, file=ADAPTER)


def read_factor(stored: PretrainedTensors, name: str, shape: tuple[int, int]) -> torch.Tensor:
    """Return a factor of an adapter that `open_adapter` has opened. Raises ConfigError if it does not fit."""
    factor = stored.read(PREFIX + name)
    if factor.shape != shape:
        raise ConfigError(
            f"model.lora.path: {name} is {tuple(factor.shape)}, the model's is {shape}",
            hint="The adapter is of another model than model.path",
        )
    return factor


def _merged(
    source: Path, factors: Mapping[str, torch.Tensor], dtype: torch.dtype, lora: LoraSection
) -> Iterator[tuple[str, torch.Tensor]]:
    stored = PretrainedTensors(source)
    base = ((name, stored.read(name)) for name in stored.names)
    for name, tensor in merge_factors(base, factors, lora.scale, dtype, torch.device("cpu")):
        yield name, tensor.to(dtype)
