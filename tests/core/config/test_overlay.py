"""Several files as one configuration: each is laid over those before it."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl.core.config.load import load, load_config
from asyncrl.core.config.reading.problems import ConfigProblems

BASE = """\
model: {path: m}
data: {train: [one.parquet, two.parquet]}
reward: {fn: gsm8k}
learner:
  lr: 1e-4
  steps: 10
"""


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("base.yaml").write_text(BASE)


def over(text: str) -> Path:
    Path("over.yaml").write_text(text)
    return Path("over.yaml")


def test_a_later_file_wins_key_by_key_and_options_win_over_all_files() -> None:
    merged = load_config(["base.yaml", over("learner: {lr: 1e-5}\nrun: {name: b}\n")], ["run.name=c"])
    assert (merged.learner.lr, merged.learner.steps, merged.run.name) == (1e-5, 10, "c")


def test_a_list_is_replaced_whole() -> None:
    merged = load_config(["base.yaml", over("data: {train: three.parquet}\n")])
    assert [source.path for source in merged.data.train] == ["three.parquet"]


def test_an_empty_section_changes_nothing() -> None:
    assert load_config(["base.yaml", over("learner:\n")]).learner.steps == 10


def test_the_order_of_the_files_counts() -> None:
    later = over("learner: {steps: 20}\n")
    assert load_config(["base.yaml", later]).learner.steps == 20
    assert load_config([later, "base.yaml"]).learner.steps == 10


def test_every_problem_has_the_place_in_its_own_file_in_the_order_of_the_files() -> None:
    later = over("learner:\n\n  steps: many\nrollout: {replicaz: 2}\n")
    Path("base.yaml").write_text(BASE + "  lrr: 1\n")
    with pytest.raises(ConfigProblems) as caught:
        load(["base.yaml", later], ["staleness.max_lag=x"])
    places = [line.split(": ")[0] for line in str(caught.value).splitlines()]
    assert places == ["base.yaml:7:3", "over.yaml:3:10", "over.yaml:4:11", "--set staleness.max_lag=x"]


def test_a_value_has_the_place_of_the_file_that_set_it_last() -> None:
    places = load(["base.yaml", over("data:\n  train: x.parquet\nlearner: {lr: 1}\n")]).places
    assert places.of_value(("data", "train", "0")) == "over.yaml:2:10"
    assert places.of_value(("learner", "lr")) == "over.yaml:3:15"
    assert places.of_value(("learner", "steps")) == "base.yaml:6:10"


def test_a_file_that_holds_no_sections_is_named() -> None:
    with pytest.raises(ConfigProblems, match=r"over\.yaml:1:1: the file is empty"):
        load(["base.yaml", over("")])
