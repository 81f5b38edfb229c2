"""Rows of data files, each a mapping of plain values, in their order.

Parquet, jsonl, and folders of the `datasets` library as `save_to_disk` writes them (Arrow streams named by
`state.json`; a folder of several splits has one such folder each). Must never interpret a row.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from asyncrl.core.errors import DataError

STATE = "state.json"
BLOCK_BYTES = 1 << 20
BATCH_ROWS = 1024
"""Of a Parquet file that are made Python values at once: who wants a few rows waits for no more."""


def read_rows(path: Path) -> Iterator[object]:
    """Yield the rows of a `.parquet`, `.jsonl` or `.json` (one object per line) file, or of a folder.

    Raises:
        DataError: There is no such file, or it cannot be read; with its name and the row, from 0.
    """
    if path.is_dir():
        return _read_folder(path)
    readers = {".parquet": _read_parquet, ".jsonl": _read_lines, ".json": _read_lines}
    if path.suffix not in readers:
        hint = "Use .parquet, .jsonl or a folder of the datasets library"
        raise DataError(f"{path}: cannot read '{path.suffix}' files", hint=hint)
    if not path.is_file():
        raise DataError(f"{path} does not exist")
    return readers[path.suffix](path)


def digest_of(path: Path) -> str:
    """Return a digest of the bytes that `read_rows` reads, 32 hex characters. Raises DataError."""
    digest = hashlib.blake2b(digest_size=16)
    for file in find_arrow_files(path) if path.is_dir() else [path]:
        with file.open("rb") as stream:
            while block := stream.read(BLOCK_BYTES):
                digest.update(block)
    return digest.hexdigest()


def find_arrow_files(folder: Path) -> list[Path]:
    """Return the files of one split, in order. Raises DataError if the folder is none."""
    splits = sorted(found.parent.name for found in folder.glob(f"*/{STATE}"))
    if not (folder / STATE).is_file() and splits:
        hint = f"Name one of them, as {folder / splits[0]}"
        raise DataError(f"{folder} holds the splits {', '.join(splits)}", hint=hint)
    try:
        state = json.loads((folder / STATE).read_text(encoding="utf-8"))
        files = [folder / _bare_name(one["filename"]) for one in state["_data_files"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{folder} is not a folder of the datasets library: {type(error).__name__}: {error}",
            hint=f"`save_to_disk` writes one, with a {STATE}",
        ) from error
    if state.get("_indices_data_files") or state.get("_indices_files"):
        raise DataError(f"{folder} holds a selection of rows", hint="Save it again after flatten_indices()")
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise DataError(f"{folder} lacks {', '.join(missing)}")
    return files


def _bare_name(name: str) -> str:
    if name in ("", "..") or Path(name).name != name:
        raise ValueError(f"'{name}' is not a file name in it")
    return name


def _read_folder(folder: Path) -> Iterator[object]:
    import pyarrow as pa

    for file in find_arrow_files(folder):
        try:
            with pa.memory_map(str(file)) as source, pa.ipc.open_stream(source) as stream:
                for batch in stream:
                    yield from batch.to_pylist()
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"{file} is not a readable Arrow stream: {error}") from error


def _read_parquet(path: Path) -> Iterator[object]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        for batch in pq.ParquetFile(path).iter_batches(BATCH_ROWS):
            yield from batch.to_pylist()
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path} is not a readable Parquet file: {error}") from error


def _read_lines(path: Path) -> Iterator[object]:
    with path.open("rb") as file:
        lines: Iterable[bytes] = (line for line in file if line.strip())
        for row, line in enumerate(lines):
            try:
                fields = json.loads(line.decode().rstrip())
                if b"\\ud" in line.lower():  # pairs are text, and half of one is not: tokenizers raise
                    json.dumps(fields, ensure_ascii=False).encode()
                yield fields
            except json.JSONDecodeError as error:
                raise DataError(
                    f"{path}, row {row}: not JSON: {error.msg} at column {error.colno}"
                ) from error
            except UnicodeDecodeError as error:
                raise DataError(f"{path}, row {row}: not UTF-8 at byte {error.start} of its line") from error
            except UnicodeEncodeError as error:
                what = f"half of a surrogate pair ({error.object[error.start]!a})"
                raise DataError(f"{path}, row {row}: {what} is no text", hint="Take it out") from error
