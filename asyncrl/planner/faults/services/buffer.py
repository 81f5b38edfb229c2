"""The buffer's process: the real desk, store and ledger behind simulated calls.

    consumes: requests     waits for: a request, a tick     produces: answers, once a turn is durable

Requests of one turn are handled as they come and settled a little later, so a process may die in between.
"""

from __future__ import annotations

from asyncrl.buffer.ledger.census import take_census
from asyncrl.buffer.ledger.tickets import LedgerSettings
from asyncrl.buffer.service import Desk
from asyncrl.buffer.store import ExperienceStore
from asyncrl.core.errors import AsyncrlError
from asyncrl.core.rpc import Request
from asyncrl.core.runtime.threads import ThreadRuntime
from asyncrl.planner.faults.checks.observer import Observer
from asyncrl.planner.faults.kernel.process import Asked, Process, Switchboard
from asyncrl.planner.faults.services.journal import Disk, SimulatedJournal

TICK_S = 0.2
TURN_S = 0.004
AWAY_S = 0.05


class WorldRuntime(ThreadRuntime):
    """Virtual time as that of a runtime. Nothing else of it is used: calls are simulated."""

    def __init__(self, process: Process) -> None:
        super().__init__()
        self._process = process

    def now(self) -> float:
        """Return virtual seconds."""
        return self._process.now

    def sleep(self, seconds: float) -> None:
        """Nothing of what is simulated may block."""
        raise AssertionError("nobody sleeps in virtual time")


class BufferProcess(Process):
    """See the module."""

    def __init__(
        self,
        board: Switchboard,
        settings: LedgerSettings,
        disk: Disk,
        observer: Observer,
        *,
        group_size: int,
        is_always_synced: bool,
        start_s: float,
    ) -> None:
        super().__init__(board, "buffer.0")
        self._settings, self._disk, self._observer = settings, disk, observer
        self._group_size, self._is_always_synced, self._start_s = group_size, is_always_synced, start_s
        self._desk: Desk | None = None
        self._inbox: list[Request] = []
        self._is_turning = False

    def begin(self) -> None:
        """Recover, then serve."""
        self.spawn(self._live())

    async def _live(self) -> None:
        await self.sleep(self._start_s)
        journal = SimulatedJournal(self._disk, self._is_always_synced, events_per_snapshot=40)
        store = ExperienceStore(self._settings, journal, self._group_size, False, self.now)
        self._desk = Desk(store, WorldRuntime(self))
        self.state = "READY"
        while True:
            await self.sleep(TICK_S if store.is_settled else AWAY_S)
            self._desk.tick(self.now)
            self._read_inbox()

    def retire(self, replica: str) -> None:
        """Take back what a dead replica held, as the supervisor's command does."""
        if self._desk is not None:
            self._desk.retire(replica)
            self._desk.end_turn()

    def handle(self, request: Request) -> None:
        """Take a request in; while the journal is away it stays in its socket."""
        self._inbox.append(request)
        self._read_inbox()

    def _read_inbox(self) -> None:
        desk = self._desk
        if desk is None or not desk.store.is_settled:
            return
        inbox, self._inbox = self._inbox, []
        for request in inbox:
            self._handle(desk, request)
        if inbox and not self._is_turning:
            self._is_turning = True
            self.after(TURN_S * self.slowness, self._end_turn)

    def _handle(self, desk: Desk, request: Request) -> None:
        assert isinstance(request, Asked), "requests come through the simulated network"
        request.on_answer = self._observer.buffer_asked(desk.store.ledger, request.op, request.args)
        try:
            desk.handle(request)
        except AsyncrlError as error:
            if not request.is_answered:
                request.fail(error)

    def _end_turn(self) -> None:
        self._is_turning = False
        assert self._desk is not None, "a turn has begun"
        self._desk.end_turn()

    def census(self) -> dict[str, object] | None:
        """Return the ledger's own account, None while events wait to be written or it is not up."""
        if self._desk is None or self._is_turning or not self._desk.store.is_settled:
            return None
        return take_census(self._desk.store.ledger.state).as_values()
