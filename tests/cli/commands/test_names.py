"""The commands by name: help, their generated page, `--json`, shell completion."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from asyncrl.cli.app import app
from asyncrl.cli.commands.page import render
from tests.cli.commands.calling import asyncrl, make_folder

PAGE = Path(__file__).parents[3] / "docs" / "cli.md"
OF_ITS_OWN = ("data", "bench")
"""Groups whose commands other pages list."""


def commands_of(group: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands") and name not in OF_ITS_OWN:
            yield from commands_of(command, f"{prefix}{name} ")
        else:
            yield prefix + name, command


@pytest.fixture(scope="module")
def commands() -> dict[str, Any]:
    return dict(commands_of(typer.main.get_command(app)))


def test_the_page_of_the_commands_is_current() -> None:
    assert PAGE.read_text() == render(), "run: python -m asyncrl.cli.commands.page > docs/cli.md"


def test_the_page_has_a_section_of_every_command_and_a_row_of_every_option(commands: dict[str, Any]) -> None:
    sections = dict(part.split("\n", 1) for part in PAGE.read_text().split("\n## ")[1:])
    assert set(commands) - {"data", "bench"} <= set(sections)
    for name, text in sections.items():
        options = {
            opt for one in getattr(commands.get(name), "params", []) for opt in one.opts if "--" in opt
        }
        shown = options - {"--help", "--dir", "--run"}
        assert [opt for opt in sorted(shown) if opt not in text] == [], name


def test_the_help_lists_each_command_once(commands: dict[str, Any]) -> None:
    helped = asyncrl("--help").out.partition("Commands:\n")[2].split("\n")
    assert [line.split()[0] for line in helped if line] == list(
        dict.fromkeys(name.split()[0] for name in commands)
    )


def test_no_summary_is_cut_in_the_help() -> None:
    for words in ([], ["inspect"]):
        assert "..." not in asyncrl(*words, "--help").out.partition("Commands:")[2]


def test_commands_that_programs_read_have_json(commands: dict[str, Any]) -> None:
    with_json = {
        name for name, one in commands.items() if any("--json" in option.opts for option in one.params)
    }
    assert with_json >= {"status", "logs", "plan", "doctor", "verify", "eval", "inspect account"}


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("asyncrl sta", {"status"}),
        ("asyncrl status al", {"alpha"}),
        ("asyncrl pause --run ", {"alpha", "beta"}),
        ("asyncrl verify b", {"beta"}),
        ("asyncrl plan quick", {"quickstart", "quickstart_redis"}),
        ("asyncrl up clu", {"cluster.yaml"}),
    ],
)
def test_a_shell_completes_commands_runs_and_configurations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, expected: set[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("alpha", "beta"):
        make_folder(tmp_path / "runs", name)
    (tmp_path / "cluster.yaml").touch()
    monkeypatch.setenv("_ASYNCRL_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", line)
    monkeypatch.setenv("COMP_CWORD", str(line.count(" ")))
    assert set(asyncrl().out.split()) == expected


def test_completion_of_runs_looks_into_the_folder_that_was_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_folder(tmp_path / "elsewhere", "gamma")
    monkeypatch.setenv("_ASYNCRL_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", f"asyncrl status --dir {tmp_path / 'elsewhere'} ")
    monkeypatch.setenv("COMP_CWORD", "4")
    assert asyncrl().out.split() == ["gamma"]
