"""Client of a live run for other processes: finds its folder, calls its control API."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from asyncrl.cli.run.ending import end_of
from asyncrl.control.api import operations as api
from asyncrl.control.machine.processes import is_alive
from asyncrl.control.record.live import read_live
from asyncrl.control.record.rundir import RunDir
from asyncrl.control.record.syncing import WeightsAnswer
from asyncrl.control.snapshot import Snapshot, read_snapshot
from asyncrl.core.errors import AsyncrlError, ConfigError, ConnectionLost, DeadlineExceeded, RemoteError
from asyncrl.core.rpc.message import A, Operation, Q, fields_of, read_message

CALL_DEADLINE_S = 10.0
COMMAND_DEADLINE_S = 60.0
"""Of a command that waits for services: replicas that do not answer take 5 s each, and are then killed."""
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""A run listens on this machine: whatever proxy the environment names, it would only be handed the key."""
START_FILES = ("run.json", "resolved.yaml")
"""Files that each start of a run writes."""


class NotRunning(AsyncrlError, LookupError):
    """There is no live run of that name. The CLI exits with code 4."""


@dataclass(frozen=True)
class RunClient:
    """Speaks to the control API of one live run.

    Every call raises NotRunning if nobody listens, DeadlineExceeded if the run heard and gave no answer (it
    may have done what was asked all the same), ConfigError if the request was wrong in itself, and
    RemoteError if the run could not do it.
    """

    folder: RunDir
    url: str
    key: str
    pid: int

    def status(self) -> Snapshot:
        """Return the run's snapshot."""
        return read_snapshot(self._call("GET", "/status"))

    def weights(self) -> WeightsAnswer:
        """Return what its services say of weight sync."""
        return read_message(self._call("GET", "/weights"), WeightsAnswer, "weights")

    def scale(self, replicas: int) -> api.Begun:
        """Ask for `replicas` rollout replicas."""
        return self._ask(api.SCALE, api.Scale(replicas))

    def drain(self, index: int) -> api.Begun:
        """Ask rollout.`index` to finish what it has and leave; another one takes its place."""
        return self._ask(api.DRAIN, api.DrainReplica(index))

    def pause(self) -> api.Paused:
        """Ask for no more leases, and for no step after the one in progress."""
        return self._ask(api.PAUSE, api.Pause())

    def unpause(self) -> api.Paused:
        """Take a pause back."""
        return self._ask(api.UNPAUSE, api.Unpause())

    def checkpoint(self) -> api.CheckpointAsked:
        """Ask for a checkpoint after the step in progress."""
        return self._ask(api.CHECKPOINT, api.WriteCheckpoint())

    def tighten(self, max_lag: int) -> api.Tightened:
        """Admit under another bound on lag, at most the configured one, until the run ends."""
        return self._ask(api.TIGHTEN, api.Tighten(max_lag))

    def stop(self) -> api.Stopping:
        """Ask the run to checkpoint and end."""
        return self._ask(api.STOP, api.Stop())

    def _ask(self, operation: Operation[Q, A], asked: Q) -> A:
        deadline_s = CALL_DEADLINE_S if isinstance(asked, api.Stop) else COMMAND_DEADLINE_S
        answer = self._call("POST", f"/{operation.name}", fields_of(asked), deadline_s)
        known = operation.answer.__struct_fields__  # a run of another version may say more
        told = {name: value for name, value in answer.items() if name in known}
        return read_message(told, operation.answer, operation.name)

    def _call(
        self,
        method: str,
        path: str,
        body: Mapping[str, object] | None = None,
        deadline_s: float | None = None,
    ) -> dict[str, object]:
        deadline_s = CALL_DEADLINE_S if deadline_s is None else deadline_s
        data = None if body is None else json.dumps(body).encode()
        headers = {"Authorization": f"Bearer {self.key}", "Content-Type": "application/json"}
        request = urllib.request.Request(self.url + path, data=data, headers=headers, method=method)
        try:
            with DIRECT.open(request, timeout=deadline_s) as response:
                result: dict[str, object] = json.load(response)
                return result
        except urllib.error.HTTPError as error:
            raise _refusal_of(error) from error
        except (OSError, http.client.HTTPException) as error:
            raise self._no_answer(error, deadline_s) from error

    def _no_answer(self, error: OSError | http.client.HTTPException, deadline_s: float) -> AsyncrlError:
        """Return what to raise for a call that was not answered: was it heard?"""
        cause = error.reason if isinstance(error, urllib.error.URLError) else error
        hint = "It may be done all the same: see 'asyncrl status'"
        if isinstance(cause, TimeoutError):
            what = f"the run in {self.folder.path} gave no answer within {deadline_s:g} s"
            return DeadlineExceeded(what, hint=hint)
        if isinstance(cause, ConnectionRefusedError):
            return NotRunning(f"the run in {self.folder.path} does not answer: {cause}")
        what = f"the run in {self.folder.path} hung up before it answered ({type(cause).__name__}: {cause})"
        return ConnectionLost(what, hint=hint)


