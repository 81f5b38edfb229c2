"""The recorded steps of a run, on disk: one file per step and share of the batch, whole or not at all.

Owns the form of the files in `<run>/record`. `step-N.S.batch` holds the groups of share S that learner step
N was trained on, as they travel, with the leader's order and what else the step depended on; `step-N.weights`
the digest of the weights that were published at step N, `settings-D.json` the configuration that steps
were trained under, once for all steps that name its digest D. A batch has a digest of its header, which
holds a digest of each group. Invariant: what is read is what was written; a file with another bit is
refused, and the group it is in is named. A learner that a newer one has fenced replaces nothing of it.
"""

from __future__ import annotations

import itertools
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from asyncrl.core import wire
from asyncrl.core.errors import CheckpointError, DataError, FencedError, WireError
from asyncrl.core.experience import Group, decode_group, encode_group
from learner.orders import Adjust, Train
from learner.record.settings import Settings, digest_settings, encode_settings

FOLDER = "record"
MAGIC = b"asyncrl-record-1"
_DIGEST_BYTES = 16
_LENGTH_BYTES = 8
_PREFIX_BYTES = len(MAGIC) + _DIGEST_BYTES + _LENGTH_BYTES
_NAME = re.compile(r"step-(\d{8})\.(\d+\.batch|weights)")


@dataclass(frozen=True)
class RecordedStep:
    """Training of one rank at one step, and its results.

    Attributes:
        order: As the leader gave it; of a step that was streamed, of the whole batch with its parts.
        adjustment: The guard's, in force at that step.
        groups: Of this share, in the order in which they were fetched.
        metrics: Of the whole step; without what depends on the machine's time or memory.
        seed: `run.seed`.
        share: Index of this share of the batch.
        num_shares: Number of shares of the batch.
        settings: Of the configuration, those that training depends on; None if they were not recorded.
    """

    order: Train
    adjustment: Adjust
    groups: list[Group]
    metrics: Mapping[str, float]
    seed: int
    share: int = 0
    num_shares: int = 1
    settings: Settings | None = None

    @property
    def step(self) -> int:
        return self.order.step


@dataclass(frozen=True)
class RecordedWeights:
    """The digest of the weights of `step` as they were published, in buckets of `bucket_bytes`."""

    step: int
    digest: str
    bucket_bytes: int


