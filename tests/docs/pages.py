"""Files and commands of a page: fenced blocks whose info string names a file, or a kind of `sh` block."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
YOUR_OWN = ROOT / "docs" / "your-own"
BLOCK = re.compile(r"^```(\w+) (\S+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def write_files(page: Path, folder: Path) -> None:
    """Write every file of `page` into `folder`."""
    for language, name, text in BLOCK.findall(page.read_text()):
        if language != "sh":
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)


def commands_of(page: Path, kind: str = "run") -> list[str]:
    """Return the lines of the `sh` blocks of one kind."""
    blocks = [
        text for language, name, text in BLOCK.findall(page.read_text()) if (language, name) == ("sh", kind)
    ]
    return [line for text in blocks for line in text.splitlines()]


def run(command: str, folder: Path, timeout_s: float = 120.0) -> str:
    """Run a command of a page as `start` does; return stdout."""
    done = start(command, folder, timeout_s)
    assert done.returncode == 0, f"{command}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


def start(command: str, folder: Path, timeout_s: float) -> subprocess.CompletedProcess[str]:
    """Run a command in `folder`, with this environment's `python` and `asyncrl` and no other's modules."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"PATH": path}
    return subprocess.run(
        shlex.split(command),
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
