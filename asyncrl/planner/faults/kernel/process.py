"""One process of a service: its tasks and timers, which die with it, and its calls of others.

Owns what a call means: it ends by its deadline, with the answer, the service's error, or `ConnectionLost`
where the other process died. A process that is stopped keeps what arrives and does it once it is thawed, as
sockets and timers do. Messages are packed as on the wire. Invariant: nothing happens in a dead process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from asyncrl.core import wire
from asyncrl.core.errors import AsyncrlError, ConnectionLost, DeadlineExceeded
from asyncrl.core.rpc import Reply, Request
from asyncrl.planner.faults.kernel.tasks import Ready, Task
from asyncrl.planner.world import Actor, Message, World

CONNECT_S = 0.1


class Switchboard(Protocol):
    """What a process must know of the others."""

    world: World

    def address(self, service: str) -> str | None:
        """Return who answers for a service, None while nobody does."""

    def is_up(self, pid: str) -> bool:
        """Tell whether a process lives."""

    def next_number(self) -> int:
        """Return a number that was never given before."""

    def note(self, text: str, detail: str = "") -> None:
        """Write a line into the trace; the detail may differ from process to process."""

    def bury(self, process: Process) -> None:
        """A process is dead: whoever waits for it hears that its connection broke."""

    def pass_point(self, process: Process, point: str) -> None:
        """A process tells where it stands: a fault may wait for that."""


class Process(Actor):
    """See the module.

    Attributes:
        service: "rollout.3"; `name` is the process's own: "rollout.3/2".
        state: As a status would tell it.
        error: Why it ended by itself.
        slowness: How many times longer all that it does takes.
    """

    def __init__(self, board: Switchboard, service: str) -> None:
        self.board = board
        self.service = service
        super().__init__(board.world, f"{service}/{board.next_number()}")
        self.state = "STARTING"
        self.error: AsyncrlError | None = None
        self.is_stopped = False
        self.slowness = 1.0
        self._held: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        self._calls: dict[int, tuple[Ready, str, str]] = {}
        self._tasks: dict[Task, None] = {}

    @property
    def now(self) -> float:
        return self.world.now

    def spawn(self, task: Task) -> None:
        """Let a task run from here on."""
        self._tasks[task] = None
        self._advance(task)

    def cancel(self, task: Task) -> None:
        """End a task where it stands, if it has not ended."""
        if task in self._tasks:
            del self._tasks[task]
            task.close()

    def end_tasks(self) -> None:
        """Close the tasks of a process that is dead, where they stand."""
        tasks, self._tasks = self._tasks, {}
        for task in tasks:
            task.close()

    def _advance(self, task: Task) -> None:
        if task not in self._tasks:
            return
        try:
            waited = task.send(None)
        except StopIteration:
            self._tasks.pop(task, None)
            return
        except AsyncrlError as error:
            self._tasks.pop(task, None)
            self.fail(error)
            return
        assert isinstance(waited, Ready), "tasks wait for what is ready in virtual time"
        waited.then(lambda: self._do(self._advance, (task,)))

    def fail(self, error: AsyncrlError) -> None:
        """End by an error of its own."""
        self.board.note(f"{self.name} fails: {type(error).__name__}", error.message)
        self.error, self.state = error, "FAILED"
        self.board.bury(self)

    def close(self) -> None:
        """Let go of what the host would take back from a dead process."""

    def _do(self, call: Callable[..., None], args: tuple[Any, ...]) -> None:
        if self.is_stopped and self.is_alive:
            self._held.append((call, args))
        elif self.is_alive:
            call(*args)

    def stop(self) -> None:
        """Do nothing until it is thawed."""
        self.is_stopped = True

    def thaw(self) -> None:
        """Go on with what came meanwhile, in order."""
        self.is_stopped = False
        held, self._held = self._held, []
        for call, args in held:
            self._do(call, args)

    def receive(self, src: str, message: Message) -> None:
        """Take in a message, later if it is stopped."""
        self._do(self._take, (src, message))

    def _take(self, src: str, message: Message) -> None:
        if message.op == "reply":
            self._take_reply(message)
        else:
            self.handle(Asked.read(self, src, message))

    def handle(self, request: Request) -> None:
        """Answer a request."""
        raise NotImplementedError

    def sleep(self, seconds: float) -> Ready:
        """Return what is ready in `seconds`, or later for a slow process."""
        ready = Ready()
        self.after(seconds * self.slowness, ready.set)
        return ready

    # --- calls ------------------------------------------------------------------------------------

    def ask(self, pid: str, op: str, frames: Sequence[wire.Frame], deadline_s: float, args: Any) -> Ready:
        """Send a request; the answer, or an error, comes by its deadline."""
        number, ready = self.board.next_number(), Ready()
        self._calls[number] = (ready, pid, op)
        header = wire.pack_header({"op": op, "args": args})
        what = {"header": header, "frames": [bytes(one) for one in frames], "within_s": deadline_s}
        self.world.send(self.name, pid, Message(op, {**what, "sent_s": self.now}, number))
        self.after(deadline_s, self._give_up, number)
        return ready

    def _give_up(self, number: int) -> None:
        if (kept := self._calls.pop(number, None)) is not None:
            kept[0].fail(DeadlineExceeded(f"'{kept[2]}' at {_service_of(kept[1])} gave no answer in time"))

    def lose(self, pid: str) -> None:
        """Another process died: the calls that it has not answered end."""
        for number, (ready, other, op) in list(self._calls.items()):
            if other == pid:
                del self._calls[number]
                ready.fail(ConnectionLost(f"'{op}' at {_service_of(pid)}: the connection broke"))

    def _take_reply(self, message: Message) -> None:
        if (kept := self._calls.pop(message.call, None)) is None:
            return
        error = message.args["error"]
        if error is not None:
            kept[0].fail(type(error)(error.message, hint=error.hint))
        else:
            fields = wire.unpack_header(message.args["header"])
            kept[0].set(Reply(fields["args"], list(message.args["frames"])))


class Connection:
    """A process's way to a service: it stays with one process of it until that dies, or `renew`."""

    def __init__(self, process: Process, service: str) -> None:
        self._process = process
        self._service = service
        self._pid: str | None = None

    def renew(self) -> None:
        """Look anew for who answers."""
        self._pid = None

    async def call(
        self, op: str, frames: Sequence[wire.Frame] = (), deadline_s: float = 10.0, **args: Any
    ) -> Reply:
        """As `asyncrl.core.rpc.Client.call`."""
        process, board = self._process, self._process.board
        end = process.now + deadline_s
        while self._pid is None or not board.is_up(self._pid):
            self._pid = board.address(self._service)
            if self._pid is not None:
                break
            if process.now >= end:
                raise DeadlineExceeded(f"'{op}' at {self._service} was not sent: no connection")
            await process.sleep(CONNECT_S)
        reply: Reply = await process.ask(self._pid, op, frames, max(0.0, end - process.now), args)
        return reply


