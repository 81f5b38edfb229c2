"""Files of checkpoints on their way to rank 0: two writers of one process, and a queue for a network."""

from __future__ import annotations

import contextlib
import queue
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from asyncrl.core.config.tree import Config
from asyncrl.core.errors import CheckpointError
from learner.checkpoint import CheckpointStore
from learner.checkpoint.node_folders import CHUNK_BYTES, NodeFolders
from learner.checkpoint.pieces import whole
from learner.checkpoint.snapshot import KINDS, PieceState, Snapshot
from learner.checkpoint.writer import BackgroundWriter, await_marks
from learner.orders import Restore
from learner.ranks import Ranks
from learner.service import LearnerService

WAIT_S = 30.0
NUM_VALUES = CHUNK_BYTES // 8 + 3
"""Of each kind: a file of several chunks, the last of them short."""


class QueueFolders(NodeFolders):
    """A rank of two, of which the second does not see the first one's folder."""

    def __init__(self, rank: int, way: queue.SimpleQueue[torch.Tensor]) -> None:
        super().__init__(Ranks(rank, 2, torch.device("cpu")), keepers=(0, 1))
        self._way = way

    def _send(self, values: torch.Tensor, to: Sequence[int]) -> None:
        assert tuple(to) == (0,)
        self._way.put(values.clone())

    def _receive(self, values: torch.Tensor, sender: int) -> None:
        assert sender == 1
        values.copy_(self._way.get(timeout=WAIT_S))


class LostFolders(QueueFolders):
    """A rank whose files get nowhere."""

    def _send(self, values: torch.Tensor, to: Sequence[int]) -> None:
        raise RuntimeError("Connection closed by peer")


class BentFolders(QueueFolders):
    """A rank of whose files the last chunk of each loses a bit."""

    def _send(self, values: torch.Tensor, to: Sequence[int]) -> None:
        if 1 < values.numel() < CHUNK_BYTES and bytes(values[:1].tolist()) != b"{":
            values[-1] ^= 1
        super()._send(values, to)


def take(rank: int) -> Snapshot:
    values = {kind: torch.arange(NUM_VALUES, dtype=torch.float32) + rank for kind in KINDS}
    piece = PieceState(whole(f"w{rank}", (NUM_VALUES,)), values, 1.0)
    return Snapshot(rank, {"world_size": 2}, (piece,), {}, {})


def write(
    stores: list[CheckpointStore], step: int, shares: bool, kind: type[QueueFolders] = QueueFolders
) -> dict[str, str]:
    """Have two ranks write a checkpoint of two models; return rank 0's digests of all files."""
    way = queue.SimpleQueue[torch.Tensor]()
    folders = [None, None] if shares else [kind(rank, way) for rank in range(2)]
    writers = [BackgroundWriter(rank, folders=folders[rank]) for rank in range(2)]
    for rank, writer in enumerate(writers):
        folder = stores[0 if shares else rank].temporary(step)
        writer.begin(folder, {"": lambda rank=rank: take(rank), "critic": lambda rank=rank: take(rank)})
    found = await_marks(stores[0].temporary(step), 2, WAIT_S)
    for writer in writers:
        writer.join()
        assert not writer.problem
    return found


@pytest.fixture
def stores(tmp_path: Path) -> list[CheckpointStore]:
    return [CheckpointStore(tmp_path / name, keep=1) for name in ("home", "other")]


def test_rank_0_holds_the_same_files_whether_they_are_written_there_or_sent(
    stores: list[CheckpointStore],
) -> None:
    for step, shares in ((1, True), (2, False)):
        stores[0].prepare(step)
        digests = write(stores, step, shares)
        assert len(digests) == 8
        stores[0].seal(step, 1, None, digests)
        stores[0].verify_whole(step)
    for name in digests:
        first, second = (stores[0].folder(step) / name for step in (1, 2))
        assert first.read_bytes() == second.read_bytes(), name
    assert list(stores[1].root.iterdir()) == [], "a node keeps nothing of what it has sent"


def test_a_file_that_rank_0s_disk_refuses_fails_this_checkpoint_and_no_later_one(
    stores: list[CheckpointStore],
) -> None:
    (stores[0].prepare(1) / "rank-00001.safetensors").mkdir()
    with pytest.raises(CheckpointError, match=r"the files of rank 1: \[Errno 21\]"):
        write(stores, 1, shares=False)
    stores[0].prepare(2)
    assert len(write(stores, 2, shares=False)) == 8


def test_a_file_that_changes_on_its_way_fails_this_checkpoint_and_is_named(
    stores: list[CheckpointStore],
) -> None:
    home = stores[0].prepare(1)
    with pytest.raises(CheckpointError) as caught:
        write(stores, 1, shares=False, kind=BentFolders)
    where = f"{home / 'rank-00001.safetensors'} came damaged from rank 1 to node {socket.gethostname()}"
    assert f"the files of rank 1: {where}: its digest is " in str(caught.value)
    stores[0].prepare(2)
    assert len(write(stores, 2, shares=False)) == 8


def test_a_rank_whose_files_do_not_travel_says_so_and_takes_no_further_checkpoint(
    stores: list[CheckpointStore],
) -> None:
    writer = BackgroundWriter(1, folders=LostFolders(1, queue.SimpleQueue()))
    writer.begin(stores[1].temporary(1), {"": lambda: take(1)})
    writer.join()
    assert writer.has_marked.is_set()
    assert writer.problem == "rank 1: files of checkpoints do not travel: Connection closed by peer"
    with pytest.raises(CheckpointError, match="do not travel"):
        writer.begin(stores[1].temporary(2), {"": lambda: take(1)})


def test_a_rank_alone_shares_its_folder_and_leaves_nothing_in_it(tmp_path: Path) -> None:
    alone = NodeFolders.find(Ranks(0, 1, torch.device("cpu")), tmp_path, needs_one="run.record")
    assert not alone.blind and not list(tmp_path.iterdir())


class WatchedFolders(QueueFolders):
    """A rank that notes its service's state before and after a checkpoint has come."""

    service: LearnerService

    @contextlib.contextmanager
    def lent(self, folder: Path) -> Iterator[Path]:
        self.seen = [self.service.status().state]
        yield folder
        self.seen.append(self.service.status().state)


def test_a_rank_syncs_while_its_checkpoint_is_sent_and_starts_while_it_loads(
    stores: list[CheckpointStore], tmp_path: Path
) -> None:
    config = Config(model={"path": "m"}, data={"train": "t"}, reward={"fn": "gsm8k"})
    loaded: list[Path] = []
    policy = SimpleNamespace(load_state=loaded.append, set_lr=lambda lr: None)
    models: Any = SimpleNamespace(policy=policy, critic=None, reference=None)
    objective: Any = SimpleNamespace(needs_prox=True, restore_controllers=lambda state: None)
    folders = WatchedFolders(1, queue.SimpleQueue())
    parts: Any = (config, Ranks(1, 2, torch.device("cpu")), models, objective, None, stores[1], tmp_path)
    folders.service = LearnerService(*parts, folders=folders)
    for states in (["SYNCING", "STARTING"], ["READY", "READY"]):  # the second is a rollback
        folders.service._perform(Restore(3, has_checkpoint=True))
        assert folders.seen == states and folders.service.status().state == "READY"
    assert loaded == [stores[1].folder(3)] * 2
