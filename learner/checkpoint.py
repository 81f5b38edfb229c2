"""Checkpoints on disk: one atomic cut, or none.

A checkpoint is a folder `step-<n>` that holds every rank's state and a manifest with the digest of
each file. It is written beside its place, synced, renamed, and only then committed in the journal.
Invariant: a folder is loaded only if the journal holds its (token, step, digest) and every byte of
it still has the digest that was committed; torn or flipped, never.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import xxhash

from asyncrl.errors import CheckpointError
from asyncrl.faults import fault_point

MANIFEST = "manifest.json"
CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class Commit:
    """A checkpoint as the journal knows it.

    Attributes:
        token: Fencing token of the learner that wrote it.
        step: Learner steps that it contains.
        digest: xxh3-128 of its manifest, hex.
    """

    token: int
    step: int
    digest: str


class CheckpointStore:
    """The checkpoints of one run, under `root`. Rank 0 owns it; other ranks write into `prepare`'s folder."""

    def __init__(self, root: Path, keep: int) -> None:
        self._root = root
        self._keep = keep
        root.mkdir(parents=True, exist_ok=True)

    def folder(self, step: int) -> Path:
        return self._root / f"step-{step:08d}"

    def temporary(self, step: int) -> Path:
        return self._root / f".step-{step:08d}.partial"

    def prepare(self, step: int) -> Path:
        """Return an empty temporary folder for the state of `step`."""
        folder = self.temporary(step)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        return folder

    def seal(self, step: int, token: int) -> str:
        """Sync and rename what the ranks wrote; return the digest to commit in the journal."""
        folder = self.temporary(step)
        fault_point("checkpoint.written", step)
        files = {str(path.relative_to(folder)): digest_file(path) for path in _files(folder)}
        manifest = json.dumps({"step": step, "token": token, "files": files}, sort_keys=True, indent=1)
        (folder / MANIFEST).write_text(manifest)
        for path in _files(folder):
            _sync(path)
        _sync(folder)
        fault_point("checkpoint.synced", step)
        shutil.rmtree(self.folder(step), ignore_errors=True)  # an uncommitted one of an earlier life
        folder.rename(self.folder(step))
        _sync(self._root)
        fault_point("checkpoint.renamed", step)
        return xxhash.xxh3_128_hexdigest(manifest.encode())

    def kept_after(self, step: int) -> list[int]:
        """Return the steps whose checkpoints stay once `step` is committed, ascending.

        Later ones belong to a branch that a resume has abandoned.
        """
        older = [found for found in self.steps() if found < step]
        return [*older, step][-self._keep :]

    def remove_all_but(self, steps: Iterable[int]) -> None:
        """Remove checkpoints that are no longer kept, and what an interrupted write left."""
        kept = set(steps)
        for step in self.steps():
            if step not in kept:
                shutil.rmtree(self.folder(step))
        for partial in self._root.glob(".step-*.partial"):
            shutil.rmtree(partial)

    def newest_valid(self, commits: Iterable[Commit], warn: Callable[[str], None]) -> Commit | None:
        """Return the newest commit whose folder is whole, telling `warn` about each that is not."""
        for commit in sorted(commits, key=lambda commit: (commit.step, commit.token), reverse=True):
            try:
                self.verify(commit)
            except CheckpointError as error:
                warn(str(error))
            else:
                return commit
        return None

    def verify(self, commit: Commit) -> None:
        """Raise CheckpointError unless the folder of `commit` is byte for byte what was committed."""
        folder = self.folder(commit.step)
        try:
            manifest = (folder / MANIFEST).read_bytes()
        except FileNotFoundError:
            raise CheckpointError(f"the checkpoint {folder} is missing") from None
        if xxhash.xxh3_128_hexdigest(manifest) != commit.digest:
            raise CheckpointError(f"the manifest of {folder} is not the one that was committed")
        files: dict[str, str] = json.loads(manifest)["files"]
        if set(files) != {str(path.relative_to(folder)) for path in _files(folder)} - {MANIFEST}:
            raise CheckpointError(f"{folder} holds other files than its manifest says")
        for name, digest in files.items():
            if digest_file(folder / name) != digest:
                raise CheckpointError(f"the file {folder / name} is torn or altered")

    def steps(self) -> list[int]:
        """Return the steps of all checkpoints on disk, ascending, committed or not."""
        return sorted(int(folder.name.removeprefix("step-")) for folder in self._root.glob("step-*"))


def digest_file(path: Path) -> str:
    """Return the xxh3-128 digest of a file, hex."""
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
