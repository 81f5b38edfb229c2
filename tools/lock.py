"""Lock tool: renews the pinned lists from pyproject.toml: `make lock`, or `make lock UPGRADE=--upgrade`.

The lists name packages, versions and hashes: no host and no folder, so that they fit any machine. A mirror
has the files of the index that it mirrors, and so their hashes. Invariant: each package is looked up in one
index, pip's `index-url` or the default one, so that no other can slip a package of that name in. torch's CPU
build is not there: it is in pip's `find-links`, or, with UV_TORCH_BACKEND=cpu, in PyTorch's own index.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from pip_settings import read_pip_settings, uv_environment

ROOT = Path(__file__).resolve().parent.parent
BIN = ROOT / ".venv" / "bin"
HEADER = "# Made by `make lock` from pyproject.toml ({extras}); installed with --no-deps.\n"
DEADLINE_S = 600.0
PLATFORM = "x86_64-manylinux_2_34"
"""glibc 2.34 and newer (2021): for an older one, some packages have no wheel of their newest version."""


def main(options: list[str]) -> None:
    """Renew every list."""
    environment = of_one_index(uv_environment(read_pip_settings(BIN / "python"), os.environ))
    for name in ("cpu", "gpu"):
        compile_list(name, options, environment)
    for name in ("sglang", "agents"):
        compile_group(name, options, environment)
    compile_uv(options, environment)


def of_one_index(environment: dict[str, str]) -> dict[str, str]:
    """Return uv's environment without further indexes."""
    return {**environment, "UV_INDEX_STRATEGY": "first-index", "UV_EXTRA_INDEX_URL": ""}


def compile_list(name: str, options: list[str], environment: dict[str, str]) -> None:
    """Renew `requirements/<name>.txt`; versions that still fit stay unless `--upgrade` is given."""
    target = ROOT / "requirements" / f"{name}.txt"
    overrides = ROOT / "requirements" / f"overrides-{name}.txt"
    given = ["pyproject.toml", "--extra", "train", "--extra", name, "--extra", "peft", "--extra", "dev"]
    if overrides.exists():
        given += ["--override", str(overrides)]
    run_compile([*given, "--output-file", str(target), *options], environment)
    target.write_text(HEADER.format(extras=f"extras train, {name}, peft, dev") + target.read_text())


def compile_group(name: str, options: list[str], environment: dict[str, str]) -> None:
    """Renew the list of an environment of its own: its pins clash with vLLM's, or must not bind ours."""
    target = ROOT / "requirements" / f"{name}.txt"
    overrides = ROOT / "requirements" / f"overrides-{name}.txt"
    given = ["--group", f"pyproject.toml:{name}"]
    if overrides.exists():
        given += ["--override", str(overrides)]
    run_compile([*given, "--output-file", str(target), *options], environment)
    target.write_text(HEADER.format(extras=f"the group {name}") + target.read_text())


def compile_uv(options: list[str], environment: dict[str, str]) -> None:
    """Renew `requirements/uv.txt`, of the program that installs the others."""
    target = ROOT / "requirements" / "uv.txt"
    run_compile(["-", "--output-file", str(target), *options], environment, "uv")


def run_compile(given: list[str], environment: dict[str, str], text: str = "") -> None:
    """Run `uv pip compile` with hashes, for the machines that asyncrl runs on."""
    command = [
        str(BIN / "uv"),
        "pip",
        "compile",
        "--quiet",
        "--generate-hashes",
        "--no-header",
        "--no-annotate",
    ]
    command += ["--python-version", "3.11", "--python-platform", PLATFORM, *given]
    subprocess.run(command, cwd=ROOT, env=environment, input=text, text=True, check=True, timeout=DEADLINE_S)


if __name__ == "__main__":
    main(sys.argv[1:])
