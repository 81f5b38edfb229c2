"""Checkpoint folders of ranks on several nodes: whether all see rank 0's, and the way of files where not.

    save:     a rank that does not see rank 0's folder writes into its own node's; its thread sends the files
    restore:  rank 0 sends the checkpoint to one rank of each other folder, which lays a copy there for all
    start:    that rank removes there what an earlier start has left

Each file's digest goes with it and is checked where it arrives.

Owns a process group beside those of training, for threads may not call their collectives. Invariant: rank 0's
folder holds what it would hold if all ranks saw it, byte for byte.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import socket
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
import xxhash

from asyncrl.core.errors import CheckpointError, ConfigError
from asyncrl.core.files.private import make_secret
from learner.checkpoint.store import digests_of
from learner.ranks import Ranks

log = logging.getLogger(__name__)

CHUNK_BYTES = 4 << 20
SEND_DEADLINE_S = 1800.0
"""Of each chunk, and so of the wait for its sender to have written."""
LENT_S, SLOWEST_BYTES_PER_S = 300.0, 0.05e9
"""Wait for a checkpoint to be on all nodes: so long, and what its bytes take at the slowest."""
LEFTOVERS = (".step-*.partial", ".step-*.copy", ".rank-*")
REASON_BYTES = 256


class Parcel(msgspec.Struct, frozen=True):
    """What comes before the bytes of some files.

    Attributes:
        note: Of the sender.
        files: Size and xxh3-128 digest of each file, by its path in the folder, in order.
    """

    note: bytes
    files: dict[str, tuple[int, str]]


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
            ConfigError: A rank cannot write there; or there are several. On every rank.
        """
        token = ranks.share_bytes(make_secret().encode() if ranks.is_leader else None).decode()
        marks = [root / f".rank-{rank}-{token}" for rank in range(ranks.world_size)]
        _leave_mark(ranks, marks[ranks.rank])
        keeper = next(rank for rank, mark in enumerate(marks) if mark.exists())
        found = ranks.gather([ranks.rank * ranks.world_size + keeper])
        keepers = [code % ranks.world_size for code in found]
        if ranks.rank == keeper:
            _remove_leftovers(root)
        ranks.add([1])
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
        digests, num_bytes = dict[str, str](), 0
        if self._ranks.is_leader:
            digests = digests_of(folder)
            num_bytes = sum((folder / name).stat().st_size for name in digests)
        (num_bytes,) = self._ranks.largest([num_bytes])
        if self._ranks.is_leader:
            self.send(folder, digests, b"", keepers)
        elif is_keeper:
            shutil.rmtree(copy, ignore_errors=True)
            if problem := self.receive(copy, 0)[1]:
                raise problem
        self._await_all(folder, num_bytes)
        yield copy if self.is_blind else folder
        self._ranks.add([1])
        if is_keeper:
            shutil.rmtree(copy)

    def send(self, folder: Path, digests: Mapping[str, str], note: bytes, to: Sequence[int] = (0,)) -> None:
        """Send files of `folder`, each with its digest, and a note, to the ranks `to`."""
        with contextlib.ExitStack() as stack:  # all are open before one is announced
            files = {name: stack.enter_context((folder / name).open("rb")) for name in digests}
            sizes = {name: os.fstat(file.fileno()).st_size for name, file in files.items()}
            parcel = msgspec.json.encode(Parcel(note, {name: (sizes[name], digests[name]) for name in sizes}))
            self._send(torch.tensor([len(parcel)]), to)
            self._send(torch.frombuffer(bytearray(parcel), dtype=torch.uint8), to)
            for file in files.values():
                while chunk := file.read(CHUNK_BYTES):
                    self._send(torch.frombuffer(bytearray(chunk), dtype=torch.uint8), to)

    def receive(self, folder: Path, sender: int) -> tuple[bytes, OSError | CheckpointError | None]:
        """Write the files that `sender` sends into `folder`.

        Returns:
            Its note; and what the disk refused, or which file did not arrive as its digest says.
        """
        length = torch.zeros(1, dtype=torch.long)
        self._receive(length, sender)
        encoded = torch.empty(int(length), dtype=torch.uint8)
        self._receive(encoded, sender)
        parcel = msgspec.json.decode(encoded.numpy().tobytes(), type=Parcel)
        problem: OSError | CheckpointError | None = None
        for name, (size, wanted) in parcel.files.items():
            chunks = self._chunks(size, sender)
            try:
                digest = _write(folder / name, chunks)
            except OSError as error:
                problem = problem or error
                for _ in chunks:  # the sender knows nothing of it
                    pass
                continue
            if digest != wanted:
                where = f"{folder / name} came damaged from rank {sender} to node {socket.gethostname()}"
                problem = problem or CheckpointError(f"{where}: its digest is {digest}, not {wanted}")
        return parcel.note, problem

    def _chunks(self, size: int, sender: int) -> Iterator[memoryview]:
        for at in range(0, size, CHUNK_BYTES):
            chunk_B = torch.empty(min(CHUNK_BYTES, size - at), dtype=torch.uint8)
            self._receive(chunk_B, sender)
            yield chunk_B.numpy().data

    def _await_all(self, folder: Path, num_bytes: int) -> None:
        """Wait until all ranks are here: files on their way take longer than a collective may."""
        assert self._group is not None, "there are several folders"
        options = dist.AllreduceOptions()
        within_s = LENT_S + num_bytes / SLOWEST_BYTES_PER_S
        options.timeout = timedelta(seconds=within_s)
        try:
            self._group.allreduce([torch.ones(1)], options).wait(options.timeout)
        except RuntimeError as error:
            size = f"{num_bytes / 1e9:.3g} GB"
            raise CheckpointError(
                f"{folder} did not come to all nodes: {size}, at most {within_s:.0f} s: {error}",
                hint="See the log of each rank",
            ) from error

    def _send(self, values: torch.Tensor, to: Sequence[int]) -> None:
        for work in [dist.isend(values, one, self._group) for one in to]:
            assert work is not None, "every rank is in the group"
            work.wait()

    def _receive(self, values: torch.Tensor, sender: int) -> None:
        dist.recv(values, sender, group=self._group)


def _leave_mark(ranks: Ranks, mark: Path) -> None:
    """Leave this rank's mark; raise ConfigError on every rank if one cannot. Collective."""
    mine = ""
    try:
        mark.touch()
    except OSError as error:
        mine = f"rank {ranks.rank} on node {socket.gethostname()}: {error.strerror}"
    slots = [bytes(REASON_BYTES)] * ranks.world_size
    slots[ranks.rank] = mine.encode()[: REASON_BYTES - 1].ljust(REASON_BYTES, b"\0")
    reasons = ranks.merge_bytes(b"".join(slots)).decode(errors="replace").split("\0")
    if any(reasons):
        with contextlib.suppress(OSError):
            mark.unlink()
        raise ConfigError(
            f"{mark.parent} cannot be written: {'; '.join(filter(None, reasons))}",
            hint="Every rank of the learner writes checkpoints: make run.dir writable on each node",
        )


def _remove_leftovers(root: Path) -> None:
    """Remove marks, and what a start that was killed has written or been lent."""
    for path in (path for pattern in LEFTOVERS for path in root.glob(pattern)):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _write(path: Path, chunks: Iterator[memoryview]) -> str:
    """Write a file; return its xxh3-128 digest, hex."""
    digest = xxhash.xxh3_128()
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        for chunk in chunks:
            digest.update(chunk)
            file.write(chunk)
    return digest.hexdigest()