def _refusal_of(error: urllib.error.HTTPError) -> AsyncrlError:
    """Return what to raise for a call that was refused, of the kind that the run says."""
    try:
        answer = json.loads(error.read())
        message, is_wrong = str(answer["error"]), answer.get("kind") == ConfigError.__name__
    except (ValueError, KeyError, TypeError, AttributeError):  # somebody else listens there
        return RemoteError(str(error))
    return ConfigError(message) if is_wrong else RemoteError(message)


def connect(folder: RunDir) -> RunClient | None:
    """Return a client for the live run in `folder`, or None while it has no API or is dead."""
    live = read_live(folder.live)
    if live is None or not live.url or not is_alive(live.pid, live.run_id):
        return None
    return RunClient(folder, live.url, live.key, live.pid)


def find_run(runs_dir: str, name: str | None) -> RunClient:
    """Return a client for the named run, or for the live run that started last.

    Args:
        name: Of a run in `runs_dir`, or the path of its folder.

    Raises:
        NotRunning: There is none, or it is starting and cannot be asked yet.
    """
    folder = find_live_folder(runs_dir, name)
    client = connect(folder)
    if client is None:
        what = f"the run in {folder.path} is starting, or ending, and cannot be asked"
        raise NotRunning(what, hint="'asyncrl status' says what it does")
    return client


def find_live_folder(runs_dir: str, name: str | None) -> RunDir:
    """Return the folder of the named live run, or of the live one that was started last.

    Its API may not be up yet.

    Raises:
        NotRunning: There is none.
    """
    for folder in _named(runs_dir, name) if name else find_folders(runs_dir):
        live = read_live(folder / "run.json")
        if live is not None and is_alive(live.pid, live.run_id):
            return RunDir(folder)
    known = _named(runs_dir, name) if name else find_folders(runs_dir)[:1]
    for folder in known:
        if end := end_of(RunDir(folder)):
            raise NotRunning(end)
    if any((folder / name).is_file() for folder in known for name in START_FILES):
        raise NotRunning(f"run '{known[0].name}' is not running", hint="Start it with: asyncrl up CONFIG")
    if name:
        names = ", ".join(folder.name for folder in find_folders(runs_dir))
        hint = f"There are: {names}" if names else "Say where the runs are with --dir"
        raise NotRunning(f"there is no run '{name}' in {runs_dir}", hint=hint)
    raise NotRunning(f"there is no run in {runs_dir}", hint="Start one with: asyncrl up CONFIG")


def find_folders(runs_dir: str) -> list[Path]:
    """Return the folders of all runs in `runs_dir`, the one that was started last first."""
    root = Path(runs_dir)
    folders = {path.parent for name in START_FILES for path in root.glob(f"*/{name}")}
    return sorted(folders, key=_started, reverse=True)


def _named(runs_dir: str, name: str) -> list[Path]:
    return [Path(runs_dir) / name, Path(name)]


def _started(folder: Path) -> float:
    for name in START_FILES:
        if (folder / name).exists():
            return (folder / name).stat().st_mtime
    return 0.0
