"""`asyncrl bench gpu`: parts that are scripted, and one whole dry run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import suite
from benchmarks.gpu.suite import GPU, GPUS, PARTS, PLUGIN, Machine, Part, Result, make_environment
from benchmarks.harness import children
from benchmarks.harness.children import LATE, run_child
from benchmarks.harness.rows import Row, RowFile

SCRIPTED = """
import os, shutil, signal, sys, time
behaviour = sys.argv[1]
if behaviour == "fails":
    sys.exit("first line\\nthe reason")
if behaviour == "ends_the_suite":
    open(__file__ + ".pid", "w").write(str(os.getpid()))
    os.kill(os.getppid(), signal.SIGTERM)
    time.sleep(600)
shutil.copy(__file__ + ".rows", sys.argv[sys.argv.index("--json") + 1])
"""
DRY_DEADLINE_S = 8 * 60
BLOCKED = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("ray", "vllm"):
            raise ModuleNotFoundError(f"No module named '{name}'", name=name)
sys.meta_path.insert(0, Blocked())
"""


@pytest.fixture
def scripted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the file of a module of scripted parts, which the parts' processes find."""
    module = tmp_path / "scripted_part.py"
    module.write_text(SCRIPTED)
    RowFile.taken_here("scripted", [Row("scripted", {}, {"a": 1.0})]).write(Path(f"{module}.rows"))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return module


