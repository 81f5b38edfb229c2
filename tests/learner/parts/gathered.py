"""Ranks on two nodes that share no folder: they write a checkpoint, load it again, and train on."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from asyncrl.core.errors import CheckpointError, ConfigError
from learner.backend import Placement
from learner.checkpoint import CheckpointStore, node_folders
from learner.checkpoint.node_folders import NodeFolders
from learner.checkpoint.writer import BackgroundWriter, await_marks
from learner.ranks import Ranks
from tests.learner.parts.training import open_backend, train

STEP = 1
COLLECTIVE_S, HOLD_S, ON_ITS_WAY_S = 8.0, 16.0, 300.0
LEFT = (".step-00000009.partial", ".step-00000009.copy")
"""Folders of a start that was killed."""


class HeldFolders(NodeFolders):
    """Rank 0 takes longer to send a checkpoint than a collective may."""

    def send(self, *args: Any) -> None:
        time.sleep(HOLD_S)
        super().send(*args)


class BentFolders(NodeFolders):
    """A bit of each file changes on its way."""

    def _send(self, values: torch.Tensor, to: Sequence[int]) -> None:
        if values.dtype is torch.uint8 and bytes(values[:1].tolist()) != b"{":
            values[-1] ^= 1
        super()._send(values, to)


@contextlib.contextmanager
def on_its_way(folders: NodeFolders, job: dict[str, Any], num_bytes: int) -> Iterator[NodeFolders]:
    """Yield `folders`, with the way that the job wants for what goes back to other nodes."""
    before = node_folders.LENT_S, node_folders.SLOWEST_BYTES_PER_S
    mine = folders._ranks
    match job.get("way"):
        case "held":
            group = dist.new_group(timeout=timedelta(seconds=COLLECTIVE_S))
            impatient = Ranks(mine.rank, mine.world_size, torch.device("cpu"), group)
            folders = HeldFolders(impatient, folders._keepers, folders._group)
            node_folders.LENT_S, node_folders.SLOWEST_BYTES_PER_S = 0.1, num_bytes / ON_ITS_WAY_S
        case "bent":
            folders = BentFolders(mine, folders._keepers, folders._group)
            node_folders.LENT_S = 1.0
    try:
        yield folders
    finally:
        node_folders.LENT_S, node_folders.SLOWEST_BYTES_PER_S = before


def run_gathered(placement: Placement, job: dict[str, Any], out: Path) -> dict[str, Any]:
    """Write a checkpoint after one step, train a step, go back, and train it again.

    `nodes` has the folder of each rank, `needs_one` the key of what takes one folder. With `refused` rank 0
    finds a folder where that file is to be. The ranks `unwritable` cannot write into theirs. `way`: see
    `on_its_way`.
    """
    ranks = Ranks(placement.rank, placement.world_size, torch.device("cpu"))
    store = CheckpointStore(out / job["name"] / job["nodes"][placement.rank], keep=1)
    backend = open_backend(Path(job["model"]), placement, **job["changes"])
    for name in LEFT:
        (store.root / name / "critic").mkdir(parents=True, exist_ok=True)
    if placement.rank in job.get("unwritable", ()):
        store.root = store.root / "gone"
    try:
        folders = NodeFolders.find(ranks, store.root, needs_one=job.get("needs_one", ""))
    except ConfigError as error:
        backend.close()
        return {"error": str(error), "left": sorted(path.name for path in store.root.glob("*"))}
    train(backend, range(1))
    writer = BackgroundWriter(placement.rank, folders=folders)
    if ranks.is_leader:
        store.prepare(STEP)
        if job.get("refused"):
            (store.temporary(STEP) / job["refused"]).mkdir()
    ranks.add([1])
    writer.begin(store.temporary(STEP), {"": backend.snapshot_state, "critic": backend.snapshot_state})
    writer.join()
    result: dict[str, Any] = {"blind": folders.blind, "problem": writer.problem, "files": {}}
    if ranks.is_leader:
        try:
            result["files"] = await_marks(store.temporary(STEP), placement.world_size, 60.0)
            store.seal(STEP, 1, None, result["files"])
            store.verify_whole(STEP)
        except CheckpointError as error:
            result["error"] = str(error)
    if not job.get("refused"):
        num_bytes = sum(path.stat().st_size for path in store.folder(STEP).rglob("*.safetensors"))
        (num_bytes,) = ranks.largest([num_bytes])
        with on_its_way(folders, job, num_bytes) as way:
            result |= go_back(backend, ranks, way, store)
    backend.close()
    return result | {"left": sorted(path.name for path in store.root.iterdir())}


def go_back(backend: Any, ranks: Ranks, folders: NodeFolders, store: CheckpointStore) -> dict[str, Any]:
    """Train on, load the checkpoint, and train the same again."""
    ranks.add([1])
    straight = train(backend, range(1, 2))
    folder = store.folder(STEP)
    kept = Path()
    if folders.is_blind:  # of an earlier run, at this node
        kept = folder / "kept"
        folder.mkdir(exist_ok=True)
        kept.touch()
    try:
        with folders.lent(folder) as found:
            backend.load_state(found / "critic")
            backend.load_state(found)
    except CheckpointError as error:
        return {"error": str(error)}
    is_kept = not folders.is_blind or kept.exists()
    ranks.add([1])
    if folders.is_blind:
        shutil.rmtree(folder, ignore_errors=True)
    return {"is_equal": straight == train(backend, range(1, 2)), "is_kept": is_kept}