class Asked(Request):
    """A request whose answer goes through the simulated network.

    `on_answer` is told of it: the arguments, None for an error.
    """

    answerer: Process
    on_answer: Callable[[Mapping[str, Any] | None], None] | None = None

    @staticmethod
    def read(process: Process, src: str, message: Message) -> Asked:
        """Return the request in a message."""
        fields, args = wire.unpack_header(message.args["header"]), message.args
        request = Asked(
            fields["op"],
            fields["args"],
            list(args["frames"]),
            src.encode(),
            message.call,
            None,  # type: ignore[arg-type]
        )
        request.sent_s, request.within_s = args["sent_s"], args["within_s"]
        request.lay_s = process.now - args["sent_s"]
        request.answerer = process
        return request

    def fail(self, error: AsyncrlError) -> None:
        """Send an error."""
        if self.on_answer is not None:
            self.on_answer(None)
        self._give_answer({"header": b"", "frames": (), "error": error})

    def _send(self, header: dict[str, Any], frames: Sequence[wire.Frame] = ()) -> None:
        if self.on_answer is not None:
            self.on_answer(header["args"])
        packed = wire.pack_header(header)
        self._give_answer({"header": packed, "frames": [bytes(one) for one in frames], "error": None})

    def _give_answer(self, what: dict[str, Any]) -> None:
        assert not self.is_answered, f"'{self.op}' was answered twice"
        self.is_answered = True
        if self.answerer.is_alive:
            self.answerer.world.send(
                self.answerer.name, self.client.decode(), Message("reply", what, self.id)
            )


def _service_of(pid: str) -> str:
    return pid.partition("/")[0]