@dataclass(frozen=True)
class BatchStore:
    """The folder of what a run recorded."""

    folder: Path

    def batch_path(self, step: int, share: int) -> Path:
        return self.folder / f"step-{step:08d}.{share}.batch"

    def weights_path(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}.weights"

    def settings_path(self, digest: str) -> Path:
        return self.folder / f"settings-{digest}.json"

    def open(self, share: int) -> None:
        """Make the folder; remove what a writer of this share that died has left half written."""
        self.folder.mkdir(parents=True, exist_ok=True)
        mine = [f".step-*.{share}.batch.*", *([".step-*.weights.*", ".settings-*"] if share == 0 else [])]
        for pattern in mine:
            for partial in self.folder.glob(pattern):
                partial.unlink(missing_ok=True)

    def write(self, recorded: RecordedStep) -> int:
        """Write one share of a step; return its bytes.

        Raises:
            OSError: The disk is full, or the folder is gone.
            WireError: A value of the step cannot be packed.
            FencedError: A newer learner, by its token, has written that step.
        """
        path = self.batch_path(recorded.step, recorded.share)
        _check_token(path, recorded.order.token)
        frames, lengths, digests = [], [], []
        for group in recorded.groups:
            encoded = encode_group(group)
            frames += encoded
            lengths.append([len(frame) for frame in encoded])
            digests.append(_digest_frames(encoded))
        settings, num_bytes = self._write_settings(recorded)
        header = wire.pack_header(
            {
                "order": asdict(recorded.order),
                "adjustment": asdict(recorded.adjustment),
                "tickets": [group.ticket for group in recorded.groups],
                "lengths": lengths,
                "digests": digests,
                "metrics": dict(recorded.metrics),
                "seed": recorded.seed,
                "share": recorded.share,
                "num_shares": recorded.num_shares,
                "settings": settings,
            }
        )
        return num_bytes + _write(path, [_prefix_of(header), header, *frames])

    def _write_settings(self, recorded: RecordedStep) -> tuple[str, int]:
        """Return the digest of the step's settings, and the bytes of a file for them if they are new."""
        if recorded.settings is None:
            return "", 0
        data = encode_settings(recorded.settings)
        digest = digest_settings(data)
        path = self.settings_path(digest)
        # The rank of share 0 alone: ranks on several nodes may have the same process id.
        return digest, 0 if recorded.share or path.exists() else _write(path, [data])

    def read(self, step: int, share: int) -> RecordedStep:
        """Return one share of a step.

        Raises:
            DataError: The step is not in the record.
            CheckpointError: The file is torn or altered; a group that is, is named.
        """
        path = self.batch_path(step, share)
        data = memoryview(self._read(path, step))
        fields = _read_header(data, path)
        try:
            header = msgspec.convert(fields, _Header)
            return _parse(header, data, path, self.read_settings(header.settings))
        except (WireError, KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}", hint=_HINT) from error

    def settings_digest(self, step: int) -> str:
        """Return the digest of the settings of `step`; "" if an older asyncrl recorded it without them.

        Raises:
            DataError: Share 0 of the step is not in the record.
            CheckpointError: The file is torn or altered.
        """
        path = self.batch_path(step, 0)
        try:
            return str(wire.field({"settings": "", **_read_header_of(path)}, "settings", str))
        except FileNotFoundError:
            raise self._missing(step) from None
        except WireError as error:
            raise CheckpointError(f"{path} is torn or altered: {error}", hint=_HINT) from error

    def read_settings(self, digest: str) -> Settings | None:
        """Return the settings of that digest; None for "".

        Raises:
            CheckpointError: They are gone or altered.
        """
        if not digest:
            return None
        path = self.settings_path(digest)
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            raise CheckpointError(f"{path} is missing", hint=_HINT) from None
        if digest_settings(data) != digest:
            raise CheckpointError(f"{path} is altered", hint=_HINT)
        settings: Settings = json.loads(data)
        return settings

    def write_weights(self, recorded: RecordedWeights) -> int:
        """Write the digest of published weights; return its bytes. Raises OSError as `write`."""
        header = wire.pack_header(asdict(recorded))
        return _write(self.weights_path(recorded.step), [_prefix_of(header), header])

    def read_weights(self, step: int) -> RecordedWeights | None:
        """Return the digest of the weights of `step`; None if they were not published.

        Raises:
            CheckpointError: The file is torn or altered.
        """
        path = self.weights_path(step)
        if not path.exists():
            return None
        try:
            fields = _read_header(memoryview(path.read_bytes()), path)
            return RecordedWeights(
                wire.field(fields, "step", int),
                wire.field(fields, "digest", str),
                wire.field(fields, "bucket_bytes", int),
            )
        except WireError as error:
            raise CheckpointError(f"{path} is torn or altered: {error}", hint=_HINT) from error

    def steps(self) -> list[int]:
        """Return the steps that are there, ascending."""
        return sorted({step for step, kind, _ in self._entries() if kind != "weights"})

    def num_shares(self, step: int) -> int:
        """Return how many shares of `step` are there."""
        return sum(found == step and kind != "weights" for found, kind, _ in self._entries())

    def remove(self, steps: Iterable[int] | range, share: int | None = None) -> None:
        """Remove `steps`: of one share, or of all with the weights."""
        wanted = steps if isinstance(steps, range) else set(steps)
        for step, kind, path in self._entries():
            if step in wanted and (share is None or kind == f"{share}.batch"):
                path.unlink(missing_ok=True)

    def remove_weights(self, steps: range) -> None:
        """Remove the digests of the weights of `steps`."""
        for step, kind, path in self._entries():
            if step in steps and kind == "weights":
                path.unlink(missing_ok=True)

    def num_bytes(self) -> int:
        """Return what the record takes on disk."""
        paths = [*(path for _, _, path in self._entries()), *self.folder.glob("settings-*.json")]
        return sum(path.stat().st_size for path in paths)

    def _entries(self) -> Iterator[tuple[int, str, Path]]:
        for path in self.folder.glob("step-*"):
            found = _NAME.fullmatch(path.name)
            if found:
                yield int(found.group(1)), found.group(2), path

    def _read(self, path: Path, step: int) -> bytes:
        try:
            return path.read_bytes()
        except FileNotFoundError:
            raise self._missing(step) from None

    def _missing(self, step: int) -> DataError:
        steps = self.steps()
        hint = f"It holds {name_steps(steps)}" if steps else "The run must have run.record: true"
        return DataError(f"step {step} is not in the record {self.folder}", hint=hint)


