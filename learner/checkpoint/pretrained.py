"""Hugging Face model folders on disk: reading tensors by name, writing a folder that transformers loads.

It must never hold a whole checkpoint while reading; writing collects one copy in host memory.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from asyncrl.core.errors import ConfigError

WEIGHTS = "model.safetensors"
_SIDE_FILES = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)


class PretrainedTensors:
    """Reads the tensors of a model folder by name, from one file or from several with an index.

    Args:
        zeros: Shapes of tensors that the folder may lack; they are zero then.
    """

    def __init__(self, folder: Path, zeros: Mapping[str, tuple[int, ...]] | None = None) -> None:
        index = folder / f"{WEIGHTS}.index.json"
        if index.is_file():
            self._file_of = {
                name: folder / file for name, file in json.loads(index.read_text())["weight_map"].items()
            }
        elif (folder / WEIGHTS).is_file():
            with safe_open(folder / WEIGHTS, "pt") as file:
                self._file_of = dict.fromkeys(file.keys(), folder / WEIGHTS)
        else:
            raise ConfigError(
                f"{folder} holds neither {WEIGHTS} nor {index.name}", hint="Save the model as safetensors"
            )
        self._folder, self._zeros = folder, zeros or {}

    def read(self, name: str) -> torch.Tensor:
        """Return the tensor `name`. Raises ConfigError if the folder does not have it."""
        if name not in self._file_of:
            if name in self._zeros:
                return torch.zeros(self._zeros[name])
            raise ConfigError(
                f"{self._folder} has no tensor '{name}'", hint="Its config.json describes another model"
            )
        with safe_open(self._file_of[name], "pt") as file:
            tensor: torch.Tensor = file.get_tensor(name)
        return tensor


def write_folder(
    source: Path, target: Path, tensors: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype
) -> None:
    """Write `tensors` as one safetensors file into `target`, with config and tokenizer files of `source`."""
    target.mkdir(parents=True, exist_ok=True)
    # `clone` cuts views loose from fused weights: safetensors refuses tensors that share storage.
    copies = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors}
    save_file(copies, target / WEIGHTS, metadata={"format": "pt"})
    for name in _SIDE_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)
    config = json.loads((source / "config.json").read_text())
    # transformers casts to the dtype named here: the file would lose bits if the source said bfloat16.
    config["dtype" if "torch_dtype" not in config else "torch_dtype"] = str(dtype).removeprefix("torch.")
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n")
