"""Hugging Face model folders on disk: reading tensors by name, writing a folder that transformers loads.

It must never hold a whole model: what is read is a view of the mapped file, which takes memory where it is
copied, and what is written lies in files of 5 GB, of which one is held at a time.
"""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from safetensors import safe_open

from asyncrl.core.errors import ConfigError
from learner.checkpoint.tensor_file import write_tensors

WEIGHTS = "model.safetensors"
INDEX = f"{WEIGHTS}.index.json"
MAX_FILE_BYTES = 5 * 10**9
"""Of an export, as large as those of transformers and of the hub."""
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


class _OpenFile(Protocol):
    """Used part of an open file of `safetensors`."""

    def get_tensor(self, name: str) -> torch.Tensor: ...


class PretrainedTensors:
    """Reads the tensors of a model folder by name, from one file or from several with an index.

    Args:
        zeros: Shapes of tensors that the folder may lack; they are zero then.
        file: That of a folder without an index.
    """

    def __init__(
        self, folder: Path, zeros: Mapping[str, tuple[int, ...]] | None = None, file: str = WEIGHTS
    ) -> None:
        index, alone = folder / INDEX, folder / file
        if index.is_file():
            self._file_of = {
                name: folder / file for name, file in json.loads(index.read_text())["weight_map"].items()
            }
        elif alone.is_file():
            with safe_open(alone, "pt") as opened:
                self._file_of = dict.fromkeys(opened.keys(), alone)
        else:
            raise ConfigError(
                f"{folder} holds neither {file} nor {index.name}", hint="Save the model as safetensors"
            )
        self._folder, self._zeros = folder, zeros or {}
        self._files: dict[Path, _OpenFile] = {}

    @property
    def names(self) -> Iterable[str]:
        """The names of the folder's tensors."""
        return self._file_of

    def read(self, name: str) -> torch.Tensor:
        """Return the tensor `name`, a view of the mapped file: not to be written into.

        Raises:
            ConfigError: The folder does not have it.
        """
        if name not in self._file_of:
            if name in self._zeros:
                return torch.zeros(self._zeros[name])
            raise ConfigError(
                f"{self._folder} has no tensor '{name}'", hint="Its config.json describes another model"
            )
        path = self._file_of[name]
        if path not in self._files:
            self._files[path] = safe_open(path, "pt")
        return self._files[path].get_tensor(name)


def write_folder(
    source: Path, target: Path, tensors: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype
) -> None:
    """Write `tensors` as safetensors files into `target`, with config and tokenizer files of `source`."""
    target.mkdir(parents=True, exist_ok=True)
    (target / INDEX).unlink(missing_ok=True)  # of another export: readers would follow it
    _name_files(target, list(_write_files(target, tensors)))
    for name in _SIDE_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)
    config = json.loads((source / "config.json").read_text())
    # transformers casts to the dtype named here: the file would lose bits if the source said bfloat16.
    config["dtype" if "torch_dtype" not in config else "torch_dtype"] = str(dtype).removeprefix("torch.")
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n")


@dataclass(frozen=True)
class _File:
    path: Path
    names: tuple[str, ...]
    num_bytes: int


def _write_files(target: Path, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[_File]:
    """Write files of at most MAX_FILE_BYTES, or one tensor, under names for now; hold one file's tensors."""
    numbers = itertools.count(1)
    held: dict[str, torch.Tensor] = {}

    def write() -> _File:
        path = target / f".{WEIGHTS}.{next(numbers)}"
        write_tensors(path, held, {"format": "pt"})
        file = _File(path, tuple(held), sum(one.nbytes for one in held.values()))
        held.clear()
        return file

    for name, tensor in tensors:
        if held and sum(one.nbytes for one in held.values()) + tensor.nbytes > MAX_FILE_BYTES:
            yield write()
        # A copy: a view of a live parameter is valid until the next update.
        held[name] = tensor.detach().to("cpu", copy=True).contiguous()
    yield write()


def _name_files(target: Path, files: Sequence[_File]) -> None:
    """Give the files the names that transformers gives them, and an index if they are several."""
    if len(files) == 1:
        files[0].path.replace(target / WEIGHTS)
        return
    (target / WEIGHTS).unlink(missing_ok=True)
    stem, suffix = WEIGHTS.split(".")
    names = [f"{stem}-{number:05d}-of-{len(files):05d}.{suffix}" for number in range(1, len(files) + 1)]
    for name, file in zip(names, files, strict=True):
        file.path.replace(target / name)
    index = {
        "metadata": {"total_size": sum(file.num_bytes for file in files)},
        "weight_map": {
            tensor: name for name, file in zip(names, files, strict=True) for tensor in file.names
        },
    }
    (target / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
