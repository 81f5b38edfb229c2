"""Inventory of a node: taken on the node, judged against home."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from asyncrl.control.ray.inventory import (
    PACKAGES,
    Inventory,
    digest_path,
    find_differences,
    needed_paths,
    take_inventory,
)
from asyncrl.core.config.tree import Config

KEYS = {"model.path": "/models/m", "data.train.0": "/data/p.parquet"}
HERE = Inventory({"torch": "2.13.0", "vllm": "0.32.0"}, {"/models/m": "a1", "/data/p.parquet": "b2"})


def compare(node: Inventory | str) -> list[str]:
    return list(find_differences(HERE, {"10.0.0.2": node}, KEYS))


def test_a_node_that_has_the_same_is_not_mentioned() -> None:
    assert compare(HERE) == []


def test_everything_that_a_node_lacks_is_named_with_the_node() -> None:
    node = Inventory({"torch": "2.12.1"}, {"/models/m": "", "/data/p.parquet": "b3"})
    assert compare(node) == [
        "node 10.0.0.2: torch is 2.12.1, here it is 2.13.0",
        "node 10.0.0.2: vllm is missing, here it is 0.32.0",
        "node 10.0.0.2: model.path: there is no readable '/models/m'",
        "node 10.0.0.2: data.train.0: '/data/p.parquet' is not the same as here",
    ]


def test_a_node_that_cannot_be_asked_is_named_with_the_reason() -> None:
    assert compare("gave no answer within 60 s") == ["node 10.0.0.2: gave no answer within 60 s"]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"vocab_size": 8}')
    with (folder / "model.safetensors").open("wb") as file:
        file.truncate(5 << 20)
    return folder


def test_a_model_is_known_by_its_small_files_and_the_sizes_of_the_large_ones(model: Path) -> None:
    first = digest_path(model)
    os.utime(model / "config.json", (0, 0))
    assert digest_path(model) == first
    (model / "config.json").write_text('{"vocab_size": 9}')
    second = digest_path(model)
    with (model / "model.safetensors").open("r+b") as file:
        file.truncate((5 << 20) + 1)
    assert len({first, second, digest_path(model), ""}) == 4


def test_data_is_known_by_its_size_and_both_ends(tmp_path: Path) -> None:
    path, found = tmp_path / "data.parquet", set()
    for place in (None, 0, (3 << 20) - 1):
        data = bytearray(3 << 20)
        if place is not None:
            data[place] = 1
        path.write_bytes(data)
        found.add(digest_path(path))
    path.write_bytes(bytes(1))
    found.add(digest_path(path))
    assert len(found) == 4


def test_what_is_not_there_has_no_digest(tmp_path: Path) -> None:
    assert digest_path(tmp_path / "nothing") == ""


def test_a_nodes_own_inventory_lists_every_package_and_its_own_source(model: Path) -> None:
    found = take_inventory((str(model), "/nowhere"))
    assert set(found.versions) == {*PACKAGES, "python", "asyncrl's source"}
    assert found.versions["torch"] and found.versions["vllm"]
    assert found.files == {str(model): digest_path(model), "/nowhere": ""}
    assert found == take_inventory((str(model), "/nowhere"))


def test_all_that_replicas_read_is_asked_for(model: Path, tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text("def score(): ...")
    (tmp_path / "sets").mkdir()
    config = Config(
        model={"path": str(model)},
        data={"train": [f"{tmp_path}/a.parquet", f"{tmp_path}/sets/train"], "eval": f"{tmp_path}/e.jsonl"},
        reward={"fn": [{"fn": "gsm8k"}, {"fn": f"{tmp_path}/reward.py:score"}, {"fn": "http://host:1/x"}]},
    )
    assert needed_paths(config) == {
        "model.path": str(model),
        "data.train.0": str(tmp_path),
        "data.train.1": f"{tmp_path}/sets",
        "data.eval.0": str(tmp_path),
        "reward.fn.1": f"{tmp_path}/reward.py",
    }
