"""Calls the real command line in this process, and makes folders of live and ended runs for it to find."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from asyncrl.cli.app import main
from asyncrl.control.api.server import ControlApi, Route
from asyncrl.control.record.rundir import RunDir, write_json
from asyncrl.control.roster import RUN_VARIABLE
from asyncrl.core.config.load import dump_resolved
from asyncrl.core.config.tree import Config

KEY = "key"
RUN_ID = f"called{os.getpid()}"
"""Of this process alone: what is left of a run is ended by its id."""


@dataclass(frozen=True)
class Done:
    """How a command ended."""

    code: int
    out: str
    err: str


def asyncrl(*words: str | Path) -> Done:
    """Run `asyncrl WORDS` to its end; stdout is no terminal."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    with (
        mock.patch.object(sys, "argv", ["asyncrl", *map(str, words)]),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            main()
        except SystemExit as end:
            code = int(end.code or 0)
    return Done(code, out.getvalue(), err.getvalue())


def make_config(name: str, runs_dir: Path, **sections: Any) -> Config:
    values = {
        "run": {"name": name, "dir": str(runs_dir)},
        "model": {"path": "builtin:digit_sort"},
        "data": {"train": "builtin:digit_sort"},
        "reward": {"fn": "gsm8k"},
    }
    return Config.model_validate(values | sections)


def make_folder(runs_dir: Path, name: str, **sections: Any) -> RunDir:
    """Make the folder of a run that has been started once."""
    folder = RunDir(runs_dir / name)
    folder.logs.mkdir(parents=True)
    folder.resolved.write_text(dump_resolved(make_config(name, runs_dir, **sections)))
    return folder


@contextlib.contextmanager
def head_of(folder: RunDir, url: str = "") -> Iterator[subprocess.Popen[bytes]]:
    """A process that stands for the run's head: the run lives as long as it does."""
    environment = {RUN_VARIABLE: RUN_ID, "PATH": os.environ["PATH"]}
    with subprocess.Popen(["sleep", "60"], env=environment) as head:
        live = {"run_id": RUN_ID, "key": KEY, "sockets": "/nowhere", "pid": head.pid, "url": url}
        write_json(folder.live, live)
        try:
            yield head
        finally:
            head.kill()


@contextlib.contextmanager
def live_run(runs_dir: Path, name: str, routes: dict[str, Route]) -> Iterator[RunDir]:
    """A run whose control API is real and answers with `routes`."""
    folder = make_folder(runs_dir, name)
    api = ControlApi(0, KEY, routes)
    try:
        with head_of(folder, api.url):
            yield folder
    finally:
        api.close()
