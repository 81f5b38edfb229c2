"""The wall clock of one service is set forward, back and a day forward while the run goes on."""

from __future__ import annotations

import shutil
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.system.parts.up_run import UpRun, leftovers

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(shutil.which("cc") is None, reason="the shifted clock is a C library"),
]
SERVICES = ("buffer.0", "learner.0", "publisher.0", "receiver.0", "rollout.0", "weight_sync.0")
SHIFTS_S = (3600, -3600, 86_400, 0)
QUICK = ("rollout.engine=scripted", "eval.every_steps=0", "learner.steps=100000")
STEPS = 5


@pytest.fixture
def clocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with a file per service that shifts its clock."""
    library = tmp_path / "shifted_clock.so"
    source = Path(__file__).with_name("shifted_clock.c")
    subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    for service in SERVICES:
        shift(tmp_path / service, 0)
    monkeypatch.setenv("LD_PRELOAD", str(library))
    monkeypatch.setenv("ASYNCRL_TEST_CLOCKS", str(tmp_path))
    return tmp_path


def shift(path: Path, seconds: int) -> None:
    with path.open("r+b" if path.exists() else "wb") as file:
        file.write(struct.pack("<q", seconds))


def test_a_service_whose_clock_jumps_loses_nothing_and_stops_nobody(
    up: Callable[..., UpRun], clocks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = up("clock", *QUICK)
    status = run.wait_for(lambda s: s["step"] >= STEPS)
    pids = {name: one["pid"] for name, one in status["services"].items()}
    for service in SERVICES:
        assert str(clocks / service) in Path(f"/proc/{pids[service]}/maps").read_text(), "its clock is ours"
        for seconds in SHIFTS_S:
            shift(clocks / service, seconds)
            step = run.status()["step"]
            status = run.wait_for(lambda s, at=step + STEPS: s["step"] >= at, 60.0)  # type: ignore[misc]
            assert not [one for one in status["obstacles"] if one["blocks"]], (service, seconds)
    assert {name: one["pid"] for name, one in run.status()["services"].items()} == pids, "nobody was replaced"
    assert run.command("down").returncode == 0
    monkeypatch.delenv("LD_PRELOAD")
    code, output = run.finish()
    assert code == 0, output
    assert run.command("verify").returncode == 0
    rows = run.rows()
    assert [row["training/global_step"] for row in rows] == list(range(1, len(rows) + 1))
    assert all(0.0 <= row[name] < 60.0 for row in rows[1:] for name in row if name.startswith("timing_s/"))
    assert run.summary()["ledger_residue"] == 0 and leftovers(run.folder) == []
    times = [row["time"] for row in rows]
    assert max(times) - min(times) > max(SHIFTS_S), "the learner's rows have its clock"
