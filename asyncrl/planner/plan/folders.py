"""Checks of folders on this machine: where the run writes, and the files of the models that it reads.

Nothing that stays is written: whether a folder takes files is tried with one that has no name.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from asyncrl.core.config.tree import Config
from asyncrl.models.weight_files import INDEX, WEIGHTS, read_header, read_index

AGAIN = "fetch or copy it again"
TOKENIZERS = (("tokenizer.json",), ("tokenizer.model",), ("vocab.txt",), ("vocab.json", "merges.txt"))
"""Files of which one row is enough for a tokenizer."""


def check_run_folder(config: Config) -> Iterator[str]:
    """Say if the run cannot write its folder."""
    folder = Path(config.run.dir).absolute() / config.run.name
    there = next(path for path in (folder, *folder.parents) if _exists(path))
    if not there.is_dir():
        yield f"run.dir: '{there}' is a file, and the run's folder would be {folder}; choose another folder"
        return
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        yield f"run.dir: nothing can be written into '{there}' ({error.strerror}); choose another folder"


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # a folder above it is closed to us: it is said of that folder
        return False


def find_bad_weights(folder: Path, wanted: Mapping[str, tuple[int, ...]]) -> str:
    """Say what is wrong with the safetensors of a model folder; headers are read.

    A file is missing or cut short, or lacks a tensor of the index, or there is not what `wanted` tells of.

    Args:
        wanted: Shapes of tensors by their names.
    """
    try:
        index = read_index(folder)
    except (OSError, ValueError) as error:
        return f"'{folder / INDEX}' cannot be read: {error}"
    names = sorted(set(index.values())) or [name for name in [WEIGHTS] if (folder / name).is_file()]
    if not names:
        return f"'{folder}' holds no weights (neither {WEIGHTS} nor {INDEX}); save the model as safetensors"
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        return f"'{folder}' lacks {', '.join(missing)} of its weights; fetch or copy them again"
    shapes: dict[str, tuple[int, ...]] = {}
    for name in names:
        found, problem = _read_shapes(folder / name)
        absent = next((tensor for tensor, file in index.items() if file == name and tensor not in found), "")
        if absent and not problem:
            problem = f"'{folder / name}' lacks '{absent}', which {INDEX} says it holds; {AGAIN}"
        if problem:
            return problem
        shapes |= found
    return _find_difference(folder, shapes, wanted)


def _read_shapes(file: Path) -> tuple[dict[str, tuple[int, ...]], str]:
    """Return the shapes in a safetensors file, and what is wrong if it is shorter or longer than it says."""
    size = file.stat().st_size
    try:
        header = read_header(file)
    except (OSError, ValueError):
        return {}, f"'{file}' is not a safetensors file, or cut short at {size} bytes; {AGAIN}"
    problem = f"'{file}' has {size} bytes, and its header tells of {header.num_bytes}; {AGAIN}"
    return header.shapes, "" if size == header.num_bytes else problem


def _find_difference(
    folder: Path, shapes: Mapping[str, tuple[int, ...]], wanted: Mapping[str, tuple[int, ...]]
) -> str:
    other = "copy the config.json and the weights of one model"
    for name, shape in wanted.items():
        if name not in shapes:
            return f"'{folder}' has no tensor '{name}', which its config.json tells of; {other}"
        if shapes[name] != shape:
            sizes = f"{list(shapes[name])}, and {list(shape)} by its config.json"
            return f"'{folder}': '{name}' has the shape {sizes}; {other}"
    return ""


def find_missing_tokenizer(folder: Path) -> str:
    """Say if a model folder has no file that a tokenizer is made of."""
    if any(all((folder / name).is_file() for name in names) for names in TOKENIZERS):
        return ""
    return f"'{folder}' holds no tokenizer (no tokenizer.json); copy the one that the model was trained with"
