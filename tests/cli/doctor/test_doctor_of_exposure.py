"""Findings of `asyncrl doctor` about exposure to other users."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from asyncrl.cli.doctor import exposure
from asyncrl.cli.doctor.finding import Finding
from tests.cli.commands.calling import asyncrl, head_of, make_config, make_folder


def one_of(found: Iterator[Finding]) -> Finding:
    (finding,) = found
    return finding


@contextlib.contextmanager
def ray_server(folder: Path, **environment: str) -> Iterator[int]:
    """A process that is called as Ray's server; the examination reads names and environments."""
    program = folder / exposure.RAY_SERVER
    shutil.copy("/bin/sleep", program)
    with subprocess.Popen([str(program), "60"], env=environment) as process:
        try:
            yield process.pid
        finally:
            process.kill()


def test_a_run_folder_that_others_can_read_is_told(tmp_path: Path) -> None:
    for name, mode in (("open", 0o755), ("grouped", 0o710), ("private", 0o700)):
        make_folder(tmp_path, name).path.chmod(mode)
    found = one_of(exposure.check_folders(str(tmp_path)))
    assert found.verdict == "warn" and found.found.startswith("2 of 3 are open")
    assert "open" in found.advice and "private" not in found.found + found.advice
    for folder in tmp_path.iterdir():
        folder.chmod(0o700)
    assert one_of(exposure.check_folders(str(tmp_path))).verdict == "ok"


@pytest.mark.parametrize(
    ("mode", "file_mode", "told"),
    [("", 0o600, "asks for no token"), ("token", 0o644, "is open to other users"), ("token", 0o600, "")],
)
def test_a_ray_without_a_token_of_its_user_alone_is_told(
    tmp_path: Path, mode: str, file_mode: int, told: str
) -> None:
    token = tmp_path / "token"
    token.write_text("secret")
    token.chmod(file_mode)
    with ray_server(tmp_path, RAY_AUTH_MODE=mode, RAY_AUTH_TOKEN_PATH=str(token)) as pid:
        found = one_of(exposure.check_ray_token())
    assert "secret" not in found.found
    of_it = [part for part in found.found.split("; ") if str(pid) in part]
    assert bool(of_it) is bool(told) and all(told in part for part in of_it), found
    assert not told or (found.verdict, "RAY_AUTH_MODE=token" in found.advice) == ("warn", True)


@pytest.mark.parametrize(
    ("sections", "environment", "told"),
    [
        ({}, {}, []),
        ({"launcher": {"host": "127.0.0.1"}}, {}, ["its sockets on 127.0.0.1 have no keys"]),
        ({"launcher": {"host": "127.0.0.1", "curve": "on"}}, {}, []),
        ({"rollout": {"gateway": {}}}, {}, ["its gateway has no key"]),
        ({"rollout": {"gateway": {}}}, {"ASYNCRL_GATEWAY_KEY": "a-long-enough-key"}, []),
    ],
)
def test_sockets_and_a_gateway_without_a_key_are_exposures(
    tmp_path: Path, sections: dict[str, Any], environment: dict[str, str], told: list[str]
) -> None:
    assert exposure.exposures_of(make_config("one", tmp_path, **sections), environment) == told


def test_the_doctor_tells_all_that_is_open_at_once(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, "one", launcher={"host": "127.0.0.1"})
    folder.path.chmod(0o755)
    with head_of(folder), ray_server(tmp_path) as pid:
        found = {one["what"]: one for one in json.loads(asyncrl("doctor", "--json", "--dir", tmp_path).out)}
    assert "1 of 1 are open to other users: one" in found["run folders"]["found"]
    assert f"process {pid} asks for no token" in found["ray token"]["found"]
    assert found["live runs"]["found"] == "one: its sockets on 127.0.0.1 have no keys"
    for what in ("run folders", "ray token", "live runs"):
        assert found[what]["verdict"] == "warn" and found[what]["advice"]
