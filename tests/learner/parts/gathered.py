"""Ranks on two nodes that share no folder: they write a checkpoint, load it again, and train on."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch

from asyncrl.core.errors import CheckpointError, ConfigError
from learner.backend import Placement
from learner.checkpoint import CheckpointStore
from learner.checkpoint.node_folders import NodeFolders
from learner.checkpoint.writer import BackgroundWriter, await_marks
from learner.ranks import Ranks
from tests.learner.parts.training import open_backend, train

STEP = 1


def run_gathered(placement: Placement, job: dict[str, Any], out: Path) -> dict[str, Any]:
    """Write a checkpoint after one step, train a step, go back, and train it again.

    `nodes` has the folder of each rank, `needs_one` the key of what takes one folder. With `refused` rank 0
    finds a folder where that file is to be.
    """
    ranks = Ranks(placement.rank, placement.world_size, torch.device("cpu"))
    store = CheckpointStore(out / job["name"] / job["nodes"][placement.rank], keep=1)
    backend = open_backend(Path(job["model"]), placement, **job["changes"])
    try:
        folders = NodeFolders.find(ranks, store.root, needs_one=job.get("needs_one", ""))
    except ConfigError as error:
        backend.close()
        return {"error": str(error), "left": [path.name for path in store.root.iterdir()]}
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
        result |= go_back(backend, ranks, folders, store)
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
    with folders.lent(folder) as found:
        backend.load_state(found / "critic")
        backend.load_state(found)
    is_kept = not folders.is_blind or kept.exists()
    ranks.add([1])
    if folders.is_blind:
        shutil.rmtree(folder, ignore_errors=True)
    return {"is_equal": straight == train(backend, range(1, 2)), "is_kept": is_kept}
