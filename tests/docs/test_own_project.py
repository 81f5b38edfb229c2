"""asyncrl in one's own project: the commands of docs/your-own/project.md, in a fresh environment."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from asyncrl.control.machine.processes import end_leftovers
from tests.docs.pages import ROOT, YOUR_OWN, commands_of, run, start, write_files

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]
PAGE = YOUR_OWN / "project.md"
INSTALL_S = 2400.0
NOT_SOURCE = (".venv", ".git", "runs", "build", "*.egg-info", "__pycache__", ".*_cache", ".hypothesis")


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with the files of the page and its environment, beside a copy of this checkout."""
    folder = tmp_path_factory.mktemp("own") / "my-project"
    ignored = shutil.ignore_patterns(*NOT_SOURCE)
    shutil.copytree(ROOT, folder.parent / "asyncrl", symlinks=True, ignore=ignored)
    write_files(PAGE, folder)
    *install, doctor = commands_of(PAGE, "install")
    assert doctor.endswith("asyncrl doctor")
    for command in install:
        run(command, folder, INSTALL_S)
    yield folder
    if (live := folder / "runs" / "first" / "run.json").exists():
        end_leftovers(json.loads(live.read_text())["run_id"])


def doctor(project: Path) -> dict[str, dict[str, str]]:
    """Return what `asyncrl doctor` finds, by name."""
    done = start(".venv/bin/asyncrl doctor --json", project, 120.0)
    return {one["what"]: one for one in json.loads(done.stdout)}


def test_the_installed_set_is_whole_and_is_not_this_checkout(project: Path):
    where = run(".venv/bin/python -c 'import asyncrl; print(asyncrl.__file__)'", project)
    assert Path(where.strip()).is_relative_to(project / ".venv")
    found = doctor(project)
    assert {found[what]["verdict"] for what in ("python", "builds", "packages", "versions")} == {"ok"}


def test_a_run_of_the_project_imports_its_reward_and_trains(project: Path):
    plan, up, verify = commands_of(PAGE, "first")
    run(plan, project)
    run(up, project, 900.0)
    run(verify, project)
    summary = json.loads((project / "runs" / "first" / "summary.json").read_text())
    assert (summary["steps"], summary["ledger_residue"]) == (3, 0)


def test_a_package_that_a_plain_install_would_have_brought_is_found(project: Path):
    """The last one: it breaks the environment."""
    (site,) = (project / ".venv" / "lib").glob("python*/site-packages")
    broken = site / "torchvision-0.28.0.dist-info"
    broken.mkdir()
    (broken / "METADATA").write_text("Metadata-Version: 2.1\nName: torchvision\nVersion: 0.28.0\n")
    found = doctor(project)["builds"]
    assert (found["verdict"], "torchvision 0.28.0" in found["found"]) == ("fail", True)
    checkout = project.parent / "asyncrl"
    commands = (f"pip install --no-deps -r {checkout}/requirements/cpu.txt &&", f"--no-deps {checkout}")
    assert all(command in found["advice"] for command in commands)
