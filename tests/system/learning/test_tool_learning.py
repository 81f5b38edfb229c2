"""A task that needs its tool, learned through `asyncrl up`: call the calculator, then copy what it says."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from asyncrl.cli.audit.report import verify_run
from tests.system.learning.test_learning import gain_in_standard_errors
from tests.system.parts.up_run import QUICKSTART, UpRun

pytestmark = pytest.mark.long
TOOL_PRODUCT = QUICKSTART.with_name("tool_product.yaml")


@pytest.fixture(scope="module")
def run(up: Callable[..., UpRun]) -> UpRun:
    run = up("tool_product", "learner.steps=60", config=TOOL_PRODUCT)
    code, output = run.finish()
    assert code == 0, output
    return run


def test_the_tool_is_learned(run: UpRun) -> None:
    summary = run.summary()
    assert summary["accuracy_start"] <= 0.35
    assert summary["accuracy_end"] >= summary["accuracy_start"] + 0.3
    assert gain_in_standard_errors(run.rows()) > 4


def test_episodes_have_more_turns_once_the_tool_pays(run: UpRun) -> None:
    """The prompt, a call, its result and the answer are four; a guess is two."""
    turns = [row["num_turns/mean"] for row in run.rows()]
    assert max(row["num_turns/max"] for row in run.rows()) == 4
    assert sum(turns[-5:]) > sum(turns[:5]) + 2.5


def test_without_the_tool_there_is_nothing_to_learn(up: Callable[..., UpRun]) -> None:
    """One turn is no time for an answer after a call: no product can be known."""
    run = up("no_tool", "learner.steps=20", "rollout.environment.max_turns=1", config=TOOL_PRODUCT)
    code, output = run.finish()
    assert code == 0, output
    assert run.summary()["accuracy_end"] <= 0.02


def test_a_recount_of_the_journal_finds_nothing_wrong(run: UpRun) -> None:
    found = verify_run(str(run.folder), "")
    assert found["findings"] == []
    assert run.summary()["ledger_residue"] == 0
    assert max(row["staleness/lag_max_trained"] for row in run.rows()) <= 4


def test_the_configuration_of_the_run_names_the_environment(run: UpRun) -> None:
    assert "environment:" in Path(run.folder / "resolved.yaml").read_text()
    assert json.loads((run.folder / "summary.json").read_text())["ledger"]["trained"] == 60 * 16
