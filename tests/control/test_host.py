"""The process side of a service, in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from asyncrl.control.launch.host import kinds_of
from asyncrl.errors import ConfigError, ServiceFailed

CODE = """
import os, signal, sys
from pathlib import Path
from asyncrl.config.tree import Config
from asyncrl.control.launch.host import DUMP_STACKS, ServiceHost
from asyncrl.service import ServiceContext
config = Config(model={"path": "m"}, data={"train": "t"}, reward={"fn": "gsm8k"})
context = ServiceContext(config, "a.0", Path(sys.argv[1]), "id")
host = ServiceHost("trivial_service:" + sys.argv[2], context, sys.argv[1] + "/a.0.log")
while host.status()["state"] == "starting":
    pass
if host.status()["state"] == "failed":
    print("kinds", host.status()["error_kinds"])
else:
    host.command(DUMP_STACKS, {})
    print("half way", flush=True)
    os.kill(os.getpid(), signal.SIGUSR1)
    host.stop(5.0)
"""


def run_host(folder: Path, function: str) -> str:
    """Return the log of a service that was started, and asked for its stacks in both ways."""
    place = str(Path(__file__).parent)
    code = f"import sys; sys.path.insert(0, {place!r})\n{CODE}"
    subprocess.run([sys.executable, "-c", code, str(folder), function], timeout=60, check=True)
    return (folder / "a.0.log").read_text()


def test_a_service_writes_the_stacks_of_all_threads_into_its_log_when_asked(tmp_path: Path) -> None:
    by_command, by_signal = run_host(tmp_path, "build").split("half way")
    for text in (by_command, by_signal):
        assert "trivial_service.py" in text
        assert "(most recent call first)" in text


def test_a_failed_service_tells_which_kinds_of_error_it_was(tmp_path: Path) -> None:
    assert "kinds ['FileNotFoundError']" in run_host(tmp_path, "build_broken")


def test_the_kinds_of_an_error_are_those_of_its_causes_and_parts_too() -> None:
    group = ExceptionGroup("tasks", [ValueError("a"), ConfigError("no such reward")])
    outer = ServiceFailed("rollout.0 cannot go on")
    outer.__cause__ = group
    assert kinds_of(outer) == {"ServiceFailed", "ExceptionGroup", "ValueError", "ConfigError"}
