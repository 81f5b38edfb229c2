"""Reaching a live run from another process: find its folder, speak to its control API."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncrl.control.launch.processes import is_alive
from asyncrl.control.record.rundir import RunDir, read_json
from asyncrl.errors import AsyncrlError, RemoteError

CALL_DEADLINE_S = 10.0


class NotRunning(AsyncrlError, LookupError):
    """There is no live run of that name. The CLI exits with code 4."""


@dataclass(frozen=True)
class RunClient:
    """Speaks to the control API of one live run."""

    folder: RunDir
    url: str
    key: str
    pid: int

    def status(self) -> dict[str, Any]:
        """Return the run's snapshot."""
        return self._call("GET", "/status")

    def weights(self) -> dict[str, Any]:
        """Return what its services say of weight sync, see `syncing.weights_answer`."""
        return self._call("GET", "/weights")

    def scale(self, replicas: int) -> dict[str, Any]:
        """Ask for `replicas` rollout replicas."""
        return self._call("POST", "/scale", {"replicas": replicas})

    def tighten(self, max_lag: int) -> dict[str, Any]:
        """Admit under another bound on lag, at most the configured one, until the run ends."""
        return self._call("POST", "/tighten", {"max_lag": max_lag})

    def stop(self) -> dict[str, Any]:
        """Ask the run to checkpoint and end."""
        return self._call("POST", "/stop")

    def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        data = None if body is None and method == "GET" else json.dumps(body or {}).encode()
        headers = {"Authorization": f"Bearer {self.key}", "Content-Type": "application/json"}
        request = urllib.request.Request(self.url + path, data=data, headers=headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=CALL_DEADLINE_S) as response:
                result: dict[str, Any] = json.load(response)
                return result
        except urllib.error.HTTPError as error:
            message = json.loads(error.read() or b"{}").get("error", str(error))
            raise RemoteError(message) from error
        except OSError as error:
            raise NotRunning(f"the run in {self.folder.path} does not answer: {error}") from error


def connect(folder: RunDir) -> RunClient | None:
    """Return a client for the live run in `folder`, or None while it has no API or is dead."""
    live = read_json(folder.live)
    if live is None or not live.get("url") or not is_alive(live["pid"], live["run_id"]):
        return None
    return RunClient(folder, live["url"], live["key"], live["pid"])


def find_run(runs_dir: str, name: str | None) -> RunClient:
    """Return a client for the named run, or for the live run that started last.

    Raises:
        NotRunning: There is none.
    """
    root = Path(runs_dir)
    folders = [root / name] if name else sorted(root.glob("*/"), key=_started, reverse=True)
    for folder in folders:
        client = connect(RunDir(folder))
        if client is not None:
            return client
    what = f"run '{name}'" if name else "run"
    raise NotRunning(f"no live {what} in {root}", hint="Start one with: asyncrl up CONFIG")


def _started(folder: Path) -> float:
    live = folder / "run.json"
    return live.stat().st_mtime if live.exists() else 0.0
