"""Data in a configuration: what is told before anything starts, and what paths become."""

import json
from pathlib import Path
from typing import Any

import pyarrow
import pytest

from asyncrl.core.config.load import dump_resolved, load_config
from asyncrl.core.config.reading.problems import ConfigProblems
from asyncrl.core.config.tree import Config, DataSection
from asyncrl.planner.plan.prepare import is_builtin
from asyncrl.planner.plan.sources import check_sources, resolve_sources

BASE = "model: {path: m}\nreward: {fn: gsm8k}\n"


@pytest.fixture
def good(tmp_path: Path) -> str:
    (tmp_path / "a.jsonl").write_text('{"prompt": "1", "ground_truth": "1"}\n')
    return str(tmp_path / "a.jsonl")


def problems_of(**data: Any) -> list[str]:
    return list(check_sources(DataSection(**data), Path("nowhere"), is_builtin))


def test_each_source_is_checked_and_named_by_its_number(good: str):
    assert problems_of(train=[good, {"path": good, "filter": "unique"}], eval=["builtin:digit_sort"]) == []
    found = problems_of(train=[good, {"path": "gone.parquet"}], eval="gone.jsonl")
    assert found == [
        "data.train.1: gone.parquet does not exist",
        "data.eval: gone.jsonl does not exist",
    ]


def test_functions_of_filters_and_curricula_must_be_there(good: str, tmp_path: Path):
    (tmp_path / "mine.py").write_text("def keep(row): return True\n")
    (tmp_path / "bad.py").write_text("def keep(:\n")
    mine, bad = tmp_path / "mine.py", tmp_path / "bad.py"
    assert problems_of(train=[{"path": good, "filter": ["tokens::9", f"{mine}:keep"]}]) == []
    (line,) = problems_of(train=[{"path": good, "filter": f"{mine}:other"}])
    assert "defines no function 'other'" in line
    (line,) = problems_of(train=good, order=f"{tmp_path}/absent.py:key")
    assert line.startswith("data.order: there is no file")
    (line,) = problems_of(train=good, order=f"{bad}:key")
    assert "is no Python file" in line
    for text in ("from elsewhere import *", "async def key(row): ..."):
        (tmp_path / "mine.py").write_text(text)
        assert problems_of(train=good, order=f"{mine}:key") == []


def test_a_curriculum_of_a_field_that_a_row_lacks_is_told_by_the_row(tmp_path: Path):
    rows = [{"prompt": "1", "ground_truth": "1", "extra_info": {"level": level}} for level in (1, 2, "3", 4)]
    source = tmp_path / "levels.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert problems_of(train=str(source), order="extra_info.level") == []
    (line,) = problems_of(train=str(source), order="extra_info.levl")
    assert line.startswith(f"data.order: {source}, row 0: the key 'extra_info.levl' is None")
    source.write_text(source.read_text() + json.dumps(rows[0] | {"extra_info": {}}) + "\n")
    (line,) = problems_of(train=[str(source), str(source)], order="extra_info.level", eval=str(source))[:1]
    assert "row 4: the key 'extra_info.level' is None" in line
    filters = [f"{tmp_path / 'mine.py'}:keep"]
    (tmp_path / "mine.py").write_text("def keep(row): return 'level' in row['extra_info']\n")
    assert problems_of(train=[{"path": str(source), "filter": filters}], order="extra_info.level") == []


def test_a_folder_must_be_one_split_of_the_datasets_library(tmp_path: Path):
    (tmp_path / "saved" / "train").mkdir(parents=True)
    (line,) = problems_of(train=str(tmp_path / "saved"))
    assert "is not a folder of the datasets library" in line
    rows = pyarrow.table({"prompt": ["1"], "ground_truth": ["1"]})
    with pyarrow.ipc.new_stream(str(tmp_path / "saved" / "train" / "data.arrow"), rows.schema) as stream:
        stream.write_table(rows)
    (tmp_path / "saved" / "train" / "state.json").write_text('{"_data_files": [{"filename": "data.arrow"}]}')
    assert problems_of(train=str(tmp_path / "saved" / "train")) == []
    (line,) = problems_of(train=str(tmp_path / "saved"))
    assert f"Name one of them, as {tmp_path / 'saved' / 'train'}" in line


def test_paths_become_absolute_and_names_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    data = DataSection(
        train=["a.jsonl", {"path": "b.jsonl", "filter": ["unique", "f.py:keep"]}], order="f.py:key"
    )
    found = resolve_sources(data, lambda name, path: f"/{name}/{path}")
    assert [source.path for source in found.train] == ["/train/a.jsonl", "/train/b.jsonl"]
    assert found.train[1].filter == ("unique", f"{tmp_path / 'f.py'}:keep")
    assert (found.eval, found.curriculum) == (None, f"{tmp_path / 'f.py'}:key")


def test_a_path_and_a_list_of_sources_are_read_and_written_back(tmp_path: Path):
    for text in (
        "data: {train: a.parquet}",
        "data: {train: [a, {path: b, weight: 2, filter: [unique, 'tokens:1:5']}], eval: [a, b]}",
    ):
        (tmp_path / "a.yaml").write_text(f"{BASE}{text}\n")
        config = load_config(tmp_path / "a.yaml")
        (tmp_path / "b.yaml").write_text(dump_resolved(config))
        assert load_config(tmp_path / "b.yaml") == config
    assert config.data.train[1].weight == 2.0


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"train": 5}, "data.train is 5, but must be a list"),
        ({"train": []}, "data.train is [], but must be a list with 1 or more items"),
        ({"train": [{"path": "a", "wieght": 2}]}, "unknown key 'wieght' in 'data.train.0'. Did you mean"),
        ({"train": [{"path": "a", "weight": 0}]}, "data.train.0.weight is 0, but must be greater than 0"),
        ({"train": [{"weight": 1}]}, "data.train.0.path is missing"),
        ({"train": "a", "eval": [{"path": "a", "weight": 3}]}, "a weight does nothing in data.eval"),
    ],
)
def test_what_is_wrong_with_a_source_is_told_at_its_place(tmp_path: Path, data: dict[str, Any], said: str):
    (tmp_path / "a.yaml").write_text(f"{BASE}data: {json.dumps(data)}\n")
    with pytest.raises(ConfigProblems) as caught:
        load_config(tmp_path / "a.yaml")
    assert "a.yaml:3:" in str(caught.value) and said in str(caught.value)


def test_several_samples_need_a_temperature():
    sections = {"model": {"path": "m"}, "data": {"train": "t", "eval": "t"}, "reward": {"fn": "f"}}
    with pytest.raises(ValueError, match="repeats the same answer"):
        Config(**sections, eval={"samples": 2, "temperature": 0.0})
