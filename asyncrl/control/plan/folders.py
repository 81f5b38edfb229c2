"""Checks of folders on this machine: where the run writes, and the files of the models that it reads.

Nothing that stays is written: whether a folder takes files is tried with one that has no name.
"""

from __future__ import annotations

import json
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from asyncrl.config.tree import Config

WEIGHTS = "model.safetensors"
INDEX = f"{WEIGHTS}.index.json"
MAX_HEADER_BYTES = 100_000_000
"""As safetensors allows."""
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


def find_bad_weights(folder: Path) -> str:
    """Say what is wrong with the safetensors of a model folder: missing, or cut short; headers are read."""
    try:
        names = _list_files(folder)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"'{folder / INDEX}' cannot be read: {error}"
    if not names:
        return f"'{folder}' holds no weights (neither {WEIGHTS} nor {INDEX}); save the model as safetensors"
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        return f"'{folder}' lacks {', '.join(missing)} of its weights; fetch or copy them again"
    found = (_find_damage(folder / name) for name in names)
    return next((problem for problem in found if problem), "")


def _list_files(folder: Path) -> list[str]:
    if (folder / INDEX).is_file():
        return sorted(set(json.loads((folder / INDEX).read_bytes())["weight_map"].values()))
    if (folder / WEIGHTS).is_file():
        return [WEIGHTS]
    return []


def _find_damage(file: Path) -> str:
    """Say if a safetensors file is shorter or longer than its header tells."""
    again = "fetch or copy it again"
    size = file.stat().st_size
    try:
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            header: dict[str, Any] = json.loads(stream.read(min(length, MAX_HEADER_BYTES)))
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        wanted = 8 + length + max(ends, default=0)
    except (OSError, ValueError, KeyError, IndexError, TypeError, AttributeError, struct.error):
        return f"'{file}' is not a safetensors file, or cut short at {size} bytes; {again}"
    return "" if size == wanted else f"'{file}' has {size} bytes, and its header tells of {wanted}; {again}"


def find_missing_tokenizer(folder: Path) -> str:
    """Say if a model folder has no file that a tokenizer is made of."""
    if any(all((folder / name).is_file() for name in names) for names in TOKENIZERS):
        return ""
    return f"'{folder}' holds no tokenizer (no tokenizer.json); copy the one that the model was trained with"
