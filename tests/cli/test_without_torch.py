"""The command line where no package of a run can be imported: each command in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.test_audit import make_config, opened, train_two_steps
from tests.planner.plan.model_folder import SIZES, write_model_folder
from tests.setup.suite.core_alone import OF_A_RUN

ROOT = Path(__file__).resolve().parents[2]
SITE = f"""
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {OF_A_RUN}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Absent())
"""
CONFIG = """
model: {path: model}
data: {train: train.jsonl}
reward: {fn: gsm8k}
rollout: {max_tokens: 64, cpus: 0}
learner: {cpus: 0}
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with a configuration, a Python without those packages, and nothing else."""
    write_model_folder(tmp_path / "model", **SIZES)
    (tmp_path / "train.jsonl").write_text('{"prompt": "1+1=", "ground_truth": "2"}\n')
    (tmp_path / "cluster.yaml").write_text(CONFIG)
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(SITE)
    return tmp_path


def call(place: Path, *words: str, code: str = "") -> subprocess.CompletedProcess[str]:
    command = ["-c", code] if code else ["-m", "asyncrl.cli", *words]
    return subprocess.run(
        [sys.executable, *command],
        cwd=place,
        env={**os.environ, "PYTHONPATH": f"{place / 'site'}:{ROOT}"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_a_configuration_is_checked_without_torch(place: Path) -> None:
    done = call(place, "plan", "cluster.yaml", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["shared_memory"]["num_weights"] > 0


def test_a_journal_is_recounted_without_torch(place: Path) -> None:
    with opened(make_config(place / "runs", {"journal": "file"})) as store:
        train_two_steps(store)
    done = call(place, "verify", "told")
    assert done.returncode == 0, done.stderr
    assert "4 trained in 2 steps" in done.stdout and "0 findings" in done.stdout


@pytest.mark.parametrize("words", [("up", "cluster.yaml"), ("export", "runs/told")])
def test_a_command_that_needs_a_run_s_packages_says_what_to_install(
    place: Path, words: tuple[str, ...]
) -> None:
    if words[0] == "export":
        with opened(make_config(place / "runs", {"journal": "file"})):
            pass
        (place / "runs" / "told" / "checkpoints").mkdir()
    done = call(place, *words)
    assert done.returncode == 1
    assert "is not installed here. Install asyncrl[train]" in done.stderr, done.stderr
    assert "defect" not in done.stderr and not (place / "runs" / "cluster").exists()


@pytest.mark.long
@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--help",), "Recount a run's journal"),
        (("plan", "--schema"), '"prefix_caching"'),
        (
            ("plan", "cluster.yaml", "--simulate", "--rates", "H100", "--set", "rollout.replicas=65"),
            "The learner is the bottleneck",
        ),
        (("doctor",), "python"),
        (("status",), ""),
        (("init", "--help"), "cluster.yaml"),
    ],
    ids=["help", "schema", "simulate", "doctor", "status", "init"],
)
def test_what_reads_and_checks_works_without_torch(place: Path, words: tuple[str, ...], told: str) -> None:
    done = call(place, *words)
    assert told in done.stdout, done.stderr
    assert "No module named" not in done.stdout + done.stderr
    assert "not installed here" not in done.stderr


def test_the_packages_are_absent_there(place: Path) -> None:
    code = f"from importlib import import_module\nfor name in {OF_A_RUN}:\n"
    code += "    try: import_module(name)\n    except ModuleNotFoundError: print(name)\n"
    assert call(place, code=code).stdout.split() == list(OF_A_RUN)
