"""Checkpoints on disk: one atomic cut, or none.

A checkpoint is a folder `step-<n>` that holds every rank's state and a manifest with the digest of
each file. It is written beside its place, synced, renamed, and only then committed in the journal.
Invariant: a folder is loaded only if the journal holds its (token, step, digest) and every byte of
it still has the digest that was committed; torn or flipped, never.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import xxhash

import asyncrl
from asyncrl.buffer.rules.learner import kept_checkpoints
from asyncrl.core.errors import CheckpointError
from asyncrl.core.files.durable import sync_path
from asyncrl.core.runtime.faults import fault_point
from learner.checkpoint.pieces import record_file

FORMAT = 3
"""Of the folder, manifest and state files. 2 did not say which asyncrl wrote it."""
OLDEST_FORMAT = 2
"""That is still read. 1 had files that only the same layout of ranks could read."""
MANIFEST = "manifest.json"
SCORES = "scores.json"
CHUNK_BYTES = 1 << 20


class ForeignFormatError(CheckpointError):
    """A whole checkpoint of a format that this version does not read: an older one must not stand in."""


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


@dataclass(frozen=True)
class Cut:
    """State of the cut besides that of the ranks; the ledger's position is (token, step).

    Attributes:
        version: Policy version last published, 0 for none.
        controllers: Plain state of whatever steers training (adaptive KL, guard), by name.
    """

    version: int = 0
    controllers: Mapping[str, Mapping[str, float]] = field(default_factory=dict)


class _Body(msgspec.Struct, frozen=True):
    """Fields that are read from a manifest."""

    written_by: str
    format: int
    files: dict[str, str]
    version: int = 0
    controllers: dict[str, dict[str, float | bool]] = msgspec.field(default_factory=dict)


class CheckpointStore:
    """The checkpoints of one run, under `root`. Rank 0 owns it; other ranks write into `prepare`'s folder.

    Args:
        root: Made if it is missing.
        keep: Number of the newest that stay.
        keep_best: Number of those with the highest score that stay besides. They are for export: the
            journal forgets them, so that the groups after them need not be kept.
    """

    def __init__(self, root: Path, keep: int, keep_best: int = 0) -> None:
        self.root = root
        self._keep = keep
        self._keep_best = keep_best
        root.mkdir(parents=True, exist_ok=True)

    def folder(self, step: int) -> Path:
        return self.root / f"step-{step:08d}"

    def temporary(self, step: int) -> Path:
        return self.root / f".step-{step:08d}.partial"

    def prepare(self, step: int) -> Path:
        """Return an empty temporary folder for the state of `step`, and forget an abandoned step's score."""
        folder = self.temporary(step)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        scores = self.scores()
        if scores.pop(step, None) is not None:
            self._write_scores(scores)
        return folder

    def discard(self, step: int) -> None:
        """Remove what was written of a checkpoint that cannot be sealed, as far as the disk lets it."""
        shutil.rmtree(self.temporary(step), ignore_errors=True)

    def seal(
        self, step: int, token: int, cut: Cut | None = None, digests: Mapping[str, str] | None = None
    ) -> str:
        """Sync and rename what the ranks wrote; return the digest to commit in the journal.

        Args:
            digests: By path in the folder, of every file, from the ranks that wrote them; without them the
                files are read to digest them.

        Raises:
            CheckpointError: The folder holds other files than `digests` names.
        """
        folder, cut = self.temporary(step), cut or Cut()
        fault_point("checkpoint.written", step)
        names = [str(path.relative_to(folder)) for path in _files(folder)]
        if digests is None:
            digests = {name: digest_file(folder / name) for name in names}
        elif strangers := sorted(digests.keys() ^ set(names)):
            raise CheckpointError(f"{folder} holds other files than its ranks have written: {strangers[:5]}")
        body = {
            "format": FORMAT,
            "written_by": asyncrl.__version__,
            "step": step,
            "token": token,
            "version": cut.version,
            "controllers": dict(cut.controllers),
            "files": dict(digests),
        }
        manifest = json.dumps({"digest": _digest(body), "body": body}, sort_keys=True, indent=1)
        (folder / MANIFEST).write_text(manifest)
        for path in [*_files(folder), *_folders(folder), folder]:
            sync_path(path)
        fault_point("checkpoint.synced", step)
        shutil.rmtree(self.folder(step), ignore_errors=True)  # an uncommitted one of an earlier start
        folder.rename(self.folder(step))
        sync_path(self.root)
        fault_point("checkpoint.renamed", step)
        return xxhash.xxh3_128_hexdigest(manifest.encode())

    def kept_after(self, step: int, committed: Iterable[int]) -> list[int]:
        """Return the steps to resume from that stay once `step` is committed, ascending.

        Args:
            step: The newest. Later ones belong to a branch that a resume has abandoned.
            committed: Steps whose checkpoints the journal knows. A folder that it does not know, of an
                abandoned branch or an interrupted write, is none to resume from.
        """
        known = set(committed)
        return kept_checkpoints(step, [found for found in self.steps() if found in known], self._keep)

    def best(self, newest: int | None = None) -> list[int]:
        """Return the `keep_best` steps with the highest scores, best first, none later than `newest`."""
        scores = self.scores()
        found = [step for step in self.steps() if step in scores and (newest is None or step <= newest)]
        return sorted(found, key=lambda step: (-scores[step], -step))[: self._keep_best]

    def note_score(self, step: int, score: float) -> None:
        """Remember how good the weights of `step` are, the higher the better."""
        scores, steps = self.scores(), self.steps()
        newest = max(steps, default=-1)  # the checkpoint of a later step may be about to be written
        if score == score and scores.get(step) != score:  # not a number is no score
            needed = {known: scores[known] for known in scores if known in steps or known > newest}
            self._write_scores(needed | {step: score})

    def scores(self) -> dict[int, float]:
        """Return the known scores by step. They are advice: a file that is damaged holds none."""
        try:
            table = json.loads((self.root / SCORES).read_text())
            return {int(step): float(score) for step, score in table.items()}
        except (OSError, ValueError, AttributeError, TypeError):
            return {}

    def remove_all_but(self, steps: Iterable[int]) -> None:
        """Remove checkpoints that are neither kept nor among the best, and what an interrupted write left."""
        kept = set(steps)
        kept |= set(self.best(max(kept, default=0)))
        for step in self.steps():
            if step not in kept:
                shutil.rmtree(self.folder(step))
        for partial in self.root.glob(".step-*.partial"):
            shutil.rmtree(partial)

    def newest_valid(self, commits: Iterable[Commit], warn: Callable[[str], None]) -> Commit | None:
        """Return the newest commit whose folder is whole, telling `warn` about each that is not.

        Raises:
            ForeignFormatError: The newest whole one is of a format that this version does not read.
        """
        for commit in sorted(commits, key=lambda commit: (commit.step, commit.token), reverse=True):
            try:
                self.verify(commit)
            except ForeignFormatError:
                raise
            except CheckpointError as error:
                warn(f"step {commit.step} is torn: {error.message}")
            else:
                return commit
        return None

    def verify(self, commit: Commit) -> None:
        """Raise CheckpointError unless the folder of `commit` is byte for byte what was committed."""
        folder = self.folder(commit.step)
        if xxhash.xxh3_128_hexdigest(_read_manifest(folder)) != commit.digest:
            raise CheckpointError(f"the manifest of {folder} is not the one that was committed")
        self.verify_whole(commit.step)

    def verify_whole(self, step: int) -> None:
        """Raise CheckpointError unless the folder of `step` is what its own manifest says."""
        folder = self.folder(step)
        files = digests_of(folder)
        if set(files) != {str(path.relative_to(folder)) for path in _files(folder)} - {MANIFEST}:
            raise CheckpointError(f"{folder} holds other files than its manifest says")
        for name, digest in files.items():
            if digest_file(folder / name) != digest:
                raise CheckpointError(f"the file {folder / name} is torn or altered")

    def cut(self, step: int) -> Cut:
        """Return what the checkpoint of `step` holds besides the ranks' state."""
        body = _read_body(self.folder(step))
        return Cut(body.version, body.controllers)

    def shapes(self, step: int) -> dict[str, tuple[int, ...]]:
        """Return name and full shape of the parameters that the first rank wrote into the one of `step`.

        Raises:
            CheckpointError: Its record is missing or damaged.
        """
        path = record_file(self.folder(step), 0)
        try:
            return {row["name"]: tuple(row["shape"]) for row in json.loads(path.read_text())["pieces"]}
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error

    def steps(self) -> list[int]:
        """Return the steps of all checkpoints on disk, ascending, committed or not."""
        return sorted(int(folder.name.removeprefix("step-")) for folder in self.root.glob("step-*"))

    def _write_scores(self, scores: Mapping[int, float]) -> None:
        temporary = self.root / f".{SCORES}"
        temporary.write_text(json.dumps({str(step): scores[step] for step in sorted(scores)}))
        temporary.replace(self.root / SCORES)


