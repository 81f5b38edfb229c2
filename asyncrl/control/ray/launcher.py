"""Launcher of services: the protocol that the supervisor uses, and its implementation on Ray.

Ray carries lifecycle only: start, status, command, stop, kill. Trajectories and weights never go
through it. Every service is a detached actor, named as the service, in the run's namespace.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

import psutil

from asyncrl.control.roster import RUN_VARIABLE, ServiceSpec
from asyncrl.core.errors import AsyncrlError, DeadlineExceeded, ServiceFailed, WireError
from asyncrl.core.files.durable import replace_text
from asyncrl.core.files.private import make_secret
from asyncrl.core.service import NODE_VARIABLE, SERVICE_VARIABLE
from asyncrl.core.service_command import A, Command, pack_command, read_answer
from asyncrl.core.states import ServiceState
from asyncrl.core.status.service import ServiceStatus, kind_of
from asyncrl.core.status.statuses import Statuses, read_status

log = logging.getLogger(__name__)

NAME_DEADLINE_S = 10.0
"""Time that Ray may take to release the name of a dead actor."""
HUNG_UP = "Worker unexpectedly exits with a connection error"
"""Ray's messages for a process that is gone without a reason."""
KILLED = "its process was killed (SIGKILL), or crashed without a word"
OVERRUN = "timed out during startup"
"""Ray's words for processes of its own that are not up in its time, which no setting changes."""
SUPERVISOR_KIND = "supervisor"
OBJECT_STORE_BYTES = 100 << 20
"""Of a run's own Ray: nothing but answers of services goes through it."""
ENVIRONMENT = {
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_task_events_report_interval_ms": "0",
    **dict.fromkeys(("RAY_prestart_worker_first_driver", "RAY_enable_worker_prestart"), "0"),
}
"""Settings of Ray. It starts no process for each CPU ahead, which no service could use. Task events are off:
with them `gcs_server` keeps 4.3 KB of each actor call for the dashboard, 5.5 MB a minute of a run, without
them 0.1 KB (Ray 2.60, over 3,000 and 13,000 calls)."""
RAY = "ray"
"""The folder of Ray's sessions, in a run's private one."""
DEEPEST = "asyncrl-01234567/ray/session_2026-11-24_15-10-03_123456_4194304/sockets/plasma_store"
MAX_BASE_BYTES = 107 - len(f"/{DEEPEST}")
"""The path of a Unix socket has at most 107 bytes."""


class Launcher(Protocol):
    """Starts and ends services; every call is bounded in time."""

    def start(self, spec: ServiceSpec) -> None:
        """Begin to start a service; does not wait for it."""

    def statuses(self, names: Iterable[str], deadline_s: float) -> Statuses:
        """Return each service's status; DEAD for one without a process, SILENT for a late one."""

    def command(self, name: str, command: Command[A], deadline_s: float) -> A:
        """Pass a command to a service. Raises ServiceFailed or DeadlineExceeded."""

    def stop(self, names: Iterable[str], deadline_s: float) -> set[str]:
        """Ask services to end, all at once; return the names of those that did, or have no process."""

    def kill(self, name: str) -> None:
        """End a service's process now."""

    def adopt(self) -> set[str]:
        """Adopt the run's services that an earlier launcher has started; return those that live."""