def name_steps(steps: Iterable[int]) -> str:
    """Return ascending `steps`, at least one, in words: "step 6", "steps 4 and 5", "steps 0 to 5 and 8"."""
    rows = itertools.groupby(enumerate(steps), lambda place: place[1] - place[0])
    words: list[str] = []
    for _, row in rows:
        numbers = [step for _, step in row]
        words += [f"{numbers[0]} to {numbers[-1]}"] if len(numbers) > 2 else map(str, numbers)
    *others, last = words
    if not others:
        return f"step {last}" if last.isdigit() else f"steps {last}"
    return f"steps {', '.join(others)} and {last}"


_HINT = "Nothing can be trained again from it: bring the file back, or begin at a later checkpoint"


class _Header(msgspec.Struct, frozen=True):
    """Header before the groups of a batch."""

    order: Train
    adjustment: Adjust
    tickets: list[int]
    lengths: list[list[int]]
    digests: list[str]
    metrics: dict[str, float]
    seed: int
    share: int
    num_shares: int
    settings: str = ""


def _write(path: Path, frames: Sequence[wire.Frame]) -> int:
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with partial.open("wb") as file:
            file.writelines(frames)
            num_bytes = file.tell()
        partial.replace(path)
    except OSError:  # what is left of it would keep a full disk full
        partial.unlink(missing_ok=True)
        raise
    return num_bytes


def _prefix_of(header: bytes) -> bytes:
    return MAGIC + xxhash.xxh3_128_digest(header) + len(header).to_bytes(_LENGTH_BYTES, "little")


def _check_token(path: Path, token: int) -> None:
    """Raise FencedError if a learner of a higher token wrote `path`; one that is torn may be replaced."""
    try:
        found = _read_header_of(path)["order"]["token"]
    except (FileNotFoundError, CheckpointError, WireError, KeyError):
        return
    if found > token:
        raise FencedError(f"{path} is of the learner of token {found}: token {token} is no longer the newest")


def _read_header_of(path: Path) -> dict[str, Any]:
    """Return the header of a batch, without reading the groups. Raises as `_read_header`, and OSError."""
    with path.open("rb") as file:
        prefix = file.read(_PREFIX_BYTES)
        header = file.read(min(int.from_bytes(prefix[-_LENGTH_BYTES:], "little"), path.stat().st_size))
    return _read_header(memoryview(prefix + header), path)


def _read_header(data: memoryview, path: Path) -> dict[str, Any]:
    length = int.from_bytes(data[_PREFIX_BYTES - _LENGTH_BYTES : _PREFIX_BYTES], "little")
    header = data[_PREFIX_BYTES : _PREFIX_BYTES + length]
    digest = data[len(MAGIC) : len(MAGIC) + _DIGEST_BYTES]
    if data[: len(MAGIC)] != MAGIC or xxhash.xxh3_128_digest(header) != digest:
        raise CheckpointError(f"{path} is torn or altered", hint=_HINT)
    return wire.unpack_header(header)


def _parse(header: _Header, data: memoryview, path: Path, settings: Settings | None) -> RecordedStep:
    start = _PREFIX_BYTES + int.from_bytes(data[_PREFIX_BYTES - _LENGTH_BYTES : _PREFIX_BYTES], "little")
    groups = []
    for ticket, lengths, digest in zip(header.tickets, header.lengths, header.digests, strict=True):
        ends = list(itertools.accumulate(lengths, initial=start))
        frames = [data[begin:end] for begin, end in itertools.pairwise(ends)]
        start = ends[-1]
        if _digest_frames(frames) != digest:
            raise CheckpointError(f"the group of ticket {ticket} in {path} is torn or altered", hint=_HINT)
        groups.append(decode_group(frames))
    return RecordedStep(
        order=header.order,
        adjustment=header.adjustment,
        groups=groups,
        metrics=header.metrics,
        seed=header.seed,
        share=header.share,
        num_shares=header.num_shares,
        settings=settings,
    )


def _digest_frames(frames: Sequence[wire.Frame]) -> str:
    digest = xxhash.xxh3_128()
    for frame in frames:
        digest.update(frame)
    return digest.hexdigest()
