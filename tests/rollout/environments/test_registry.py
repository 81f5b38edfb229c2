"""Environments by name, by file, with arguments; and the example in the documentation."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from asyncrl.core.errors import ConfigError
from tests.rollout.environments.parts import load, make_prompt, run_episode

PAGE = Path(__file__).parents[3] / "docs" / "environments.md"
LINES_OF_AN_ENVIRONMENT = 30


def write_example(folder: Path) -> str:
    """Write the example of the page into a file; return its name for `rollout.environment`."""
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert len(code.splitlines()) <= LINES_OF_AN_ENVIRONMENT
    (folder / "guess.py").write_text(code)
    return "guess.py:Guess"


def test_the_example_of_the_page_runs_and_is_an_environment_in_thirty_lines(tmp_path: Path):
    spec = {"name": write_example(tmp_path), "max_turns": 4, "cost": 0.25}
    episodes = load(spec, tmp_path)
    assert episodes.max_turns == 4
    prompt = make_prompt("7=", "5")
    trajectory, _, reward = run_episode(episodes, [("2", [1]), ("9", [1]), ("5", [1])], prompt)
    assert (trajectory.reward, trajectory.finish_reason, trajectory.num_turns) == (0.5, "done", 3)
    assert reward.answers == []
    lost, _, _ = run_episode(episodes, [("2", [1])] * 4, prompt)
    assert (lost.reward, lost.finish_reason) == (0.0, "turns")


def test_a_name_alone_is_an_environment_with_all_defaults():
    assert load("tools").max_turns == 8
    assert load("tools").roles == ("tool",)
    assert load({"name": "tools", "role": "user"}).roles == ("user",)


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        ("shell", "no environment 'shell'"),
        ({"name": "tools", "speed": 3}, "speed"),
        ({"name": "gymnasium"}, "id"),
        ("missing.py:Guess", "does not exist"),
        ("guess.py:Other", "no class 'Other'"),
        ("guess.py:Step", "has no start, step, score, close"),
        ({"name": "guess.py:Guess", "speed": 3}, "speed"),
        ("broken.py:Guess", "ZeroDivisionError"),
        ({"name": "guess.py:Guess", "branches": 2}, "cannot go on from their recorded turns"),
    ],
)
def test_what_cannot_be_loaded_is_refused_with_the_reason(spec: Any, problem: str, tmp_path: Path):
    write_example(tmp_path)
    (tmp_path / "broken.py").write_text("1 / 0\n")
    with pytest.raises(ConfigError, match=re.escape(problem)):
        load(spec, tmp_path)
