import contextlib
import hashlib
import importlib.util
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest
import set_up
import typer

from asyncrl.cli.app import app


@pytest.mark.parametrize("system", [("Darwin", "arm64"), ("Linux", "aarch64"), ("Windows", "AMD64")])
def test_another_machine_is_refused_in_one_sentence(system):
    with pytest.raises(set_up.SetUpFailed, match="asyncrl runs on Linux x86-64") as caught:
        set_up.check_machine(*system, (3, 11))
    assert "\n" not in str(caught.value)


def test_another_python_is_refused():
    with pytest.raises(set_up.SetUpFailed, match=r"needs Python 3\.11, and this is 3\.12"):
        set_up.check_machine("Linux", "x86_64", (3, 12))


def test_this_machine_is_taken():
    set_up.check_machine("Linux", "x86_64", (3, 11))


def test_an_unknown_list_is_refused_before_anything_is_made(capsys):
    assert set_up.main(["tpu"]) == 1
    assert "there is no list 'tpu'" in capsys.readouterr().err


def test_a_missing_cpu_build_of_torch_is_recognized():
    said = (
        "Because there is no version of torch==2.13.0+cpu and you require torch==2.13.0+cpu, we can conclude"
    )
    assert set_up.is_torch_missing(said)
    assert not set_up.is_torch_missing(f"error: Hash mismatch for `torch==2.13.0+cpu`\n{said}")
    assert not set_up.is_torch_missing(
        "Because there is no version of rich==15.0.0 and you require rich==15.0.0"
    )


INSTALLERS = {
    "pip": [sys.executable, "-m", "pip", "install", "--no-deps"],
    "uv": [str(Path(sys.executable).parent / "uv"), "pip", "install", "--no-deps"],
}


@pytest.mark.parametrize("program", INSTALLERS)
@pytest.mark.parametrize("case", ["as listed", "changed on its way", "listed without a hash"])
def test_a_file_with_another_hash_than_in_the_list_is_not_installed(tmp_path, monkeypatch, program, case):
    """Both ways that set-up installs a list."""
    wheel = make_wheel(tmp_path)
    pin = f"ours==1 --hash=sha256:{hashlib.sha256(wheel.read_bytes()).hexdigest()}"
    (tmp_path / "requirements").mkdir()
    (tmp_path / "requirements" / "cpu.txt").write_text("ours==1" if case.endswith("without a hash") else pin)
    if case == "changed on its way":
        make_wheel(tmp_path, "import os")
    monkeypatch.setattr(set_up, "ROOT", tmp_path)
    where = ["--no-index", "--find-links", str(tmp_path), "--target", str(tmp_path / "site")]
    command = [*INSTALLERS[program], *where, *set_up.of_list("cpu")]
    is_refused = case != "as listed"
    with pytest.raises(set_up.SetUpFailed, match=r"(?i)hash") if is_refused else contextlib.nullcontext():
        set_up.run(command, {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)})
    assert (tmp_path / "site" / "ours.py").exists() is not is_refused


def make_wheel(folder: Path, code: str = "") -> Path:
    """Return a wheel of a package `ours`."""
    path = folder / "ours-1-py3-none-any.whl"
    info = {
        "METADATA": "Metadata-Version: 2.1\nName: ours\nVersion: 1\n",
        "WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "RECORD": "ours.py,,\n",
    }
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("ours.py", code)
        for name, text in info.items():
            file.writestr(f"ours-1.dist-info/{name}", text)
    return path


def test_a_failing_command_s_words_are_in_the_error(capsys):
    with pytest.raises(set_up.SetUpFailed, match="out of disk"):
        set_up.run(["sh", "-c", "echo ' + a==1'; echo out of disk; exit 3"], {"PATH": "/bin:/usr/bin"})
    shown = capsys.readouterr().err
    assert "out of disk" in shown
    assert "a==1" not in shown


