"""One sample of everything that a run holds: memory, descriptors, threads, processes, shared memory, files.

Owns the labels of a sample: `quantity/owner`. Processes are found by the mark of their run, Ray's own among
them; a process that was replaced by another of the same service has the same label. Reads `/proc` and file
sizes only, so that the run is not disturbed. Linux only.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from asyncrl.cli.run.handle import RunHandle
from asyncrl.control.machine.processes import pids_of_run, shared_memory_of
from asyncrl.core.service import SERVICE_VARIABLE

MEMORY, DESCRIPTORS, THREADS = "memory_bytes", "descriptors", "threads"
PROCESSES, SEGMENTS, SEGMENT_BYTES = "processes/run", "segments/run", "segment_bytes/run"
FILES, FILE_BYTES = "files", "file_bytes"
BLOCK_BYTES = 512
"""Unit of `st_blocks`."""


@dataclass(frozen=True)
class Sample:
    """One reading.

    Attributes:
        at_s: Seconds since the first reading.
        step: Learner steps that the run had done.
        values: By label; counts and bytes.
    """

    at_s: float
    step: int
    values: Mapping[str, float]


def read_values(handle: RunHandle) -> dict[str, float]:
    """Return what the run of `handle` holds at this moment, by label."""
    pids = sorted(pids_of_run(handle.run_id))
    segments = [size for path in shared_memory_of(handle.run_id) for size in _sizes(path)]
    values: dict[str, float] = {
        PROCESSES: len(pids),
        SEGMENTS: len(segments),
        SEGMENT_BYTES: sum(segments),
    }
    seen: Counter[str] = Counter()
    for pid in pids:
        with contextlib.suppress(psutil.Error, OSError):  # it ended meanwhile
            values |= _read_process(psutil.Process(pid), seen)
    for path in (*_entries(handle.folder.path), handle.sockets):
        sizes = list(_sizes(path))
        is_sockets = path == handle.sockets
        label = "sockets and Ray" if is_sockets else str(path.relative_to(handle.folder.path))
        values |= {f"{FILES}/{label}": len(sizes), f"{FILE_BYTES}/{label}": sum(sizes)}
    return values


def _read_process(process: psutil.Process, seen: Counter[str]) -> dict[str, float]:
    """Return the values of one process; `seen` counts the processes of a label, which get numbers."""
    label = _label(process)
    memory = process.memory_info()
    num_descriptors, num_threads = process.num_fds(), process.num_threads()
    seen[label] += 1
    if seen[label] > 1:
        label = f"{label} {seen[label]}"
    return {
        f"{MEMORY}/{label}": memory.rss - memory.shared,  # anonymous: files and segments are counted as such
        f"{DESCRIPTORS}/{label}": num_descriptors,
        f"{THREADS}/{label}": num_threads,
    }


def _label(process: psutil.Process) -> str:
    """Return the service of a process and its program, the latter alone for processes of no service."""
    service = process.environ().get(SERVICE_VARIABLE, "")
    name = process.name().split(" ")[0]
    if service:
        return service if name.startswith("ray::") else f"{service}, {name}"
    return _script(process.cmdline()) or name


def _script(command: list[str]) -> str:
    """Return the module or the file that a Python process runs, empty for another program."""
    if not command or "python" not in Path(command[0]).name:
        return ""
    after_m = command[command.index("-m") + 1 :] if "-m" in command else []
    files = (Path(word).name for word in command[1:] if word.endswith(".py"))
    return next(iter([*after_m, *files]), "")


def _entries(folder: Path) -> list[Path]:
    """Return what is in a run's folder; instead of the buffer's own folder, what is in that."""
    try:
        entries = sorted(folder.iterdir())
    except FileNotFoundError:
        return []
    return [one for path in entries for one in (_entries(path) if path == folder / "buffer" else [path])]


def _sizes(path: Path) -> Iterator[int]:
    """Yield the bytes on the disk of a file, or of each file below a folder."""
    folders = [(str(path.parent), [], [path.name])] if path.is_file() else os.walk(path)
    for folder, _, names in folders:
        for name in names:
            with contextlib.suppress(OSError):  # removed meanwhile
                yield os.lstat(os.path.join(folder, name)).st_blocks * BLOCK_BYTES