class RayLauncher:
    """Detached named Ray actors. `connect` or `start_local` must have been called in this process.

    Attributes:
        counters: `refused_statuses`, which were none of the service's kind; `lost_statuses`, by Ray.
    """

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace
        self.counters: Counter[str] = Counter()
        self._actors: dict[str, Any] = {}
        self._asked: dict[str, Any] = {}

    def start(self, spec: ServiceSpec) -> None:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        from asyncrl.control.ray.host import ServiceHost

        first = spec.node.partition(",")[0]
        marks = {RUN_VARIABLE: spec.context.run_id, SERVICE_VARIABLE: spec.name}
        environment = {"OMP_NUM_THREADS": "1", **marks, **spec.variables}
        environment |= {NODE_VARIABLE: spec.node} if spec.node else {}
        remote = ray.remote(ServiceHost).options(
            name=spec.name,
            namespace=self._namespace,
            lifetime="detached",
            num_cpus=spec.cpus,
            num_gpus=spec.gpus,
            max_concurrency=8,
            max_restarts=0,
            runtime_env={"env_vars": environment},
            scheduling_strategy=NodeAffinitySchedulingStrategy(first, soft=False) if first else "DEFAULT",
        )
        end = time.monotonic() + NAME_DEADLINE_S
        while True:
            try:
                self._actors[spec.name] = remote.remote(spec.factory, spec.context, spec.log_path)
                return
            except ValueError as error:  # the name is taken: the last one of it is not buried yet
                if time.monotonic() > end:
                    raise ServiceFailed(f"{spec.name} could not be started: {error}") from error
            time.sleep(0.05)

    def adopt(self) -> set[str]:
        import ray
        from ray.util import list_named_actors

        named = [one["name"] for one in list_named_actors(all_namespaces=True) if self._is_ours(one)]
        for name in named:
            try:
                self._actors[name] = ray.get_actor(name, namespace=self._namespace)
            except ValueError:  # it died just now
                continue
        return set(self._actors) & set(named)

    def _is_ours(self, named: dict[str, str]) -> bool:
        kind = named["name"].partition(".")[0]
        return named["namespace"] == self._namespace and kind != SUPERVISOR_KIND

    def statuses(self, names: Iterable[str], deadline_s: float) -> Statuses:
        """Send a status call to each service without a pending one, and return the answers of all."""
        import ray

        gone = ServiceStatus(state=ServiceState.DEAD, error="it has no process")
        unknown = dict.fromkeys(names, gone)
        names = [name for name in unknown if name in self._actors]
        for name in names:
            unknown.pop(name)
            if name not in self._asked:
                self._asked[name] = self._actors[name].status.remote()
        pending = {self._asked[name]: name for name in names}
        if not pending:
            return Statuses(unknown)
        done, late = ray.wait(list(pending), num_returns=len(pending), timeout=deadline_s)
        found = {pending[reference]: self._read(pending[reference], reference) for reference in done}
        for name in found:
            del self._asked[name]
        silent = ServiceStatus(state=ServiceState.SILENT)
        return Statuses(unknown | found | {pending[reference]: silent for reference in late})

    def _read(self, name: str, reference: Any) -> ServiceStatus:
        import ray
        import ray.exceptions

        try:
            told = ray.get(reference)
        except ray.exceptions.ActorUnavailableError:  # for now; if it died, the next answer says so
            return ServiceStatus(state=ServiceState.SILENT)
        except ray.exceptions.RayActorError as error:
            return ServiceStatus(state=ServiceState.DEAD, error=_death_of(error))
        except ray.exceptions.RayTaskError as error:
            why = f"{type(error.cause).__name__}: {error.cause}"
            return ServiceStatus(state=ServiceState.FAILED, error=f"its status failed: {why}")
        except (ray.exceptions.ActorUnschedulableError, ray.exceptions.RuntimeEnvSetupError) as error:
            return ServiceStatus(state=ServiceState.DEAD, error=lines_of(error)[0])
        except ray.exceptions.RayError as error:  # an answer that was lost, say; the next pulse asks again
            self.counters["lost_statuses"] += 1
            log.warning("Ray has lost the status of %s: %s", name, lines_of(error)[0])
            return ServiceStatus(state=ServiceState.SILENT)
        try:
            return read_status(kind_of(name), told)
        except WireError as error:  # a service whose status cannot be read cannot be watched
            self.counters["refused_statuses"] += 1
            return ServiceStatus(state=ServiceState.FAILED, error=f"its status cannot be read: {error}")

    def command(self, name: str, command: Command[A], deadline_s: float) -> A:
        import ray
        import ray.exceptions

        actor = self._actors.get(name)  # one look: another thread may be killing it
        if actor is None:
            raise ServiceFailed(f"{name} has no process and cannot '{command.word}'")
        try:
            told = ray.get(actor.command.remote(pack_command(command)), timeout=deadline_s)
        except ray.exceptions.GetTimeoutError as error:
            raise DeadlineExceeded(f"{name} did not answer '{command.word}' in {deadline_s:g} s") from error
        except ray.exceptions.RayTaskError as error:  # str() of it is a coloured traceback
            cause = error.cause
            if isinstance(cause, AsyncrlError):
                raise ServiceFailed(cause.message, hint=cause.hint) from error
            raise ServiceFailed(f"{name} failed '{command.word}': {type(cause).__name__}: {cause}") from error
        except ray.exceptions.RayError as error:
            raise ServiceFailed(f"{name} failed '{command.word}': {lines_of(error)[0]}") from error
        try:
            return read_answer(command, told)
        except WireError as error:
            raise ServiceFailed(f"{name} failed '{command.word}': {error}") from error

    def stop(self, names: Iterable[str], deadline_s: float) -> set[str]:
        import ray
        import ray.exceptions

        names = set(names)
        living = {name: actor for name in names if (actor := self._actors.get(name)) is not None}
        ended = names - living.keys()
        pending = {actor.stop.remote(deadline_s): name for name, actor in living.items()}
        if not pending:
            return ended
        done, _ = ray.wait(list(pending), num_returns=len(pending), timeout=deadline_s + 2.0)
        for reference in done:
            try:
                if ray.get(reference):
                    ended.add(pending[reference])
            except ray.exceptions.RayError:  # its process is dead, which is an end too
                ended.add(pending[reference])
        return ended

    def kill(self, name: str) -> None:
        import ray

        actor = self._actors.pop(name, None)
        self._asked.pop(name, None)
        if actor is not None:
            ray.kill(actor)


