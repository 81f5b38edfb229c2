"""One run of the project's services as plain processes, each held to its cores; no Ray, no supervisor.

Owns the processes, sockets and shared memory of the run: `close` leaves nothing. They are forked from a
server that has made their imports, and answer `status` and `command` over a pipe.
"""

from __future__ import annotations

import importlib
import logging
import multiprocessing
import os
import signal
import tempfile
import threading
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

from asyncrl.control.machine.ports import HeldPort
from asyncrl.control.machine.processes import end_leftovers, remove_leftovers
from asyncrl.control.roster import RUN_VARIABLE, Roster
from asyncrl.core.config.load import dump_resolved, load_resolved
from asyncrl.core.config.tree import Config
from asyncrl.core.errors import ServiceFailed
from asyncrl.core.files.log_records import log_to_stderr
from asyncrl.core.files.private import make_secret
from asyncrl.core.rpc.message import Message
from asyncrl.core.runtime.threads import ThreadEvent
from asyncrl.core.service_command import AnyCommand
from asyncrl.core.status.service import ServiceStatus

FORKS = multiprocessing.get_context("forkserver")
PRELOADED = (
    "learner.composition",
    "learner.megatron.backend",
    "rollout_service.composition",
    "transformers.models.auto.tokenization_auto",
    "pyarrow.parquet",
    "asyncrl.buffer.composition",
    "weight_sync.composition",
    "weight_sync.control_composition",
    "benchmarks.pipeline.sleepers",
)
"""Five seconds of imports, made once."""
CALL_S, END_S = 10.0, 4.0
LAUNCHER = ("buffer.0", "weight_sync.0", "publisher.0")


@dataclass(frozen=True)
class Placement:
    """Placement of a service: `factory` in place of its own, on these cores alone (empty: on any)."""

    factory: str = ""
    cores: frozenset[int] = frozenset()


@dataclass
class Crew:
    """The services of one run.

    >>> # with Crew(config, folder) as crew:
    >>> #     crew.start("buffer.0", Placement(cores=frozenset({0})))
    >>> #     crew.status("buffer.0")
    """

    config: Config
    run_dir: Path
    _processes: dict[str, Any] = field(default_factory=dict)
    _pipes: dict[str, Connection] = field(default_factory=dict)

    def __enter__(self) -> Self:
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # of the fork server, and so of all
        FORKS.set_forkserver_preload(list(PRELOADED))
        self._run_id = uuid.uuid4().hex[:8]
        self._sockets = Path(tempfile.gettempdir()) / f"asyncrl-{self._run_id}"
        self._sockets.mkdir(mode=0o700)
        self._secret = make_secret()
        self._rendezvous = HeldPort()
        (self.run_dir / "logs").mkdir(parents=True)
        (self.run_dir / "resolved.yaml").write_text(dump_resolved(self.config))
        return self

    def __exit__(self, *_: object) -> None:
        for pipe in self._pipes.values():
            pipe.close()  # a service ends with its pipe
        for process in self._processes.values():
            process.join(2 * END_S)
            process.kill()
            process.join()
        self._rendezvous.close()
        end_leftovers(self._run_id)
        remove_leftovers(self._run_id, self._sockets)

    def start(self, name: str, placement: Placement) -> None:
        """Start a service; it may call others that are not there yet."""
        ours, theirs = multiprocessing.Pipe()
        places = (str(self.run_dir), self._run_id, str(self._sockets), self._rendezvous.address, self._secret)
        process = FORKS.Process(target=host, args=(theirs, name, placement, places), name=name)
        process.start()
        theirs.close()
        self._processes[name], self._pipes[name] = process, ours

    def status(self, name: str) -> ServiceStatus:
        """Return the status of a service. Raises ServiceFailed as `command`."""
        answer = self._ask(name, "status")
        assert isinstance(answer, ServiceStatus), answer
        return answer

    def command(self, name: str, command: AnyCommand) -> Message:
        """Have a service carry out a command; return its answer.

        Raises:
            ServiceFailed: The service has ended, or does not answer.
        """
        answer = self._ask(name, "command", command)
        assert isinstance(answer, command.answer), answer
        return answer

    def _ask(self, name: str, *call: object) -> object:
        pipe = self._pipes[name]
        try:
            pipe.send(call)
            if not pipe.poll(CALL_S):
                raise ServiceFailed(f"{name} did not answer within {CALL_S:g} s")
            answer: object = pipe.recv()
        except (EOFError, OSError) as error:
            raise ServiceFailed(f"{name} has ended\n{self.tail(name)}") from error
        return answer

    def check(self) -> None:
        """Raise ServiceFailed if one has ended."""
        for name, process in self._processes.items():
            if not process.is_alive():
                raise ServiceFailed(f"{name} ended with {process.exitcode}\n{self.tail(name)}")

    def tail(self, name: str) -> str:
        """Return the end of a service's log."""
        return (self.run_dir / "logs" / f"{name}.log").read_text()[-1500:]


def host(pipe: Connection, name: str, placement: Placement, places: tuple[str, str, str, str, str]) -> None:
    """Run the service `name` until `pipe` closes; entry of its process.

    Args:
        places: Of the run: its folder, its id, the folder of its sockets, its rendezvous, its secret.
    """
    if placement.cores:
        os.sched_setaffinity(0, placement.cores)
    folder, run_id, sockets, rendezvous, secret = places
    run_dir = Path(folder)
    _redirect_output(run_dir / "logs" / f"{name}.log")
    os.environ[RUN_VARIABLE] = run_id
    roster = Roster(load_resolved(run_dir), run_dir, run_id, Path(sockets), rendezvous, secret=secret)
    spec = roster.spec(name)
    module, _, function = (placement.factory or spec.factory).partition(":")
    service = getattr(importlib.import_module(module), function)(spec.context)
    stop = ThreadEvent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever owns the pipe decides

    def run() -> None:
        try:
            service.run(stop)
        except BaseException:  # process boundary, SystemExit too: the log tells, and the exit code
            logging.exception("%s failed", name)
            os._exit(1)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        while True:
            what, *args = pipe.recv()
            pipe.send(getattr(service, what)(*args))
    except (EOFError, OSError):
        if spec.context.kind == "rollout":  # its engine has processes and semaphores of its own
            stop.set()
            thread.join(END_S)
        os._exit(0)  # nothing else of a benchmark's run is worth keeping


def _redirect_output(path: Path) -> None:
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(log, stream)
    log_to_stderr()


def two_cores() -> tuple[frozenset[int], frozenset[int]]:
    """Return a core for each side: the first two that this process may use, or the only one twice."""
    found = sorted(os.sched_getaffinity(0))
    return frozenset(found[:1]), frozenset(found[1:2] or found[:1])


def placements_of(
    names: Iterable[str], factories: Mapping[str, str], *, shares_cores: bool
) -> dict[str, Placement]:
    """Return where each service runs: rollouts and receivers on the first core, all others on the second.

    Args:
        factories: By kind of service.
        shares_cores: The sides take turns on both: the n-th replica and rank are on the n-th core, and the
            rest on any.
    """
    cores = two_cores()
    placements = {}
    for name in names:
        kind, index = name.split(".")
        side = cores[kind not in ("rollout", "receiver")]
        if shares_cores:
            side = cores[int(index) % 2] if kind in ("rollout", "learner") else frozenset()
        placements[name] = Placement(factories.get(kind, ""), side)
    return placements
