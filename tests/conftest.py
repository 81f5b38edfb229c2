"""Fixtures and settings of all tests.

A run that was started in the background of a shell takes Ctrl-C and SIGHUP as any other does.
"""

from __future__ import annotations

import gc
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

from tests import leftovers

if TYPE_CHECKING:
    from xdist.remote import Producer
    from xdist.scheduler import LoadFileScheduling

# Before torch: on tensors of a few hundred elements its threads take three times as long as one does.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# vLLM leaves its sockets where they are; a path of them has at most 107 bytes.
if "VLLM_RPC_BASE_PATH" not in os.environ:
    os.environ["VLLM_RPC_BASE_PATH"] = tempfile.mkdtemp(prefix="asyncrl-tests-")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # inherited, and passed on to every child
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # by nohup
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# An example that takes a millisecond takes two seconds on a busy machine: no failure of what it shows.
settings.register_profile(
    "unhurried", parent=settings.default, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("unhurried")

MANY_THREADS = 250
"""Of one process. Gloo's of a closed learner poll a hundred times a second until its groups, which hang in
circles, are collected."""
_EXIT_STATUS = pytest.StashKey[int]()
_SESSION = pytest.StashKey[leftovers.Session]()
_LEFT = pytest.StashKey[tuple[list[str], list[str]]]()
SLOWEST_FIRST = (
    "tests/system",
    "tests/learner/backends",
    "tests/rollout/engine",
    "tests/rollout/gateway",
    "tests/control/ray",
)
"""Folders, so that no worker begins with what takes longest when the others are done."""
TOGETHER = {
    "learner ranks": (
        "tests/learner/backends/test_parallel.py",
        "tests/learner/backends/experts/test_expert_parallel.py",
        "tests/learner/backends/fsdp2/test_fsdp2_parallel.py",
        "tests/learner/checkpoint/test_checkpoint_layouts.py",
        "tests/weight_sync/memory/test_publisher_client.py",
        "tests/weight_sync/memory/test_sharded_publish.py",
    ),
    "engines": (
        "tests/rollout/engine/test_vllm_engine.py",
        "tests/rollout/engine/test_weight_families.py",
        "tests/rollout/gateway/test_gateway.py",
    ),
}
"""Files whose tests fork from one process, which imports for six seconds: one worker runs them."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadFileScheduling | None:
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class ByProcess(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return next((name for name, files in TOGETHER.items() if file in files), file)

    return ByProcess(config, log)


def pytest_sessionstart(session: pytest.Session) -> None:
    if not hasattr(session.config, "workerinput"):  # one look for all workers
        session.config.stash[_SESSION] = leftovers.Session()


def pytest_collection() -> None:
    gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()  # the millions of objects that imports and collection have made need no collector any more
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=_place)


def _place(item: pytest.Item) -> tuple[int, int]:
    """Return a file's place: the slow folders, then the others mixed, so that few workers wait at a time."""
    file = item.nodeid.partition("::")[0]
    for place, folder in enumerate(SLOWEST_FIRST):
        if file.startswith(folder + "/"):
            return place, 0
    return len(SLOWEST_FIRST), zlib.crc32(file.encode())


def pytest_runtest_logfinish() -> None:
    if len(os.listdir("/proc/self/task")) > MANY_THREADS:
        gc.collect()


@pytest.hookimpl(trylast=True)  # the workers are gone
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    session.config.stash[_EXIT_STATUS] = exitstatus
    leftovers.at_end.close()
    if (watched := session.config.stash.get(_SESSION, None)) is not None:
        shutil.rmtree(os.environ["VLLM_RPC_BASE_PATH"], ignore_errors=True)
        session.config.stash[_LEFT] = left = watched.find_left()
        if left[0] and not exitstatus:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    ours, perhaps = config.stash.get(_LEFT, ([], []))
    if ours:
        terminalreporter.section("left on the machine", red=True)
        terminalreporter.write_line("\n".join(ours))
    if perhaps:
        terminalreporter.section("new on the machine, of these tests or of others")
        terminalreporter.write_line("\n".join(perhaps))


def pytest_unconfigure(config: pytest.Config) -> None:
    """End although threads of tests that failed wait for ever: nobody told them to stop."""
    left = [
        one.name for one in threading.enumerate() if not one.daemon and one is not threading.main_thread()
    ]
    status = config.stash.get(_EXIT_STATUS, 0)
    if left and status:
        print(f"ended with threads that failed tests left: {', '.join(left)}", file=sys.stderr, flush=True)
        sys.stdout.flush()
        os._exit(status)


@pytest.fixture(autouse=True)
def own_umask_and_log_level() -> Iterator[None]:
    """A run or a program that is started in this process changes the umask, and what later tests may log."""
    before, level = os.umask(0o022), logging.getLogger().level
    os.umask(before)
    yield
    os.umask(before)
    logging.getLogger().setLevel(level)


@pytest.fixture
def small_disk(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A file system of four megabytes, or of as many as the fixture's parameter says."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={getattr(request, 'param', 4)}m", "tmpfs", str(folder)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("this user may not mount a file system")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)