def digest_file(path: Path) -> str:
    """Return the xxh3-128 digest of a file, hex."""
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def digests_of(folder: Path) -> dict[str, str]:
    """Return the digest of each file of a sealed checkpoint, by path in `folder`, as its manifest says."""
    return _read_body(folder).files


def _digest(body: Mapping[str, object]) -> str:
    return str(xxhash.xxh3_128_hexdigest(json.dumps(body, sort_keys=True).encode()))


def _read_manifest(folder: Path) -> bytes:
    try:
        return (folder / MANIFEST).read_bytes()
    except FileNotFoundError:
        raise CheckpointError(f"the checkpoint {folder} is missing") from None


def _read_body(folder: Path) -> _Body:
    """Return what the manifest says, once it agrees with its own digest and is of our format."""
    try:
        table = json.loads(_read_manifest(folder))
        body: dict[str, object] = table.get("body", {})
        is_whole = _digest(body) == table.get("digest") or "files" in table
    except (ValueError, AttributeError) as error:
        raise CheckpointError(f"the manifest of {folder} is torn or altered: {error}") from error
    if not is_whole:
        raise CheckpointError(f"the manifest of {folder} is torn or altered")
    found = body.get("format", 1)
    if not isinstance(found, int):
        raise CheckpointError(f"the manifest of {folder} is torn or altered")
    if not OLDEST_FORMAT <= found <= FORMAT:
        by = f"asyncrl {body['written_by']} wrote it" if "written_by" in body else "asyncrl wrote it"
        newer = f"A newer {by}: use that one, or newer"
        older = f"An older {by}: go on with that one, or start a new run from its weights"
        raise ForeignFormatError(
            f"{folder} is a checkpoint of format {found}, this asyncrl reads {OLDEST_FORMAT} to {FORMAT}",
            hint=newer if found > FORMAT else older,
        )
    return _bring_up_to_date(body)


def _bring_up_to_date(body: Mapping[str, object]) -> _Body:
    """Return what an older manifest says, in the current format; the file stays as it was committed."""
    try:
        return msgspec.convert({"written_by": "unknown", **body, "format": FORMAT}, _Body)
    except msgspec.ValidationError as error:
        raise CheckpointError(f"a manifest is not understood: {error}") from error


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _folders(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_dir())