def lines_of(error: Exception) -> list[str]:
    """Return the lines of an error's text, or its class."""
    return (str(error).strip() or type(error).__name__).splitlines()


def _death_of(error: Exception) -> str:
    """Return Ray's details of an actor's death, without the standard first line."""
    first, *lines = lines_of(error)
    said = [line for line in lines if line.strip() and not line.startswith("\t")]
    if any(HUNG_UP in line for line in said):
        return KILLED
    return said[0] if said else first


def temporary_folder() -> Path:
    """Return Ray's default place for its folder."""
    return Path(os.environ.get("RAY_TMPDIR") or tempfile.gettempdir())


def base_folder() -> Path:
    """Return where the private folder of a run is made, with Ray's in it: there too, or in `/tmp`.

    The paths of Ray's sockets must not grow too long.
    """
    found = temporary_folder()
    return found if len(os.fsencode(found)) <= MAX_BASE_BYTES else Path("/tmp")


def set_up_ray() -> None:
    """Set environment variables that Ray reads before it starts or joins, unless they are set."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def start_local(folder: Path, num_cpus: int, num_gpus: int) -> str:
    """Start a Ray of our own on this machine and return its address; once more if its own 30 s are over.

    It never joins a cluster that is there already, and dies with this process.

    Args:
        folder: Private to this user: Ray lets everybody write to the folders that it makes, sockets and logs.
            It gets the token without which Ray, which runs what it is sent, obeys nobody.

    Raises:
        ServiceFailed: The machine is too busy.
    """
    set_up_ray()
    os.environ.pop("RAY_ADDRESS", None)
    _require_token(folder / "ray_token")
    try:
        return _try_local(folder, num_cpus, num_gpus)
    except _Overrun:
        print("Ray did not start within its 30 s; it is started once more", file=sys.stderr, flush=True)
    try:
        return _try_local(folder, num_cpus, num_gpus)
    except _Overrun as error:
        load, num_cores = os.getloadavg()[0], os.cpu_count()
        raise ServiceFailed(
            f"Ray did not start within its own 30 s, twice: this machine is too busy (load {load:.0f} on "
            f"{num_cores} cores)",
            hint="Start the run again when it is less busy",
        ) from error


class _Overrun(Exception):
    """Ray has given up its start."""


def _try_local(folder: Path, num_cpus: int, num_gpus: int) -> str:
    """Raise _Overrun if Ray's processes are not up in its time; they are ended then."""
    import ray

    before = set(psutil.Process().children(recursive=True))
    try:
        context = ray.init(
            address="local",
            num_cpus=num_cpus,
            num_gpus=num_gpus,
            include_dashboard=False,
            _node_ip_address="127.0.0.1",
            _temp_dir=str(folder / RAY),
            object_store_memory=OBJECT_STORE_BYTES,
            log_to_driver=False,
            logging_level="ERROR",
        )
    except Exception as error:  # Ray raises nothing narrower
        if OVERRUN not in str(error):
            raise
        started = set(psutil.Process().children(recursive=True)) - before
        for process in started:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(started, timeout=NAME_DEADLINE_S)
        raise _Overrun from error
    return str(context.address_info["gcs_address"])


def _require_token(file: Path) -> None:
    """Have Ray, the workers that inherit this environment, and this process use a token of this run alone.

    Ray's own default is one token of all runs in the home folder, which every user may read there.
    """
    replace_text(file, make_secret(), 0o600)
    os.environ.pop("RAY_AUTH_TOKEN", None)  # it would go before a file
    os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN_PATH=str(file))
    from ray import _raylet

    native: Any = _raylet  # whose type stub lacks both
    native.Config.initialize("")  # Ray has read its variables when it was imported
    native.AuthenticationTokenLoader.instance().reset_cache()


def read_log(folder: Path, process: str) -> str:
    """Return the log of a process, such as `raylet`, of the Ray in `folder`; empty without one."""
    files = sorted((folder / RAY / "session_latest" / "logs").glob(f"{process}.*"))
    return "".join(file.read_text(errors="replace") for file in files)


def shut_down() -> None:
    """End the Ray that `start_local` started."""
    import ray

    ray.shutdown()
