"""Renews the pinned lists from pyproject.toml: `make lock`, or `make lock UPGRADE=--upgrade`.

The lists name packages and versions only: no host, no folder, no hash, so that they fit any machine.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from pip_settings import read_pip_settings, uv_environment

ROOT = Path(__file__).resolve().parent.parent
BIN = ROOT / ".venv" / "bin"
HEADER = "# Made by `make lock` from pyproject.toml (extras {extras}); installed with --no-deps.\n"
DEADLINE_S = 600.0
PLATFORM = "x86_64-manylinux_2_34"
"""glibc 2.34 and newer (2021): for an older one, some packages have no wheel of their newest version."""


def main(options: list[str]) -> None:
    """Renew every list."""
    environment = uv_environment(read_pip_settings(BIN / "python"), os.environ)
    for name in ("cpu", "gpu"):
        compile_list(name, options, environment)


def compile_list(name: str, options: list[str], environment: dict[str, str]) -> None:
    """Renew `requirements/<name>.txt`; versions that still fit stay unless `--upgrade` is given."""
    target = ROOT / "requirements" / f"{name}.txt"
    overrides = ROOT / "requirements" / f"overrides-{name}.txt"
    command = [
        str(BIN / "uv"),
        "pip",
        "compile",
        "pyproject.toml",
        "--extra",
        name,
        "--extra",
        "dev",
        "--quiet",
    ]
    command += ["--python-version", "3.11", "--python-platform", PLATFORM]
    command += ["--no-header", "--no-annotate", "--output-file", str(target), *options]
    if overrides.exists():
        command += ["--override", str(overrides)]
    subprocess.run(command, cwd=ROOT, env=environment, check=True, timeout=DEADLINE_S)
    target.write_text(HEADER.format(extras=f"{name}, dev") + target.read_text())


if __name__ == "__main__":
    main(sys.argv[1:])
