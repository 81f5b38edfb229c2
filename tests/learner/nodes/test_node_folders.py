"""Checkpoints of ranks on nodes that share a folder, or do not."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest

from tests.learner.parts.launching import run_ranks
from tests.learner.parts.samples import save_model

pytestmark = pytest.mark.long

NODES = {
    "shared": ["home"] * 4,
    "by_node": ["home", "home", "b", "b"],
    "mixed": ["home", "b", "c", "b"],
}


def job_of(model: Path, name: str, **more: Any) -> dict[str, Any]:
    layout = {"tp": 2, "dp": 2, "max_tokens_per_microbatch": 64}
    return {"name": name, "kind": "gathered", "model": model, "changes": layout, "nodes": NODES[name], **more}


def results_of(out: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads((out / f"{name}.{rank}.json").read_text()) for rank in range(4)]


def test_rank_0_has_the_checkpoint_of_all_ranks_and_all_go_on_from_it(
    tmp_path: Path,
) -> None:
    """Files are the same, byte for byte, whether ranks write them there or send them.

    Folders that an earlier start has left are gone, and the way back may take longer than a collective.
    """
    model = save_model(tmp_path / "model", "qwen3")
    jobs = [job_of(model, name) for name in ("shared", "by_node")]
    run_ranks(4, [*jobs, job_of(model, "mixed", way="held")], tmp_path)
    wanted = results_of(tmp_path, "shared")[0]["files"]
    assert len(wanted) == 16 and sum(name.startswith("critic/") for name in wanted) == 8
    for name, nodes in NODES.items():
        found = results_of(tmp_path, name)
        assert found[0]["files"] == wanted, name
        for rank, one in enumerate(found):
            assert one["is_equal"] and one["is_kept"] and not one["problem"], (name, rank)
            assert one["blind"] == [blind for blind, node in enumerate(nodes) if node != "home"]
            assert one["left"] == (["step-00000001"] if nodes[rank] == "home" else []), (name, rank)


def test_what_takes_one_folder_is_refused_on_every_rank_where_there_are_several(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", "qwen3")
    run_ranks(4, [job_of(model, name, needs_one="run.record") for name in ("shared", "mixed")], tmp_path)
    assert all(one["is_equal"] for one in results_of(tmp_path, "shared"))
    for one in results_of(tmp_path, "mixed"):
        assert one["error"].startswith("run.record: learner ranks [1, 2, 3] do not see rank 0's")
        assert "share run.dir" in one["error"] and not one["left"]


def test_a_rank_that_cannot_write_is_named_on_every_rank_with_its_folder(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", "qwen3")
    run_ranks(4, [job_of(model, "by_node", unwritable=[1, 3])], tmp_path)
    for rank, one in enumerate(results_of(tmp_path, "by_node")):
        folder = tmp_path / "by_node" / NODES["by_node"][rank] / ("gone" if rank in (1, 3) else "")
        first, second = (f"rank {at} on node {socket.gethostname()}: No such file" for at in (1, 3))
        assert one["error"].startswith(f"{folder} cannot be written: {first} or directory; {second}")
        assert not [name for name in one["left"] if name.startswith(".rank")]


def test_a_file_that_changes_on_its_way_back_is_named_and_not_loaded(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", "qwen3")
    run_ranks(4, [job_of(model, "by_node", way="bent")], tmp_path)
    errors = [one["error"] for one in results_of(tmp_path, "by_node")]
    where = f"came damaged from rank 0 to node {socket.gethostname()}"
    assert ".step-00000001.copy/critic/rank-00000.safetensors" in errors[2] and where in errors[2]
    for rank in (0, 1, 3):
        assert "did not come to all nodes" in errors[rank], errors[rank]


def test_files_that_rank_0s_disk_refuses_are_named_and_the_ranks_go_on(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", "qwen3")
    run_ranks(4, [job_of(model, "by_node", refused="rank-00002.safetensors")], tmp_path)
    found = results_of(tmp_path, "by_node")
    assert "the files of rank 2: [Errno 21]" in found[0]["error"], found[0]
    assert [one["problem"] for one in found] == [""] * 4
