"""The process side of a service, in a process of its own."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from asyncrl.control.machine.processes import SHM, remove_segments, shared_memory_of
from asyncrl.control.ray.host import kinds_of
from asyncrl.core.errors import ConfigError, ServiceFailed
from weight_sync.protocol.lanes.stripes import Stripe

CODE = """
import os, signal, sys
from pathlib import Path
from asyncrl.core.config.tree import Config
from asyncrl.control.ray.host import ServiceHost
from asyncrl.core.service_command import DumpStacks, pack_command
from asyncrl.core.service import ServiceContext
config = Config(model={"path": "m"}, data={"train": "t"}, reward={"fn": "gsm8k"})
context = ServiceContext(config, "a.0", Path(sys.argv[1]), "id")
host = ServiceHost("trivial_service:" + sys.argv[2], context, sys.argv[1] + "/a.0.log")
while host.describe().state == "STARTING":
    pass
if host.describe().state == "FAILED":
    print("kinds", list(host.describe().error_kinds), host.describe().error, host.stop(30.0))
else:
    host.command(pack_command(DumpStacks()))
    print("half way", flush=True)
    os.kill(os.getpid(), signal.SIGUSR1)
    host.stop(5.0)
"""


def run_host(folder: Path, function: str, umask: int = -1) -> str:
    """Return the log of a service that was started, and asked for its stacks in both ways."""
    place = str(Path(__file__).parents[1])
    code = f"import sys; sys.path.insert(0, {place!r})\n{CODE}"
    subprocess.run([sys.executable, "-c", code, str(folder), function], timeout=60, check=True, umask=umask)
    return (folder / "a.0.log").read_text()


def test_a_service_writes_the_stacks_of_all_threads_into_its_log_when_asked(tmp_path: Path) -> None:
    by_command, by_signal = run_host(tmp_path, "build").split("half way")
    for text in (by_command, by_signal):
        assert "trivial_service.py" in text
        assert "(most recent call first)" in text


def test_the_log_of_a_service_is_this_users_alone_whatever_umask_ray_has(tmp_path: Path) -> None:
    run_host(tmp_path, "build", umask=0)
    assert (tmp_path / "a.0.log").stat().st_mode & 0o777 == 0o600


def test_a_failed_service_tells_which_kinds_of_error_it_was(tmp_path: Path) -> None:
    assert "kinds ['FileNotFoundError']" in run_host(tmp_path, "build_broken")


def test_a_service_whose_new_thread_finds_no_memory_fails_and_is_not_waited_for(tmp_path: Path) -> None:
    log = run_host(tmp_path, "build_threadless")
    assert "kinds ['MemoryError'] MemoryError: no room for a thread False" in log


WAITS = """
import sys, time
from pathlib import Path
from asyncrl.core.config.tree import Config
from asyncrl.control.ray.host import ServiceHost
from asyncrl.core.service import ServiceContext
folder = Path(sys.argv[1])
config = Config(model={"path": "m"}, data={"train": "t"}, reward={"fn": "gsm8k"})
host = ServiceHost("trivial_service:build_waiting", ServiceContext(config, "a.0", folder, "id"), sys.argv[2])
while not host.describe().obstacles:
    time.sleep(0.01)
print(host.describe().state, host.describe().obstacles[0].reason, flush=True)
(folder / "back").touch()
while host.describe().state == "STARTING":
    time.sleep(0.01)
print("then", host.describe().state, len(host.describe().obstacles), flush=True)
host.stop(5.0)
"""


def test_what_a_service_waits_for_while_it_is_built_is_in_its_status(tmp_path: Path) -> None:
    log = tmp_path / "a.0.log"
    command = [sys.executable, "-c", WAITS, str(tmp_path), str(log)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])}
    subprocess.run(command, env=environment, timeout=60, check=True)
    assert "STARTING Redis at localhost:1 is away: Connection refused\n" in log.read_text()
    assert "then READY 0\n" in log.read_text(), "the service's own status counts"


SEMAPHORES = """
import multiprocessing, os, signal, sys
from pathlib import Path
from trivial_service import keep_semaphore
from asyncrl.core.config.tree import Config
from asyncrl.control.ray.host import ServiceHost
from asyncrl.core.service import ServiceContext
config = Config(model={"path": "m"}, data={"train": "t"}, reward={"fn": "gsm8k"})
context = ServiceContext(config, "a.0", Path(sys.argv[1]), sys.argv[2])
host = ServiceHost("trivial_service:build", context, sys.argv[1] + "/a.0.log")
fork_server = multiprocessing.get_context("forkserver")
lock = fork_server.Lock()
ours, theirs = fork_server.Pipe()
fork_server.Process(target=keep_semaphore, args=(theirs,), daemon=True).start()
ours.recv()
os.killpg(0, signal.SIGKILL)
"""


def test_semaphores_of_a_killed_service_and_its_children_are_found_by_name_and_removed(
    tmp_path: Path,
) -> None:
    """As tqdm makes one in vLLM's engine core: Python's resource tracker, which removes them, dies too."""
    run_id = f"sem{os.getpid()}"
    command = [sys.executable, "-c", SEMAPHORES, str(tmp_path), run_id]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    killed = subprocess.run(command, env=environment, start_new_session=True, timeout=60, check=False)
    assert killed.returncode == -signal.SIGKILL
    left = shared_memory_of(run_id)
    assert len(left) == 2 and all(path.name.startswith(f"sem.asyncrl-{run_id}-a.0-") for path in left)
    remove_segments(run_id, "a.1")
    assert shared_memory_of(run_id) == left, "they are another service's"
    remove_segments(run_id, "a.0")
    assert shared_memory_of(run_id) == []


@pytest.mark.parametrize("name", ["publisher.0", "publisher.1"])
def test_the_versions_of_a_killed_publisher_are_left_to_its_successor(name: str) -> None:
    run_id = f"kept{os.getpid()}"
    folder = SHM / f"asyncrl-{run_id}-0"
    folder.mkdir(mode=0o700)
    own = folder / f"{Stripe(int(name[-1]), 2).publisher}-t1-1-1"
    other = folder / "receiver.0-1-1"
    try:
        for path in (own, other):
            path.touch()
        remove_segments(run_id, name)
        assert own.exists() and other.exists()
        remove_segments(run_id, "receiver.0")
        assert own.exists() and not other.exists()
    finally:
        shutil.rmtree(folder)


def test_the_kinds_of_an_error_are_those_of_its_causes_and_parts_too() -> None:
    group = ExceptionGroup("tasks", [ValueError("a"), ConfigError("no such reward")])
    outer = ServiceFailed("rollout.0 cannot go on")
    outer.__cause__ = group
    assert kinds_of(outer) == {"ServiceFailed", "ExceptionGroup", "ValueError", "ConfigError"}