@pytest.fixture
def sigterm() -> Iterator[None]:
    """Put back what this process does on SIGTERM."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def part(name: str, behaviour: str = "measures", needs: tuple[str, ...] = (), dry_s: float = 9.0) -> Part:
    return Part(name, ("scripted_part", behaviour), 1.0, dry_s, needs)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def await_end(pid: int) -> None:
    end_s = time.monotonic() + 20
    while is_running(pid):
        assert time.monotonic() < end_s, f"process {pid} runs on"
        time.sleep(0.01)


@pytest.mark.usefixtures("sigterm")
@pytest.mark.parametrize("wanted", ["--dry", "--quick"])
def test_a_part_that_fails_tells_its_last_lines_and_does_not_end_the_others(
    scripted: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    wanted: str,
) -> None:
    parts = (part("one"), part("two", "fails"), part("three", needs=("absent_module",)), part("four"))
    monkeypatch.setattr(suite, "PARTS", parts)
    assert suite.main([wanted, "--json", str(tmp_path / "all.json")]) == 1
    said = capsys.readouterr().out
    assert (
        "    first line\n    the reason\n" in said
        and "three: skipped: absent_module is not installed" in said
    )
    file = RowFile.read(tmp_path / "all.json")
    assert [row.bench for row in file.rows] == ["scripted"] * 2
    states = {name: found["state"] for name, found in file.figures["parts"].items()}
    assert states == {"one": "measured", "two": "failed", "three": "skipped", "four": "measured"}
    assert suite.main([wanted, "--only", "one,three"]) == 0, "what is not installed is no failure"


@pytest.mark.usefixtures("sigterm")
def test_a_suite_that_is_ended_leaves_the_rows_before_and_no_process(
    scripted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(suite, "PARTS", (part("one"), part("two", "ends_the_suite"), part("three")))
    with pytest.raises(SystemExit):
        suite.main(["--dry", "--json", str(tmp_path / "all.json")])
    assert [row.bench for row in RowFile.read(tmp_path / "all.json").rows] == ["scripted"]
    await_end(int(Path(f"{scripted}.pid").read_text()))


def test_a_child_that_is_over_its_time_ends_with_all_that_it_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(children, "GRACE_S", 0.1)
    ended = run_child(["sh", "-c", "trap '' TERM; sleep 600 & echo $!; wait; wait"], 1.0)
    assert (ended.code, ended.is_late) == (LATE, True)
    await_end(int(ended.output))


def test_a_child_that_has_ended_leaves_nothing_of_its_session() -> None:
    ended = run_child(["sh", "-c", "sleep 600 & echo $!; echo so >&2; exit 3"], 60.0, keeps_errors=True)
    assert (ended.code, ended.is_late) == (3, False)
    pid, said = ended.output.splitlines()
    assert said == "so"
    await_end(int(pid))


def test_what_no_longer_fits_is_skipped_by_name(scripted: Path) -> None:
    parts = [part("long", dry_s=61.0), part("short")]
    long, short = suite.run_all(parts, Machine(0), 60.0, is_dry=True)
    assert (long.state, long.told) == ("skipped", "it takes about 61 s, and 60 s are left")
    assert short.state == "measured"


def test_a_machine_lacks_gpus_by_number_and_modules_by_name() -> None:
    lone = Machine(1)
    assert lone.find_missing(part("a", needs=(GPU, "torch"))) == ""
    assert lone.find_missing(part("a", needs=(GPUS,))) == "this machine does not have two GPUs"
    assert lone.find_missing(part("a", needs=("absent.part", GPUS))) == "absent.part is not installed"
    assert Machine(0).find_missing(part("a", needs=(GPU,))) == "this machine does not have a GPU"
    large = part("a", needs=(suite.LARGE_HOST,))
    assert Machine(1, 128 << 30).find_missing(large) == "this machine does not have 150 GB of main memory"
    assert Machine(1, 256 << 30).find_missing(large) == ""


def test_vllm_s_plug_in_is_missing_where_asyncrl_is_only_on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Machine(1).find_missing(part("a", needs=(PLUGIN,))) == "", "asyncrl is installed here"
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: ())
    assert "plug-in" in Machine(1).find_missing(part("a", needs=(PLUGIN,)))


def test_a_dry_run_hides_the_gpus_and_parts_find_the_checkout() -> None:
    dry, real = (make_environment({"PYTHONPATH": "mine"}, is_dry=is_dry) for is_dry in (True, False))
    assert dry["CUDA_VISIBLE_DEVICES"] == "" and "CUDA_VISIBLE_DEVICES" not in real
    assert real["PYTHONPATH"].split(os.pathsep) == [str(suite.ROOT), "mine"]


def test_the_worst_ratio_of_all_parts_stands_last_and_a_miss_is_a_failure_where_asked(
    capsys: pytest.CaptureFixture[str],
) -> None:
    results = [
        Result("one", "measured", "worst ratio to a target: 1.20 (MFU, target 45%)"),
        Result("two", "measured", "nothing is judged"),
        Result("three", "measured", "worst ratio to a target: 0.70 (export (bounced))"),
        Result("four", "skipped", "vllm is not installed"),
    ]
    assert suite.conclude(results, is_checked=False) == 0
    assert capsys.readouterr().out == "3 measured, 0 failed, 1 skipped in 0 s\n"
    assert suite.conclude(results, is_checked=True) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == "worst ratio to a target: 0.70 (three: export (bounced))"
    assert suite.conclude(results[:2], is_checked=True) == 0


def test_the_parts_are_modules_and_fit_into_their_time() -> None:
    assert len({one.name for one in PARTS}) == len(PARTS)
    assert all(find_spec(one.command[0]) is not None for one in PARTS)
    assert sum(one.gpu_s for one in PARTS) <= 60 * suite.MINUTES
    assert sum(one.dry_s for one in PARTS) <= 60 * suite.DRY_MINUTES


def test_a_part_that_does_not_exist_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        suite.main(["--dry", "--only", "machine,nothing"])
    assert "no such part: nothing" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
def test_without_a_gpu_the_suite_says_how_to_check_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert suite.main([]) == 1
    assert "no GPU here; --dry" in capsys.readouterr().err


def run_dry(tmp_path: Path, **environment: str) -> tuple[str, dict[str, str]]:
    """Return what a whole dry run printed, and the state of every part."""
    file = tmp_path / "dry.json"
    command = [sys.executable, "-m", "asyncrl.cli", "bench", "gpu", "--dry", "--json", str(file)]
    began = time.monotonic()
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(suite.ROOT)} | environment,
        capture_output=True,
        text=True,
        timeout=DRY_DEADLINE_S + 60,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert time.monotonic() - began < DRY_DEADLINE_S
    return done.stdout, {name: found["state"] for name, found in RowFile.read(file).figures["parts"].items()}


@pytest.mark.long
@pytest.mark.timeout(DRY_DEADLINE_S + 120)
def test_every_part_runs_dry_or_is_skipped_by_name(tmp_path: Path) -> None:
    said, states = run_dry(tmp_path)
    assert list(states) == [one.name for one in PARTS]
    skipped = {name for name, state in states.items() if state != "measured"}
    assert all(f"{name}: skipped: " in said for name in skipped)
    assert skipped <= {"end_to_end"}, "all that the others need is in requirements/cpu.txt"


@pytest.mark.long
@pytest.mark.timeout(DRY_DEADLINE_S + 120)
def test_without_ray_and_vllm_the_other_parts_run_dry(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(BLOCKED)
    said, states = run_dry(tmp_path, PYTHONPATH=f"{tmp_path}{os.pathsep}{suite.ROOT}")
    assert "end_to_end: skipped: vllm is not installed" in said
    assert {name for name, state in states.items() if state != "measured"} == {"end_to_end"}
