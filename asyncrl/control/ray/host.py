"""The process side of a service: set up its node, redirect its output, run it in a thread, answer for it.

Owns one service in one process. It imports the service by name, so that the control plane depends
on no service package. Invariant: a service that ends with an error stays FAILED, with its error
named, until the process is ended.
"""

from __future__ import annotations

import faulthandler
import importlib
import logging
import multiprocessing
import os
import resource
import signal
import socket
import sys
import tempfile
import threading
import traceback
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from msgspec.structs import replace as replace_fields

from asyncrl.core.errors import AsyncrlError
from asyncrl.core.files.log_records import log_to_stderr
from asyncrl.core.files.private import keep_others_out, make_private
from asyncrl.core.obstacle import Obstacle
from asyncrl.core.rpc.message import Done
from asyncrl.core.service import INTERFACE_VARIABLES, NODE_VARIABLE, Service, ServiceContext
from asyncrl.core.service_command import DumpStacks, pack_answer, read_command
from asyncrl.core.sockets.options import interface_of
from asyncrl.core.states import ServiceState
from asyncrl.core.status.service import ServiceStatus
from asyncrl.core.status.statuses import pack_status

log = logging.getLogger(__name__)

MAX_DESCRIPTORS = 65_536
FAILED_STOP_S = 1.0
"""A service that has failed has ended, or hangs and will not."""


class ServiceHost:
    """Hosts one service. Every method may be called while another runs.

    Args:
        factory: `module:function` that takes a ServiceContext and returns a Service.
        context: Context of the service.
        log_path: File for all output of the process, from the start.
    """

    def __init__(self, factory: str, context: ServiceContext, log_path: str) -> None:
        keep_others_out()  # Ray's own processes on this node may have another umask than `asyncrl up`
        _redirect_output(Path(log_path))
        name_semaphores(f"asyncrl-{context.run_id}-{context.name}")
        faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
        _raise_descriptor_limit()
        context = replace(settle(context), tell=self._hear)
        self._factory = factory
        self._context = context
        self._stop = context.runtime.event()
        self._service: Service | None = None
        self._waits_for: Sequence[Obstacle] = ()
        self._error = ""
        self._error_kinds: list[str] = []
        self._is_done = False
        sys.unraisablehook = self._tell_lost_thread
        self._thread = threading.Thread(target=self._run, name=context.name, daemon=True)
        self._thread.start()

    def status(self) -> bytes:
        """Return the packed status of the service, with the fields that only its process knows."""
        return pack_status(self.describe())

    def describe(self) -> ServiceStatus:
        """Return the service's own status, or, before it is built, that it starts; with how it ended."""
        beginning = ServiceStatus(state=ServiceState.STARTING, obstacles=tuple(self._waits_for))
        told = self._service.status() if self._service is not None else beginning
        told = replace_fields(told, pid=os.getpid(), node=os.environ.get(NODE_VARIABLE, ""))
        if self._error:
            kinds = tuple(self._error_kinds)
            return replace_fields(told, state=ServiceState.FAILED, error=self._error, error_kinds=kinds)
        return replace_fields(told, state=ServiceState.ENDED) if self._is_done else told

    def command(self, data: bytes) -> bytes:
        """Pass a packed command to the service, but `DumpStacks`; before it is built, refuse it."""
        command = read_command(data)
        if isinstance(command, DumpStacks):
            faulthandler.dump_traceback(file=2, all_threads=True)
            return pack_answer(Done())
        if self._service is None:
            raise AsyncrlError(f"{self._context.name} is still starting and cannot '{command.word}'")
        return pack_answer(self._service.command(command))

    def stop(self, deadline_s: float) -> bool:
        """Ask the service to end; return whether it did within the deadline."""
        self._stop.set()
        self._thread.join(min(deadline_s, FAILED_STOP_S) if self._error else deadline_s)
        return not self._thread.is_alive()

    def _hear(self, obstacles: Sequence[Obstacle]) -> None:
        self._waits_for = obstacles

    def _tell_lost_thread(self, unraisable: sys.UnraisableHookArgs) -> None:
        """Fail if a thread died before it ran, for want of memory: its starter would wait for ever."""
        sys.__unraisablehook__(unraisable)
        if isinstance(getattr(unraisable.object, "__self__", None), threading.Thread):
            self._fail(unraisable.exc_value or MemoryError())

    def _fail(self, error: BaseException) -> None:
        self._error_kinds = sorted(kinds_of(error))
        self._error = f"{type(error).__name__}: {error}"

    def _run(self) -> None:
        try:
            module, _, function = self._factory.partition(":")
            self._service = getattr(importlib.import_module(module), function)(self._context)
            self._service.run(self._stop)
            self._is_done = True
            log.info("%s ended", self._context.name)
        except (
            BaseException
        ) as error:  # process boundary, SystemExit too: the supervisor reads what went wrong
            log.error("%s failed\n%s", self._context.name, traceback.format_exc())
            self._fail(error)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()


def kinds_of(error: BaseException) -> set[str]:
    """Return the class names of an error, of its causes, and of the errors that it groups."""
    kinds, found = {type(error).__name__}, [error.__cause__]
    if isinstance(error, BaseExceptionGroup):
        found += error.exceptions
    for inner in found:
        if inner is not None:
            kinds |= kinds_of(inner)
    return kinds


def name_semaphores(prefix: str) -> None:
    """Let the named semaphores of this process, and of those that it starts, begin with `prefix`.

    Libraries make them (tqdm in vLLM's engine core), and who is killed leaves them in /dev/shm: by their
    name they can be told from those of other runs, and removed. Their names are flat, so that they lie beside
    the run's private folder; each is made exclusively, mode 0600, with a random end: another user's is none.
    """
    config: dict[str, Any] = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    config["semprefix"] = f"/{prefix}"


def _raise_descriptor_limit() -> None:
    """Let this process have as many connections and files as it may, up to `MAX_DESCRIPTORS`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _redirect_output(path: Path) -> None:
    """Send the process's standard output and error, also those of its children, to `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(target, 1)
    os.dup2(target, 2)
    os.close(target)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    log_to_stderr()


TEMPORARY = "tmp"
"""The folder of temporary files, in the run's private one."""


def settle(context: ServiceContext) -> ServiceContext:
    """Prepare this node, and this process, for the service.

    Libraries put sockets and files where temporary ones belong: that is a folder of the run's own, too.

    Returns:
        `context` with the address of this node as `launcher.host`: the gateway listens there.

    Raises:
        ConfigError: The folder for the sockets belongs to somebody else.
    """
    if context.sockets is not None:
        make_private(context.sockets)
        make_private(context.sockets / TEMPORARY)
        os.environ["TMPDIR"] = tempfile.tempdir = str(context.sockets / TEMPORARY)
    config = context.config
    if not config.launcher.is_cluster:
        return context
    home = urlsplit(context.addresses.get("buffer.0", "")).hostname
    if home is None:
        return context
    address = address_towards(home)
    if interface := interface_of(address):
        os.environ.update(dict.fromkeys(INTERFACE_VARIABLES, interface))
    launcher = config.launcher.model_copy(update={"host": address})
    return replace(context, config=config.model_copy(update={"launcher": launcher}))


def address_towards(host: str) -> str:
    """Return the address of this machine as `host` sees it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 1))  # a datagram socket: nothing is sent
        return str(probe.getsockname()[0])
