"""A launcher that hosts services in threads of this process: same contract as Ray's, no processes."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Iterable
from typing import Any

from msgspec.structs import replace

from asyncrl.control.roster import ServiceSpec
from asyncrl.core.errors import AsyncrlError, DeadlineExceeded, ServiceFailed
from asyncrl.core.rpc.message import Done
from asyncrl.core.runtime.threads import ThreadEvent
from asyncrl.core.service_command import (
    A,
    Command,
    DumpStacks,
    pack_answer,
    pack_command,
    read_answer,
    read_command,
)
from asyncrl.core.states import ServiceState
from asyncrl.core.status.service import ServiceStatus, kind_of
from asyncrl.core.status.statuses import Statuses, pack_status, read_status


class ThreadLauncher:
    """`replace` maps factories of the roster to those of a test.

    A name in `gone` or `silent` is of a service whose process is dead, or stopped, until it is killed.
    """

    def __init__(self, replace: dict[str, str] | None = None) -> None:
        self._replace = replace or {}
        self._hosts: dict[str, _Host] = {}
        self.killed: list[str] = []
        self.started: list[str] = []
        self.dumped: list[str] = []
        self.gone: set[str] = set()
        self.silent: set[str] = set()

    def start(self, spec: ServiceSpec) -> None:
        factory = self._replace.get(spec.context.kind, spec.factory)
        assert spec.name not in self._hosts, f"{spec.name} is started twice at once"
        self.started.append(spec.name)
        self._hosts[spec.name] = _Host(factory, spec)

    def statuses(self, names: Iterable[str], deadline_s: float) -> Statuses:
        return Statuses({name: self._status(name) for name in names})

    def _status(self, name: str) -> ServiceStatus:
        """Return what has been packed, and read by the service's kind, as between two processes."""
        if name in self.gone or name not in self._hosts:
            return ServiceStatus(state=ServiceState.DEAD, error="it was killed")
        if name in self.silent:
            return ServiceStatus(state=ServiceState.SILENT)
        return read_status(kind_of(name), pack_status(self._hosts[name].status()))

    def service(self, name: str) -> Any:
        """Return the object that a service is."""
        return self._hosts[name].service

    def command(self, name: str, command: Command[A], deadline_s: float) -> A:
        """Pass on what has been packed, and read by its type, as between two processes."""
        if name in self.gone or name not in self._hosts:
            raise ServiceFailed(f"{name} failed '{command.word}': it was killed")
        if name in self.silent:
            raise DeadlineExceeded(f"{name} did not answer '{command.word}'")
        if isinstance(command, DumpStacks):  # a host's own
            self.dumped.append(name)
            return read_answer(command, pack_answer(Done()))
        try:
            answer = self._hosts[name].service.command(read_command(pack_command(command)))
            return read_answer(command, pack_answer(answer))
        except AsyncrlError as error:
            raise ServiceFailed(f"{name} failed '{command.word}': {error}") from error

    def stop(self, names: Iterable[str], deadline_s: float) -> set[str]:
        return {name for name in names if name not in self._hosts or self._hosts[name].stop(deadline_s)}

    def adopt(self) -> set[str]:
        return set(self._hosts) - self.gone

    def kill(self, name: str) -> None:
        self.gone.discard(name)
        self.silent.discard(name)
        host = self._hosts.pop(name, None)
        if host is not None:
            self.killed.append(name)
            host.stop(5.0)


class _Host:
    def __init__(self, factory: str, spec: ServiceSpec) -> None:
        module, _, function = factory.partition(":")
        self.service = getattr(importlib.import_module(module), function)(spec.context)
        self._stop = ThreadEvent()
        self._error = ""
        self._thread = threading.Thread(target=self._run, name=spec.name)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.service.run(self._stop)
        except Exception as error:
            self._error = f"{type(error).__name__}: {error}"

    def status(self) -> ServiceStatus:
        status: ServiceStatus = self.service.status()
        if self._thread.is_alive():
            return status
        state = ServiceState.FAILED if self._error else ServiceState.ENDED
        return replace(status, state=state, error=self._error)

    def stop(self, deadline_s: float) -> bool:
        self._stop.set()
        self._thread.join(deadline_s)
        return not self._thread.is_alive()
