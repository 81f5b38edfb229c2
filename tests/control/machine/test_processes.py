"""Processes of a run, as the kernel lists them."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from asyncrl.control.machine import processes
from asyncrl.control.roster import RUN_VARIABLE

PID, RUN_ID = 4711, "told"
ENVIRONMENT = f"PATH=/bin\0{RUN_VARIABLE}={RUN_ID}\0".encode()


def write_process(proc: Path, environment: bytes, *, vsize: int = 4096, env_end: int = 99) -> None:
    """Write what the kernel shows of a process, see proc(5); as there, nobody reads half of a file."""
    fields = {3: "S", 23: str(vsize), 51: str(env_end)}
    folder = proc / str(PID)
    folder.mkdir(exist_ok=True)
    stat = f"{PID} (a) b) " + " ".join(fields.get(n, "0") for n in range(3, 53))
    for name, content in (("environ", environment), ("stat", stat.encode())):
        whole = proc / f"{name}.whole"
        whole.write_bytes(content)
        whole.rename(folder / name)


@pytest.fixture
def proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(processes, "PROC", tmp_path)
    return tmp_path


def test_a_process_in_its_exec_is_waited_for_until_its_environment_is_there(proc: Path) -> None:
    write_process(proc, b"", env_end=0)
    done = threading.Timer(0.1, write_process, (proc, ENVIRONMENT))
    done.start()
    assert processes.is_alive(PID, RUN_ID)
    assert processes.pids_of_run(RUN_ID) == [PID]
    done.join()


@pytest.mark.parametrize(("vsize", "env_end"), [(0, 0), (4096, 99)], ids=["the kernel's", "without any"])
def test_a_process_that_will_never_have_an_environment_is_not_waited_for(
    proc: Path, monkeypatch: pytest.MonkeyPatch, vsize: int, env_end: int
) -> None:
    monkeypatch.setattr(processes.time, "sleep", lambda _: pytest.fail("it was waited for"))
    write_process(proc, b"", vsize=vsize, env_end=env_end)
    assert not processes.is_alive(PID, RUN_ID)
