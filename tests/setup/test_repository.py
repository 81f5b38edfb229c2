import hashlib
import re
import shutil
import subprocess
import sys
import tomllib
import warnings
import zipfile
from pathlib import Path

import pytest

from asyncrl.cli.commands.bench import BENCHMARKS

IMPORT = re.compile(r"^\s*from (benchmarks[\w.]*) import", re.MULTILINE)
PACKAGES = ("asyncrl", "benchmarks", "configs", "learner", "rollout_service", "weight_sync")
MACHINE_PATH = re.compile(r"(?<![\w.}-])/(opt|root|work|home)/\w")
HOSTS = ("pypi" + ".org", "python" + "hosted.org", "download." + "pytorch.org")
APACHE_2_MD5 = "3b83ef96387f14655fc854ddc3c6bd57"


def own_files():
    """Every file that is, or would be, committed."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    if done.returncode:
        pytest.skip("not a git clone: what belongs to the project is not known")
    return [path for name in done.stdout.split("\0") if name and (path := Path(name)).is_file()]


def test_no_file_names_a_folder_of_a_machine_or_a_package_host():
    found = []
    for path in own_files():
        text = path.read_bytes().decode(errors="replace")
        for number, line in enumerate(text.splitlines(), start=1):
            if MACHINE_PATH.search(line) or any(host in line for host in HOSTS):
                found.append(f"{path}:{number}: {line.strip()[:100]}")
    assert not found, "\n".join(found)


def test_the_licence_is_apache_2_word_for_word():
    assert hashlib.md5(Path("LICENSE").read_bytes(), usedforsecurity=False).hexdigest() == APACHE_2_MD5


def test_every_module_that_says_pure_is_held_to_it():
    contracts = tomllib.loads(Path("pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (contract,) = [contract for contract in contracts if contract["name"].startswith("Pure modules")]
    says_pure = {
        ".".join(path.with_suffix("").parts)
        for package in PACKAGES
        for path in Path(package).rglob("*.py")
        if "(pure)" in path.read_text().partition("\n\n")[0].partition("from __future__")[0]
    }
    assert says_pure - set(contract["source_modules"]) == set()


def test_a_warning_that_points_at_our_code_is_an_error():
    with pytest.raises(DeprecationWarning):
        warnings.warn_explicit(
            "old", DeprecationWarning, "ledger.py", 1, module="asyncrl.buffer.ledger.ledger"
        )


def test_a_warning_that_points_elsewhere_is_none():
    with warnings.catch_warnings(record=True) as caught:  # keeps the filters as they are
        warnings.warn_explicit("old", DeprecationWarning, "x.py", 1, module="asyncrl_of_others.x")
    assert caught


def test_a_wheel_holds_the_configurations_and_every_package(tmp_path):
    source = tmp_path / "source"
    skip = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for package in PACKAGES:
        shutil.copytree(package, source / package, ignore=skip)
    for name in ("pyproject.toml", "LICENSE", "README.md"):
        shutil.copy(name, source / name)
    code = f"from setuptools import build_meta; build_meta.build_wheel({str(tmp_path)!r})"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=source, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {"configs/quickstart.yaml", "configs/grpo_gsm8k.yaml", "asyncrl/cli/app.py"} <= names
    assert "configs/overlays/dapo_17k.yaml" in names
    models = {str(path) for path in Path("rollout_service/tasks").rglob("warm_started/model.safetensors")}
    assert len(models) == 2 and models <= names
    assert all(any(name.startswith(f"{package}/") for name in names) for package in PACKAGES)
    assert not [name for name in names if name.startswith(("tests/", "research/", "benchmarks/buffer/"))]
    files = {name: f"benchmarks/{one.module.replace('.', '/')}.py" for name, one in BENCHMARKS.items()}
    held = {name for name, file in files.items() if file in names}
    assert held == {"calibrate"}, "every other benchmark says that it needs a checkout"
    ours = [name for name in names if name.startswith("benchmarks/") and name.endswith(".py")]
    imported = {found for name in ours for found in IMPORT.findall(Path(name).read_text())}
    assert {one.split(".")[1] for one in imported if "." in one} <= {"harness", "calibration"}
    kept = [path for package in PACKAGES for path in Path(package).rglob("*.*") if path.is_file()]
    data = {str(path) for path in kept if path.suffix not in (".py", ".pyc", ".md") and is_in_a_package(path)}
    assert {"configs/schema.json", "asyncrl/page/page.js"} <= data <= names


def is_in_a_package(path):
    return (path.parent / "__init__.py").exists()
