"""Services that do almost nothing, for tests of the launcher and the supervisor."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from multiprocessing.connection import Connection

from asyncrl.core.obstacle import Cause, Obstacle
from asyncrl.core.rpc.message import Done, Message
from asyncrl.core.service import ServiceContext
from asyncrl.core.service_command import AnyCommand, Bound, DeregisterReplica, Promote, Tighten
from asyncrl.core.states import RunState, ServiceState
from asyncrl.core.status.service import ServiceStatus, SupervisorStatus


class TrivialService:
    """Waits until it is stopped; a command makes it fail."""

    def __init__(self, context: ServiceContext) -> None:
        self._name = context.name
        self._fail = threading.Event()

    def run(self, stop: threading.Event) -> None:
        print(f"{self._name} runs", flush=True)
        while not stop.wait(0.02):
            if self._fail.is_set():
                raise ValueError("boom as asked")

    def status(self) -> ServiceStatus:
        """Tell its name where any service may tell something."""
        return ServiceStatus(state=ServiceState.READY, failure=self._name)

    def command(self, command: AnyCommand) -> Message:
        """Fail for `Promote`, die for `DeregisterReplica`; give any other bound back."""
        if isinstance(command, Promote):
            self._fail.set()
        if isinstance(command, DeregisterReplica):
            os._exit(3)
        return Bound(command.max_lag) if isinstance(command, Tighten) else Done()


def build(context: ServiceContext) -> TrivialService:
    return TrivialService(context)


class Mute(TrivialService):
    """Cannot say how it is."""

    def status(self) -> ServiceStatus:
        raise ValueError("no status today")


def build_mute(context: ServiceContext) -> TrivialService:
    return Mute(context)


class Seeing(TrivialService):
    """Tells which GPUs it sees in place of its name."""

    def status(self) -> ServiceStatus:
        return ServiceStatus(state=ServiceState.READY, failure=os.environ["CUDA_VISIBLE_DEVICES"])


def build_seeing(context: ServiceContext) -> TrivialService:
    return Seeing(context)


class Impostor(TrivialService):
    """Says what the supervisor of a run would say."""

    def status(self) -> ServiceStatus:
        return SupervisorStatus(state=ServiceState.READY, run=RunState.RUNNING, step=1)


def build_impostor(context: ServiceContext) -> TrivialService:
    return Impostor(context)


def build_threadless(context: ServiceContext) -> TrivialService:
    """Start a thread that dies before it runs, as under a limit of memory: `start` waits for ever."""
    lost = threading.Thread(daemon=True)
    lost._bootstrap_inner = _raise_memory_error  # type: ignore[attr-defined]
    lost.start()
    return TrivialService(context)


def _raise_memory_error() -> None:
    raise MemoryError("no room for a thread")


def build_broken(context: ServiceContext) -> TrivialService:
    raise FileNotFoundError("no model in models/nowhere")


def build_waiting(context: ServiceContext) -> TrivialService:
    """Wait for the file `back`, and say so."""
    away = Obstacle("", Cause.JOURNAL_AWAY, "Redis at localhost:1 is away: Connection refused")
    context.tell([away])
    while not (context.run_dir / "back").exists():
        time.sleep(0.01)
    return TrivialService(context)


def keep_semaphore(ready: Connection) -> None:
    """Make a named semaphore, say so, and keep it."""
    lock = multiprocessing.get_context("spawn").Lock()
    ready.send(True)
    time.sleep(60)
    del lock