@pytest.mark.parametrize("script", ["sleep 600", "exec >&- 2>&-; sleep 600", "sleep 600 & sleep 600"])
def test_a_command_that_takes_too_long_is_ended_with_all_that_it_started(script, monkeypatch):
    monkeypatch.setattr(set_up, "DEADLINE_S", 0.5)
    start = time.monotonic()
    with pytest.raises(set_up.SetUpFailed, match=r"'sh -c .*' took longer than 0\.5 s"):
        set_up.run(["sh", "-c", f"echo begins; {script}"], {"PATH": "/bin:/usr/bin"})
    assert time.monotonic() - start < 300


def test_bytecode_that_takes_too_long_is_a_warning(tmp_path, monkeypatch, capsys):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").write_text("#!/bin/sh\nexec sleep 600\n")
    (tmp_path / "bin" / "python").chmod(0o755)
    monkeypatch.setattr(set_up, "DEADLINE_S", 0.5)
    with set_up.compiling(tmp_path):
        pass
    assert "not all packages could be byte-compiled" in capsys.readouterr().err


def test_cuda_packages_in_a_cpu_environment_are_refused(tmp_path, monkeypatch):
    (tmp_path / "lib/python3.11/site-packages/nvidia_nccl_cu13-2.29.dist-info").mkdir(parents=True)
    monkeypatch.setattr(set_up, "LISTS", dict.fromkeys(set_up.LISTS, tmp_path))
    for name in ("cpu", "sglang"):
        with pytest.raises(set_up.SetUpFailed, match="CUDA packages"):
            set_up.check_installed(name)
    set_up.check_installed("gpu")


@pytest.mark.parametrize("name", set_up.LISTS)
def test_make_makes_the_environment_that_the_list_is_for(name):
    """SGLang's pins clash with vLLM's: in one environment the later list would break the other engine."""
    command = ["make", "--dry-run", "--always-make", "--print-data-base", "setup", f"LIST={name}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    folder = f".venv-{name}" if name in ("sglang", "agents") else ".venv"
    assert set_up.LISTS[name].name == folder
    assert f"\nsetup: {folder}/.set-up-{name}\n" in done.stdout


def test_make_without_python_says_what_is_missing(tmp_path):
    for name in ("make", "sh"):
        (tmp_path / name).symlink_to(f"/usr/bin/{name}")
    done = subprocess.run(
        [str(tmp_path / "make"), "--always-make", "setup", "STAMP=unmade"],
        env={"PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == 2
    assert "asyncrl needs Python 3.11" in done.stderr


def test_set_up_leaves_packages_compiled():
    """Else, under PYTHONDONTWRITEBYTECODE, each process compiles for seconds what it imports."""
    source = Path(importlib.util.find_spec("vllm").origin)
    assert Path(importlib.util.cache_from_source(str(source))).exists()


def demo_with(folder: Path) -> list[str]:
    """Return the command of the demo with the programs in `folder`, without its set-up."""
    return ["make", "demo", "-o", ".venv/.set-up-cpu", f"BIN={folder}"]


def test_the_demo_ends_with_where_to_look_next_and_all_of_it_is_there(tmp_path):
    (tmp_path / "asyncrl").write_text("#!/bin/sh\necho called with $@\n")
    (tmp_path / "asyncrl").chmod(0o755)
    done = subprocess.run(demo_with(tmp_path), capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, done.stderr
    _, _, said = done.stdout.partition("Where to look next:\n")
    assert 3 <= len(said.splitlines()) <= 6 and "runs/quickstart/curves.png" in said
    verbs = {words[1] for line in said.splitlines() if (words := line.split())[0] == f"{tmp_path}/asyncrl"}
    assert {"export", "status"} <= verbs <= set(typer.main.get_command(app).commands)
    pages = [word.rstrip(",") for word in said.split() if word.startswith("docs/")]
    assert pages and all(Path(page).exists() for page in pages)


def test_a_demo_that_failed_does_not_say_where_to_look(tmp_path):
    (tmp_path / "asyncrl").symlink_to("/bin/false")
    done = subprocess.run(demo_with(tmp_path), capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode != 0 and "Where to look next" not in done.stdout
