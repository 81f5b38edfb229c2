"""Checkpoint folders of ranks on several nodes: whether all see rank 0's, and the way of files where not.

    save:     a rank that does not see rank 0's folder writes into its own node's; its thread sends the files
    restore:  rank 0 sends the checkpoint to one rank of each other folder, which lays a copy there for all

Owns a process group beside those of training, for threads may not call their collectives. Invariant: rank 0's
folder holds what it would hold if all ranks saw it, byte for byte.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist

from asyncrl.core.errors import ConfigError
from asyncrl.core.files.private import make_secret
from learner.ranks import Ranks

log = logging.getLogger(__name__)

CHUNK_BYTES = 4 << 20
SEND_DEADLINE_S = 1800.0
"""Of each chunk, and so of the wait for its sender to have written."""


class Parcel(msgspec.Struct, frozen=True):
    """What comes before the bytes of some files.

    Attributes:
        note: Of the sender.
        sizes: Of each file, by its path in the folder, in order.
    """

    note: bytes
    sizes: dict[str, int]


class NodeFolders:
    """One rank's view; see the module.

    Attributes:
        blind: The ranks that do not see rank 0's folder.
    """

    def __init__(
        self, ranks: Ranks, keepers: Sequence[int] = (), group: dist.ProcessGroup | None = None
    ) -> None:
        """Use `find`.

        Args:
            keepers: The first rank that sees each rank's folder; empty where all see one.
        """
        self._ranks, self._keepers, self._group = ranks, keepers, group
        self.blind = [rank for rank, keeper in enumerate(keepers) if keeper]

    @classmethod
    def find(cls, ranks: Ranks, root: Path, *, needs_one: str = "") -> NodeFolders:
        """Find out by trying who sees whose files in `root`. Collective.

        Args:
            needs_one: Key of a feature that needs one folder for all ranks.

        Raises:
            ConfigError: There are several, on every rank.
        """
        token = ranks.share_bytes(make_secret().encode() if ranks.is_leader else None).decode()
        marks = [root / f".rank-{rank}-{token}" for rank in range(ranks.world_size)]
        has_written = 1
        try:
            marks[ranks.rank].touch()
        except OSError as error:
            log.warning("%s cannot be written: %s", root, error)
            has_written = 0
        if ranks.add([has_written]) != [ranks.world_size]:  # no marks to look for
            return cls(ranks)
        keeper = next(rank for rank, mark in enumerate(marks) if mark.exists())
        found = ranks.gather([ranks.rank * ranks.world_size + keeper])
        marks[ranks.rank].unlink()
        keepers = [code % ranks.world_size for code in found]
        if not any(keepers):
            return cls(ranks)
        blind = (
            f"learner ranks {[rank for rank, seen in enumerate(keepers) if seen]} do not see rank 0's {root}"
        )
        if needs_one:
            hint = "Have all nodes share run.dir, or leave this key out"
            raise ConfigError(
                f"{needs_one}: {blind}, and files of this feature are not sent between nodes", hint=hint
            )
        if ranks.is_leader:
            log.info("%s: their files of checkpoints are sent there", blind)
        group = dist.new_group(timeout=timedelta(seconds=SEND_DEADLINE_S), backend="gloo")
        return cls(ranks, keepers, group)

    @property
    def is_blind(self) -> bool:
        """Whether this rank does not see rank 0's folder."""
        return self._ranks.rank in self.blind

    @contextlib.contextmanager
    def lent(self, folder: Path) -> Iterator[Path]:
        """Yield where this rank finds rank 0's `folder` in the block: as a copy beside it on other nodes.

        Collective.
        """
        if not self.blind:
            yield folder
            return
        copy = folder.with_name(f".{folder.name}.copy")  # the name itself may be taken
        keepers = sorted({keeper for keeper in self._keepers if keeper})
        is_keeper = self._ranks.rank in keepers
        if self._ranks.is_leader:
            for keeper in keepers:
                self.send(folder, _files(folder), b"", keeper)
        elif is_keeper:
            shutil.rmtree(copy, ignore_errors=True)
            if problem := self.receive(copy, 0)[1]:
                raise problem
        self._ranks.add([1])
        yield copy if self.is_blind else folder
        self._ranks.add([1])
        if is_keeper:
            shutil.rmtree(copy)

    def send(self, folder: Path, names: Sequence[str], note: bytes, to: int = 0) -> None:
        """Send files of `folder`, and a note, to the rank `to`."""
        with contextlib.ExitStack() as stack:  # all are open before one is announced
            files = [stack.enter_context((folder / name).open("rb")) for name in names]
            sizes = {name: os.fstat(file.fileno()).st_size for name, file in zip(names, files, strict=True)}
            parcel = msgspec.json.encode(Parcel(note, sizes))
            self._send(torch.tensor([len(parcel)]), to)
            self._send(torch.frombuffer(bytearray(parcel), dtype=torch.uint8), to)
            for file in files:
                while chunk := file.read(CHUNK_BYTES):
                    self._send(torch.frombuffer(bytearray(chunk), dtype=torch.uint8), to)

    def receive(self, folder: Path, sender: int) -> tuple[bytes, OSError | None]:
        """Write the files that `sender` sends into `folder`; return its note, and what the disk refused."""
        length = torch.zeros(1, dtype=torch.long)
        self._receive(length, sender)
        encoded = torch.empty(int(length), dtype=torch.uint8)
        self._receive(encoded, sender)
        parcel = msgspec.json.decode(encoded.numpy().tobytes(), type=Parcel)
        problem: OSError | None = None
        for name, size in parcel.sizes.items():
            chunks = self._chunks(size, sender)
            try:
                _write(folder / name, chunks)
            except OSError as error:
                problem = problem or error
                for _ in chunks:  # the sender knows nothing of it
                    pass
        return parcel.note, problem

    def _chunks(self, size: int, sender: int) -> Iterator[memoryview]:
        for at in range(0, size, CHUNK_BYTES):
            chunk_B = torch.empty(min(CHUNK_BYTES, size - at), dtype=torch.uint8)
            self._receive(chunk_B, sender)
            yield chunk_B.numpy().data

    def _send(self, values: torch.Tensor, to: int) -> None:
        dist.send(values, to, group=self._group)

    def _receive(self, values: torch.Tensor, sender: int) -> None:
        dist.recv(values, sender, group=self._group)


def _files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def _write(path: Path, chunks: Iterator[memoryview]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        for chunk in chunks:
            file.write(chunk)
