"""Processes of one run: found and ended by pid, never by name.

Every process of a run carries the run's id in its environment; nothing else is ever touched. Of what bears
the run's id in `/dev/shm` only this user's own counts: anybody can give a file that name.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time
from collections.abc import Collection
from pathlib import Path

from asyncrl.control.roster import RUN_VARIABLE
from asyncrl.core.files.private import is_own
from asyncrl.core.service import SERVICE_VARIABLE

SHM, PROC = Path("/dev/shm"), Path("/proc")
EXEC_S = 5.0
"""Longest wait, in seconds, for the environment of a process in its exec; a busy machine needs far less."""
VIRTUAL_SIZE, ENVIRONMENT_END = 23, 51
"""Fields of `/proc/PID/stat`, numbered as in proc(5)."""


def is_alive(pid: int, run_id: str) -> bool:
    """Tell whether `pid` is a living process of run `run_id`."""
    return _marker(run_id) in _environment(pid) and not _is_zombie(pid)


def pids_of_run(run_id: str) -> list[int]:
    """Return the living processes of a run, this one excepted."""
    found = (int(entry.name) for entry in PROC.iterdir() if entry.name.isdigit())
    return [pid for pid in found if pid != os.getpid() and is_alive(pid, run_id)]


def pids_of_service(run_id: str, name: str) -> list[int]:
    """Return the living processes of one service of a run: its own and all that it has started."""
    mark = f"{SERVICE_VARIABLE}={name}".encode()
    return [pid for pid in pids_of_run(run_id) if mark in _environment(pid)]


def is_of_service(pid: int, run_id: str, name: str) -> bool:
    """Tell whether `pid` is a living process, on this machine, of service `name` of a run."""
    return is_alive(pid, run_id) and f"{SERVICE_VARIABLE}={name}".encode() in _environment(pid)


def end_service(
    run_id: str, name: str, others: Collection[int] = frozenset(), deadline_s: float = 10.0
) -> list[int]:
    """Kill the processes of a service, and those of `others` that no other service of the run has started.

    Returns:
        Those that are still alive.
    """
    end = time.monotonic() + deadline_s
    while True:
        left = {*pids_of_service(run_id, name), *(pid for pid in others if _may_belong(pid, run_id, name))}
        if not left or time.monotonic() > end:
            return sorted(left)
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def remove_segments(run_id: str, name: str) -> None:
    """Remove the shared memory and the semaphores that a service was killed with.

    A process that has mapped a segment may go on reading. A publisher's are its successor's.
    """
    folders = () if name.startswith("publisher.") else shared_memory_of(run_id)
    segments = (path for folder in folders for path in folder.glob(f"{name}-*"))
    semaphores = filter(is_own, SHM.glob(f"sem.asyncrl-{run_id}-{name}-*"))
    for path in (*segments, *semaphores):
        path.unlink(missing_ok=True)


def shared_memory_of(run_id: str) -> list[Path]:
    """Return the folder of a run's shared-memory segments, and its semaphores."""
    named = (*SHM.glob(f"asyncrl-{run_id}-*"), *SHM.glob(f"sem.asyncrl-{run_id}-*"))
    return sorted(filter(is_own, named))


def stopped_services(run_id: str) -> set[str]:
    """Return the services of a run with a process, of their own or started by them, that is stopped."""
    prefix = f"{SERVICE_VARIABLE}=".encode()
    stopped = (_environment(pid) for pid in pids_of_run(run_id) if is_stopped(pid))
    marks = (mark for environment in stopped for mark in environment if mark.startswith(prefix))
    return {mark.removeprefix(prefix).decode() for mark in marks}


def is_stopped(pid: int) -> bool:
    """Tell whether a process is suspended, by SIGSTOP or a debugger."""
    return _state(pid) in ("T", "t")


def end_leftovers(run_id: str, keep: frozenset[int] = frozenset(), deadline_s: float = 10.0) -> int:
    """Kill the remaining processes of a run and return their number."""
    ended: set[int] = set()
    end = time.monotonic() + deadline_s
    while (left := set(pids_of_run(run_id)) - keep) and time.monotonic() < end:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        ended |= left
        time.sleep(0.05)
    return len(ended)


def remove_leftovers(run_id: str, socket_dir: Path) -> list[str]:
    """Remove a dead run's shared memory, semaphores and sockets; return what of the first two was there."""
    found = shared_memory_of(run_id)
    folders = [path for path in found if path.is_dir()]
    files = [*(set(found) - set(folders)), *(path for folder in folders for path in folder.iterdir())]
    for path in files:
        path.unlink(missing_ok=True)
    for folder in filter(is_own, (*folders, socket_dir)):  # names are free since it ended
        shutil.rmtree(folder, ignore_errors=True)
    return sorted(path.name for path in files)


def _may_belong(pid: int, run_id: str, name: str) -> bool:
    """Tell whether `pid` is of the run and not of another service: a number may have been given anew."""
    prefix = f"{SERVICE_VARIABLE}=".encode()
    marks = {mark.removeprefix(prefix) for mark in _environment(pid) if mark.startswith(prefix)}
    return is_alive(pid, run_id) and marks <= {b"", name.encode()}


def _marker(run_id: str) -> bytes:
    return f"{RUN_VARIABLE}={run_id}".encode()


def _environment(pid: int) -> list[bytes]:
    end = time.monotonic() + EXEC_S
    while True:
        is_in_exec = _is_in_exec(pid)  # asked first: it may have its environment a moment later
        try:
            read = (PROC / str(pid) / "environ").read_bytes()
        except OSError:  # it is gone, or not ours
            return []
        if read or not is_in_exec or time.monotonic() > end:
            return read.split(b"\0")
        time.sleep(0.001)


def _is_in_exec(pid: int) -> bool:
    """Tell whether a process is in its exec: its memory is there, and the environment is not yet in it."""
    fields = ["", "", "", *_stat(pid)]
    return len(fields) > ENVIRONMENT_END and fields[VIRTUAL_SIZE] != "0" == fields[ENVIRONMENT_END]


def _is_zombie(pid: int) -> bool:
    return _state(pid) in ("Z", "")


def _state(pid: int) -> str:
    """Return the letter of a process's state (see proc(5)), empty if there is none."""
    return next(iter(_stat(pid)), "")


def _stat(pid: int) -> list[str]:
    """Return the kernel's fields of a process, from its state on, which is field 3 in proc(5)."""
    try:
        return (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
