"""`rollout.environment`: how it is written, checked before a start, and resolved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from asyncrl.core.config.load import dump_resolved, load_config
from asyncrl.core.config.reading.problems import ConfigProblems
from asyncrl.core.errors import ConfigError
from asyncrl.planner.plan import check
from asyncrl.planner.plan.prepare import prepare
from configs import shipped

TOOL_PRODUCT = shipped()["tool_product"]
LOCAL = ("model.path={folder}", "data.train={folder}/train.jsonl", "data.eval=null", "eval.every_steps=0")


def load_local(folder: Path, *changes: str) -> Any:
    (folder / "train.jsonl").write_text('{"prompt": "1=", "ground_truth": "1"}\n')
    return load_config(TOOL_PRODUCT, [*(text.format(folder=folder) for text in LOCAL), *changes])


def test_a_name_alone_is_an_environment():
    environment = load_config(TOOL_PRODUCT, ["rollout.environment=tools"]).rollout.environment
    assert environment is not None
    assert (environment.name, environment.max_turns, environment.arguments) == ("tools", 8, {})


def test_arguments_come_back_from_the_resolved_configuration(tmp_path: Path):
    config = load_config(TOOL_PRODUCT)
    (tmp_path / "resolved.yaml").write_text(dump_resolved(config))
    assert load_config(tmp_path / "resolved.yaml") == config
    assert config.rollout.environment is not None
    assert config.rollout.environment.arguments["call"] == r"\?(.+)"


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ("rollout.environment=5", "must be a section"),
        ("rollout.environment={max_turns: 3}", "name is missing"),
        ("rollout.environment={name: tools, max_turns: 0}", "1 or more"),
        ("rollout.response_tokens=lognormal:1:5", "does nothing with rollout.response_tokens"),
        ("rollout.environment.branches=3", "must be a multiple of rollout.environment.branches"),
        ("rollout.gateway={}", "does nothing with rollout.gateway"),
    ],
)
def test_what_is_wrong_with_it_is_said_with_its_place(change: str, problem: str):
    with pytest.raises(ConfigProblems, match=problem):
        load_config(TOOL_PRODUCT, [change])


@pytest.mark.parametrize("given", ["tools: 5", "tools: [5]", "tools: {python: 5}", "sandbox: 5", "call: 5"])
def test_an_argument_of_another_type_is_refused_by_name(given: str, tmp_path: Path):
    config = load_local(tmp_path, f"rollout.environment={{name: tools, {given}}}")
    with pytest.raises(ConfigError, match=r"rollout\.environment: an argument of 'tools' is of another type"):
        check(config)


def test_a_file_is_found_from_where_the_run_was_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    Path("guess.py").write_text("class Guess: ...\n")
    config = load_local(tmp_path, "rollout.environment=guess.py:Guess", f"run.dir={tmp_path}")
    environment = prepare(config, print).rollout.environment
    assert environment is not None and environment.name == f"{tmp_path / 'guess.py'}:Guess"


@pytest.mark.parametrize(
    ("name", "problem"),
    [("none.py:Guess", "there is no file"), ("guess.py:Other", "defines no function 'Other'")],
)
def test_a_file_or_class_that_is_not_there_is_refused_before_anything_starts(
    name: str, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    Path("guess.py").write_text("class Guess: ...\n")
    with pytest.raises(ConfigError, match=f"rollout.environment: .*{problem}"):
        check(load_local(tmp_path, f"rollout.environment={name}"))
