"""The coordinator's process: the real service, driven by simulated calls and ticks.

Owns its way from one life to the next: the fencing token, and the fences that its successor must know.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from asyncrl.core.errors import AsyncrlError
from asyncrl.core.rpc import Request
from asyncrl.core.runtime.threads import ThreadEvent
from asyncrl.planner.faults.kernel.process import Process, Switchboard
from asyncrl.planner.faults.services.buffer import WorldRuntime
from weight_sync.coordination.coordinator import CoordinatorService
from weight_sync.protocol.protocol import Coordination
from weight_sync.protocol.rounds import Timing

TICK_S = 0.25
TURN_S = 0.004
"""What comes within it is taken in one turn, as by a server that had something else to do."""


@dataclass
class CoordinatorFiles:
    """What a coordinator leaves in the run's folder: its token, and who must serve which number first."""

    token: int = 0
    fences: dict[str, int] = field(default_factory=dict)

    def take_token(self) -> int:
        """Return a token larger than every one before."""
        self.token += 1
        return self.token


class CoordinatorProcess(Process):
    """See the module."""

    def __init__(
        self, board: Switchboard, timing: Timing, parallelism: int, files: CoordinatorFiles, start_s: float
    ) -> None:
        super().__init__(board, "weight_sync.0")
        self._timing, self._parallelism, self._files, self._start_s = timing, parallelism, files, start_s
        self._service: CoordinatorService | None = None
        self._early: list[Request] = []
        self._is_in_turn = False
        self.coordination: Coordination | None = None

    def begin(self) -> None:
        """Take over from the one before."""
        self.spawn(self._live())

    async def _live(self) -> None:
        await self.sleep(self._start_s)
        token = self._files.take_token()
        self.coordination = Coordination(
            self._timing, self._parallelism, token=token, fences=self._files.fences
        )
        address = f"inproc://asyncrl-simulated-{id(self)}"
        service = CoordinatorService(self.coordination, WorldRuntime(self), address)
        self._service, self.state = service, "READY"
        early, self._early = self._early, []
        for request in early:
            self.handle(request)
        while True:
            await self.sleep(TICK_S)
            service.tick(self.now)
            self._leave_fences()

    def handle(self, request: Request) -> None:
        """Answer a peer."""
        if self._service is None:
            self._early.append(request)
            return
        try:
            self._service.handle(request)
        except AsyncrlError as error:
            if not request.is_answered:
                request.fail(error)
        if not self._is_in_turn:
            self._is_in_turn = True
            self.spawn(self._end_turn(self._service))

    async def _end_turn(self, service: CoordinatorService) -> None:
        await self.sleep(TURN_S)
        self._is_in_turn = False
        service.end_turn()
        self._leave_fences()

    def _leave_fences(self) -> None:
        assert self.coordination is not None, "it lives"
        if self._files.token == self.coordination.token:
            self._files.fences = self.coordination.fences

    def close(self) -> None:
        """Free the socket that the service has and nobody uses."""
        if self._service is not None:
            over = ThreadEvent()
            over.set()
            self._service.run(over)
            self._service = None
