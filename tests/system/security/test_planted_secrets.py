"""Secrets that a run is given, or makes, are looked for wherever others could find them."""

from __future__ import annotations

import itertools
import json
import os
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from asyncrl.control.api.access import page_token
from asyncrl.control.machine.processes import pids_of_run
from asyncrl.core.sockets.keys import read_client_keys
from tests.buffer.journals.redis.redis_parts import administer, plain_redis
from tests.buffer.journals.redis.test_journal_redis import RIGHTS
from tests.system.parts.up_run import UpRun

PLANTED = {
    "PLANTED_REDIS": "planted-redis-9c41d27e",
    "ASYNCRL_GATEWAY_KEY": "planted-gateway-5d70a3b8",
    "WANDB_API_KEY": "planted-wandb-e1f26c94",
}
PRIVATE = ("run.json", "keys.json", "service_keys.json")
"""Files of mode 0600 that hold the keys of the run itself."""


ANSWERS = {
    "/status": b'"services"',
    "/weights": b'"replicas"',
    "/metrics": b"asyncrl_run_step",
    "/health": b'"status"',
    "/events": b"event: view",
    "/": b"<html",
}
"""All that the control API answers to readers, and what stands in each."""


def answer_of(live: dict[str, Any], path: str) -> bytes:
    """Return what the run's API answers, of a stream the first events."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    request = urllib.request.Request(live["url"] + path, headers={"Authorization": f"Bearer {live['key']}"})
    with opener.open(request, timeout=30) as response:
        if path != "/events":
            return bytes(response.read())
        return b"".join(itertools.takewhile(lambda line: b"event: pulse" not in line, response))


def files_with(folder: Path, secrets: dict[str, bytes]) -> list[str]:
    """Return which files under `folder` hold which secret."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name not in PRIVATE]
    return [f"{path}: {name}" for path in files for name, one in secrets.items() if one in path.read_bytes()]


def ray_logs(run_id: str) -> Path:
    """Return the folder of logs of the run's own Ray."""
    for pid in pids_of_run(run_id):
        for argument in psutil.Process(pid).cmdline():
            if argument.startswith("--log_dir="):
                return Path(argument.removeprefix("--log_dir="))
    raise AssertionError("the run has no Ray of its own")


@pytest.mark.long
def test_planted_secrets_are_in_no_log_file_or_argument_of_a_run(
    up: Callable[..., UpRun], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, secret in PLANTED.items():
        monkeypatch.setenv(name, secret)
    with plain_redis(tmp_path) as address:
        administer(
            address, ("ACL", "SETUSER", "buffer", "on", f">{PLANTED['PLANTED_REDIS']}", *RIGHTS.split())
        )
        url = address.replace("redis://", "redis://buffer:${PLANTED_REDIS}@")
        sets = ("buffer.journal=redis", f"buffer.url={url}", "launcher.host=127.0.0.1", "launcher.curve=on")
        umask = os.umask(0)
        run = up("planted", *sets, "learner.steps=4", "eval.every_steps=0")
        os.umask(umask)
        run.wait_for(lambda status: status.get("step", 0) >= 1, deadline_s=250.0)

        live = json.loads((run.folder / "run.json").read_text())
        keys = {kind: read_client_keys(run.folder / f"{kind}.json") for kind in ("keys", "service_keys")}
        secrets = {name: secret.encode() for name, secret in PLANTED.items()}
        secrets |= {kind: one.secret for kind, one in keys.items()} | {"key of the API": live["key"].encode()}
        kept = secrets | {"token of the page": page_token(live["key"]).encode()}  # a terminal may show it
        pids = pids_of_run(live["run_id"])
        assert len(pids) > 6
        arguments = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in pids}
        assert [pid for pid, text in arguments.items() if any(one in text for one in kept.values())] == []
        answers = {path: answer_of(live, path) for path in ANSWERS}
        printed = run.command("status", "--json").stdout
        logs = ray_logs(live["run_id"])
        code, output = run.finish()
    assert code == 0, output
    assert all(mark in answers[path] for path, mark in ANSWERS.items()), answers
    assert [(path, name) for path, text in answers.items() for name, one in kept.items() if one in text] == []
    assert "services" in printed
    assert [name for name, secret in secrets.items() if secret.decode() in printed + output] == []
    assert files_with(run.folder, kept) == []
    assert files_with(logs, kept) == []
    assert [
        path for path in run.folder.rglob("*") if path.lstat().st_mode & 0o022 and not path.is_symlink()
    ] == []
    assert "${PLANTED_REDIS}" in (run.folder / "resolved.yaml").read_text()
