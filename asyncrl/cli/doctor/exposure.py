"""Check of exposure: folders, Ray and sockets that other users of the machine or network peers can reach.

Reads the runs of one folder and this user's processes. Must never change a mode or end a process.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil

from asyncrl.cli.doctor.finding import Finding, judge
from asyncrl.cli.run.client import find_folders
from asyncrl.cli.run.handle import attach
from asyncrl.control.record.rundir import RunDir
from asyncrl.core.config.load import load_resolved
from asyncrl.core.config.tree import Config
from asyncrl.core.errors import ConfigError
from asyncrl.core.service_function import function

OF_OTHERS = 0o077
"""Permissions of the group and of all others."""
RAY_SERVER = "gcs_server"
TOKEN_MODE, TOKEN_PATH = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH"
DEFAULT_TOKEN = Path(".ray/auth_token")
"""In the user's home."""


def check_folders(runs_dir: str) -> Iterator[Finding]:
    """Yield run folders that other users can read or write: logs and rollouts lie there."""
    folders = find_folders(runs_dir)
    is_open = [folder for folder in folders if _is_open(folder)]
    names = ", ".join(folder.name for folder in is_open)
    found = f"{len(is_open)} of {len(folders)} are open to other users{f': {names}' if names else ''}"
    advice = f"chmod -R go-rwx {shlex.join(map(str, is_open))}"
    yield judge("run folders", found, not is_open, advice)


def check_ray_token() -> Iterator[Finding]:
    """Yield Rays of this user that run code for whoever reaches them, or whose token others can read."""
    problems = []
    servers = {one.pid: _environment(one.pid) for one in psutil.process_iter() if _name(one) == RAY_SERVER}
    readable = {pid: environment for pid, environment in servers.items() if environment is not None}
    for pid, environment in readable.items():
        token = Path(environment.get(TOKEN_PATH) or Path.home() / DEFAULT_TOKEN)
        if environment.get(TOKEN_MODE) != "token":
            problems.append(f"process {pid} asks for no token")
        elif _is_open(token):
            problems.append(f"the token of process {pid}, {token}, is open to other users")
    found = "; ".join(problems) or f"{len(readable)} Rays of this user, each with a token of its user alone"
    advice = (
        f"Before ray start on every node: export {TOKEN_MODE}=token, with {TOKEN_PATH} a file of mode 0600"
    )
    yield judge("ray token", found, not problems, advice)


def check_live_runs(runs_dir: str) -> Iterator[Finding]:
    """Yield live runs whose sockets or gateway any user of this machine can use."""
    problems, num_live = [], 0
    for folder in map(RunDir, find_folders(runs_dir)):
        if (live := attach(folder)) is None:
            continue
        num_live += 1
        environment = _environment(live.pid)
        try:
            exposures = [] if environment is None else exposures_of(load_resolved(folder.path), environment)
        except ConfigError:  # of another asyncrl
            continue
        problems += [f"{folder.path.name}: {what}" for what in exposures]
    found = "; ".join(problems) or f"{num_live} live runs, none open to every user"
    advice = "Set launcher.curve: on, and ASYNCRL_GATEWAY_KEY in the environment of 'asyncrl up'"
    yield judge("live runs", found, not problems, advice)


def exposures_of(config: Config, environment: Mapping[str, str]) -> list[str]:
    """Yield what of a run with this configuration is open to every user of its machine.

    Args:
        environment: Of its head process.
    """
    exposures = []
    if config.launcher.host is not None and not config.launcher.has_curve:
        exposures.append(f"its sockets on {config.launcher.host} have no keys")
    key = str(function("rollout_service.gateway.keys:VARIABLE"))
    if config.rollout.gateway is not None and not environment.get(key):
        exposures.append("its gateway has no key")
    return exposures


def _is_open(path: Path) -> bool:
    try:
        return bool(path.stat().st_mode & OF_OTHERS)
    except OSError:
        return False


def _name(process: psutil.Process) -> str:
    try:
        return str(process.name())
    except (psutil.Error, OSError):
        return ""


def _environment(pid: int) -> dict[str, str] | None:
    """Return a process's environment; None of one that has ended, or is another user's."""
    try:
        return psutil.Process(pid).environ()
    except (psutil.Error, OSError):
        return None
