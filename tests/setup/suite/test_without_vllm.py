"""A Python without vLLM: SGLang runs in an environment of its own, and needs nothing of vLLM's."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from rollout_service.engine.sglang.process import PYTHON
from tests.setup.suite.core_alone import needs_all

QUICKSTART = Path("configs/quickstart.yaml").absolute()
SHORT = ("--set", "learner.steps=3", "--set", "eval.every_steps=0", "--set", "rollout.replicas=1")
pytestmark = needs_all


@pytest.mark.long
def test_without_vllm_everything_but_its_adapter_can_be_imported() -> None:
    """Only what runs in vLLM's own processes cannot, and the gateway's serving, which is vLLM's front end."""
    command = [sys.executable, "-m", "tests.setup.suite.without_vllm"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=True)
    failed = set(done.stdout.split())
    assert "rollout_service.engine.vllm.weight_transfer" in failed, "vLLM was hidden"
    others = {name for name in failed if not name.startswith("rollout_service.engine.vllm.")}
    serving = {f"rollout_service.gateway.serving.{name}" for name in ("apis", "reading", "recorded")}
    assert others == {"rollout_service.engine.probe"} | serving


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment with links to all packages of this one but vLLM."""
    folder = tmp_path_factory.mktemp("environment")
    packages = folder / "lib" / f"python{sysconfig.get_python_version()}" / "site-packages"
    packages.mkdir(parents=True)
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if not entry.name.startswith("vllm"):
            (packages / entry.name).symlink_to(entry)
    shutil.copy(Path(sys.prefix) / "pyvenv.cfg", folder)
    (folder / "bin").mkdir()
    (folder / "bin" / "python").symlink_to(os.path.realpath(sys.executable))
    return folder / "bin" / "python"


def call(python: Path, folder: Path, *words: str) -> tuple[int, str]:
    """Return the exit code of a command in `folder`, and what it said."""
    done = subprocess.run(
        [python, "-m", "asyncrl.cli", *words],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
        check=False,
    )
    return done.returncode, done.stdout


@pytest.mark.parametrize(("command", "engine"), [("plan", "sglang"), ("up", "vllm")])
def test_a_gateway_without_vllm_is_refused_with_what_to_do(
    python: Path, tmp_path: Path, command: str, engine: str
) -> None:
    options = ("--set", f"rollout.engine={engine}", "--set", "rollout.gateway={port: 0}")
    code, said = call(python, tmp_path, command, str(QUICKSTART), *options)
    assert code == 2, said
    assert "rollout.gateway: vLLM" in said and "is not installed; install asyncrl[cpu] or" in said
    assert "Traceback" not in said and not (tmp_path / "runs").exists()


def test_a_run_on_vllm_without_it_is_refused_with_what_to_install(python: Path, tmp_path: Path) -> None:
    code, said = call(python, tmp_path, "up", str(QUICKSTART), "--set", "rollout.engine=[scripted, vllm]")
    assert code == 1, said
    assert "the package vllm is not installed here. Install asyncrl[train,cpu] or" in said
    assert "Traceback" not in said and not (tmp_path / "runs").exists()


def test_plan_and_doctor_work_without_vllm(python: Path, tmp_path: Path) -> None:
    code, said = call(python, tmp_path, "plan", str(QUICKSTART), "--set", "rollout.engine=sglang")
    told = "SGLang shares no prefixes" if PYTHON.exists() else f"there is no {PYTHON} for sglang"
    assert (code == 0) is PYTHON.exists() and told in said, said
    code, said = call(python, tmp_path, "doctor")
    (line,) = [line for line in said.splitlines() if "vLLM is not installed" in line]
    assert line.split()[0] == ("warn" if PYTHON.exists() else "fail"), "SGLang's environment suffices"


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "engine",
    [
        "scripted",
        pytest.param(
            "sglang",
            marks=pytest.mark.skipif(
                not PYTHON.exists(), reason="SGLang is not there: make setup LIST=sglang"
            ),
        ),
    ],
)
def test_a_run_on_another_engine_trains_without_vllm(python: Path, tmp_path: Path, engine: str) -> None:
    code, said = call(python, tmp_path, "up", str(QUICKSTART), "--set", f"rollout.engine={engine}", *SHORT)
    assert code == 0, said[-3000:]
    code, said = call(python, tmp_path, "verify", "quickstart")
    assert code == 0 and "trained in 3 steps, residue 0" in said and "0 findings" in said, said
