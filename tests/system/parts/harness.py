"""Services as plain processes that a test may kill and start again at exact points."""

from __future__ import annotations

import multiprocessing
import signal
import uuid
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from types import TracebackType
from typing import Self

from asyncrl.buffer.client import LearnerClient
from asyncrl.control.machine.ports import HeldPort
from asyncrl.control.machine.processes import end_leftovers, end_service, pids_of_service, remove_leftovers
from asyncrl.control.roster import RUN_VARIABLE
from asyncrl.core.config.load import dump_resolved
from asyncrl.core.config.tree import Config
from asyncrl.core.files.private import make_secret
from asyncrl.core.runtime.faults import VARIABLE as FAULT_VARIABLE
from asyncrl.core.service import SERVICE_VARIABLE
from asyncrl.core.status.service import BufferStatus
from tests.system.parts.host_main import NODE, host

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    [
        "learner.composition",
        "learner.megatron.backend",
        "rollout_service.composition",
        "transformers.models.auto.tokenization_auto",
        "pyarrow.parquet",
        "asyncrl.buffer.composition",
        "weight_sync.composition",
        "weight_sync.control_composition",
    ]
)
"""A learner that imports for itself takes five seconds to its first step; a test has a dozen lives of it."""


class Harness:
    """Owns the processes of one run; leaving the context ends them all.

    Args:
        is_spread: Receivers are on another node than the publisher, as far as they know: they map nothing.
    """

    def __init__(self, config: Config, run_dir: Path, *, is_spread: bool = False) -> None:
        self.run_dir = run_dir
        self._is_spread = is_spread
        self._run_id = uuid.uuid4().hex[:8]
        self._sockets = Path("/tmp") / f"asyncrl-{self._run_id}"
        self._secret = make_secret()
        self._processes: dict[str, ForkServerProcess] = {}
        self._rendezvous = HeldPort()
        (run_dir / "logs").mkdir(parents=True)
        (run_dir / "resolved.yaml").write_text(dump_resolved(config))

    def __enter__(self) -> Self:
        self._sockets.mkdir(mode=0o700)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes.values():
            process.terminate()
        for process in self._processes.values():
            process.join(15.0)
            process.kill()
            process.join(5.0)
        self._rendezvous.close()
        end_leftovers(self._run_id)
        remove_leftovers(self._run_id, self._sockets)

    def start(self, name: str, fault: str = "") -> None:
        """Start a service; `fault` is a point at which it kills itself."""
        environment = {RUN_VARIABLE: self._run_id, SERVICE_VARIABLE: name}
        environment |= {FAULT_VARIABLE: fault} if fault else {}
        environment |= {NODE: "another"} if self._is_spread and name.startswith("receiver.") else {}
        places = (self._run_id, str(self._sockets), self._rendezvous.address, self._secret)
        self._processes[name] = FORKS.Process(
            target=host,
            args=(self.run_dir, name, environment, *places),
            name=name,
            daemon=not name.startswith("rollout."),  # vLLM's front end has a child
        )
        self._processes[name].start()

    def address(self, name: str) -> str:
        return f"ipc://{self._sockets / name}"

    def processes_of(self, name: str) -> list[int]:
        """Return the service's own process, then those that it has started."""
        own = self._processes[name].pid
        assert own is not None
        return [own, *(pid for pid in pids_of_service(self._run_id, name) if pid != own)]

    def kill(self, name: str) -> None:
        """End a service's process at once, and what it has started."""
        self._processes[name].kill()
        self._processes[name].join(10.0)
        end_service(self._run_id, name)

    def exit_code(self, name: str) -> int | None:
        """Return how the service's process ended, None while it lives."""
        return self._processes[name].exitcode

    def buffer_status(self) -> BufferStatus:
        client = LearnerClient(self.address("buffer.0"), deadline_s=30.0)
        try:
            return client.status()
        finally:
            client.close()

    def log(self, name: str) -> str:
        return (self.run_dir / "logs" / f"{name}.log").read_text()

    def await_kill(self, name: str, deadline_s: float = 120.0) -> None:
        """Wait until the service has killed itself at its fault point."""
        self._await(name, deadline_s, -signal.SIGKILL)

    def await_end(self, name: str, deadline_s: float = 180.0) -> None:
        """Wait until the service has ended by itself without an error."""
        self._await(name, deadline_s, 0)

    def _await(self, name: str, deadline_s: float, wanted: int) -> None:
        process = self._processes[name]
        process.join(deadline_s)
        assert process.exitcode == wanted, f"{name} ended with {process.exitcode}\n{self.log(name)[-3000:]}"
