"""Leftovers of a test session: processes, shared memory, files outside its folders.

Owns the question "is it ours": every process of a session has its mark in the environment, and names the test
that started it (PYTEST_CURRENT_TEST). A name in /dev/shm or in the folder of temporary files is ours if it is
newer than the session, and no process of others uses it.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil

MARK = "ASYNCRL_TEST_SESSION"
PATIENCE_S = 15.0
"""Processes that were told to end, and what they remove, are gone by then."""
FOLDERS = (Path("/dev/shm"), Path(tempfile.gettempdir()))
OWN_FOLDERS = ("pytest-of-", "asyncrl-tests-", "matplotlib-", "pymp-")
"""Of pytest, which keeps its last three; and caches of libraries, one for all their processes."""
HELPERS = ("multiprocessing.resource_tracker", "multiprocessing.forkserver", "execnet")
"""Processes that end with the Python that started them."""
OURS = "asyncrl"
"""In the names of all that the project makes in shared folders."""
VLLM_MEETS = "vllm_dist_"
"""Where the processes of one engine meet; vLLM leaves the file. A run's own is in its private folder."""
ROOT = Path(__file__).resolve().parent.parent
at_end = contextlib.ExitStack()
"""Ends what the tests of one process share, before anybody looks at what is left."""


@dataclass
class Session:
    """One session, from its start."""

    mark: str = field(default_factory=lambda: os.environ.setdefault(MARK, secrets.token_hex(8)))
    before: dict[Path, set[str]] = field(default_factory=lambda: {one: _names_in(one) for one in FOLDERS})
    tree: str = field(default_factory=lambda: _untracked())

    def find_left(self) -> tuple[list[str], list[str]]:
        """Return what is surely ours and left once all had their time to go, and what may be others'."""
        end = time.monotonic() + PATIENCE_S
        while (left := self.look())[0] and time.monotonic() < end:
            time.sleep(0.5)
        return left

    def look(self) -> tuple[list[str], list[str]]:
        """Return a line for each thing that is ours, and for each that may be others'."""
        ours, perhaps = [_describe(process) for process in self._processes()], []
        others = None
        for folder, before in self.before.items():
            for name in sorted(_names_in(folder) - before):
                others = _used_by_others(self.mark) if others is None else others
                if name in others:
                    continue
                if name.startswith(VLLM_MEETS):
                    (folder / name).unlink(missing_ok=True)
                else:
                    is_ours = OURS in name and _is_alone(self.mark)
                    (ours if is_ours else perhaps).append(f"{folder / name}")
        if (now := _untracked()) != self.tree:
            perhaps.append(f"files in the repository: {now}")
        return ours, perhaps

    def _processes(self) -> Iterator[psutil.Process]:
        own = {os.getpid(), *(one.pid for one in psutil.Process().parents())}
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                is_marked = process.environ().get(MARK) == self.mark
                is_helper = any(name in " ".join(process.cmdline()) for name in HELPERS)
                if is_marked and process.pid not in own and not (is_helper and process.ppid() in own):
                    yield process


def _describe(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        test = process.environ().get("PYTEST_CURRENT_TEST", "")
        return f"process {process.pid} of {test}: {' '.join(process.cmdline())[:100]}"
    return f"process {process.pid}"


def _names_in(folder: Path) -> set[str]:
    names = {one.name for one in folder.iterdir()} if folder.exists() else set()
    return {name for name in names if not name.startswith(OWN_FOLDERS)}


def _used_by_others(mark: str) -> str:
    """Return the command lines and mapped files of all processes that are not of this session."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get(MARK) != mark:
                found += [*process.cmdline(), Path(f"/proc/{process.pid}/maps").read_text()]
                found += [os.readlink(one) for one in Path(f"/proc/{process.pid}/fd").iterdir()]
    return "\n".join(found)


def _is_alone(mark: str) -> bool:
    """Tell whether no other session of tests runs on this machine, whose runs have names like ours."""
    marks = set()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            marks.add(process.environ().get(MARK, mark))
    return marks == {mark}


def _untracked() -> str:
    """Return what git calls untracked, and the runs in the default folder; nothing without git."""
    command = ["git", "status", "--porcelain", "--untracked-files=normal"]
    with contextlib.suppress(OSError):
        found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout
        lines = [line[3:] for line in found.splitlines() if line.startswith("??")]
        return " ".join([*lines, *sorted(str(one.relative_to(ROOT)) for one in (ROOT / "runs").glob("*"))])
    return ""
