"""The DEALER side: calls with deadlines, for threads and for asyncio.

Invariant: a call ends by its deadline, with the reply, the service's error, or an error that names
the operation and the address; one whose connection broke ends at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from asyncrl.core import wire
from asyncrl.core.errors import AsyncrlError, ConnectionLost, DeadlineExceeded, WireError
from asyncrl.core.rpc.message import A, Answer, Operation, Q, Reply, fields_of
from asyncrl.core.rpc.request import pack_request, read_reply
from asyncrl.core.runtime.interface import Runtime
from asyncrl.core.sockets.keys import ClientKeys

log = logging.getLogger(__name__)

MIN_SEND_S = 0.001
"""For which a call whose time is almost over still tries to be sent."""


class Client:
    """Calls from threads, made one at a time; or several begun, then ended one by one.

    >>> # Client(runtime, "tcp://127.0.0.1:5555").call("status", deadline_s=1.0).args

    Args:
        keys: Of a server with keys; else its connection never comes about.
    """

    def __init__(self, runtime: Runtime, address: str, keys: ClientKeys | None = None) -> None:
        self.address = address
        self._runtime, self._keys = runtime, keys
        self._line = runtime.network.dealer(address, keys)
        self._ids = itertools.count(1)
        self._lock = runtime.lock()
        self._begun: dict[int, Reply | AsyncrlError | None] = {}

    def call(
        self, op: str, frames: Sequence[wire.Frame] = (), deadline_s: float = 10.0, **args: Any
    ) -> Reply:
        """Call `op` and wait for its reply.

        Raises:
            DeadlineExceeded: No answer within `deadline_s`. The service may have acted all the same,
                unless the message says that there was no connection.
            ConnectionLost: The connection broke, so no answer will come.
            AsyncrlError: The service's own error, with its class where that is one of ours.
        """
        return self.begin(op, frames, deadline_s, **args).end()

    def ask(
        self,
        operation: Operation[Q, A],
        asked: Q,
        frames: Sequence[wire.Frame] = (),
        deadline_s: float = 10.0,
    ) -> Answer[A]:
        """Call an operation and wait for its answer.

        Raises:
            WireError: The answer is none of this operation.
            AsyncrlError: As `call`.
        """
        return operation.read(self.call(operation.name, frames, deadline_s, **fields_of(asked)))

    def begin_asking(self, operation: Operation[Q, A], asked: Q, deadline_s: float) -> PendingCall:
        """Send a call, see `begin`; `operation.read` reads its reply."""
        return self.begin(operation.name, (), deadline_s, **fields_of(asked))

    def begin(
        self, op: str, frames: Sequence[wire.Frame] = (), deadline_s: float = 10.0, **args: Any
    ) -> PendingCall:
        """Send a call; its `end` waits for the reply, until `deadline_s` from now.

        Raises:
            DeadlineExceeded: There was no connection within `deadline_s`.
        """
        call = PendingCall(self, next(self._ids), op, deadline_s, self._runtime.now() + deadline_s)
        with self._locked(call):
            self._await_connection(call)
            now = self._runtime.now()
            within_s = call.end_s - now
            header = pack_request(call.id, op, args, now, within_s)
            if not self._line.send([header, *frames], max(MIN_SEND_S, within_s)):
                raise _unreachable(op, self.address, deadline_s, self._keys)
            self._begun[call.id] = None
        return call

    def _await_connection(self, call: PendingCall) -> None:
        while not self._has_connection():
            if not self._line.wait(call.end_s - self._runtime.now()):
                raise _unreachable(call.op, self.address, call.deadline_s, self._keys)

    @contextlib.contextmanager
    def _locked(self, call: PendingCall) -> Iterator[None]:
        if not self._lock.acquire(timeout=max(0.0, call.end_s - self._runtime.now())):
            raise _late(call.op, self.address, call.deadline_s)
        try:
            yield
        finally:
            self._lock.release()

    def take(self, call: PendingCall) -> Reply:
        """Wait for the reply of a call that was begun, see `PendingCall.end`."""
        with self._locked(call):
            try:
                while (result := self._begun.get(call.id)) is None:
                    # A reply that has arrived is taken even if the time is over.
                    if not self._line.wait(call.end_s - self._runtime.now()):
                        raise _late(call.op, self.address, call.deadline_s)
                    if (message := self._line.receive()) is not None:
                        self._take_reply(message)
                    else:
                        self._has_connection()
            finally:
                self._begun.pop(call.id, None)
        if isinstance(result, ConnectionLost):
            raise _lost(call.op, self.address)
        if isinstance(result, AsyncrlError):
            raise result
        return result

    def await_either(self, call: PendingCall, other: PendingCall) -> None:
        """Wait until a call, or one of another client, is over, see `PendingCall.is_over`."""
        assert other.client is not self, "two calls of one client are ended one by one"
        with contextlib.suppress(DeadlineExceeded), self._locked(call), other.client._locked(other):
            while not (self._is_over(call) or other.client._is_over(other)):
                left_s = min(call.end_s, other.end_s) - self._runtime.now()
                self._line.wait(left_s, other.client._line)

    def has_ended(self, call: PendingCall) -> bool:
        """See `PendingCall.is_over`."""
        with contextlib.suppress(DeadlineExceeded), self._locked(call):
            return self._is_over(call)
        return True  # another thread has used the client for longer than the call may take

    def _is_over(self, call: PendingCall) -> bool:
        self._has_connection()
        while (message := self._line.receive()) is not None:
            self._take_reply(message)
        return self._begun.get(call.id) is not None or self._runtime.now() >= call.end_s

    def _take_reply(self, message: list[wire.Frame]) -> None:
        found_id, found = read_reply(message)
        if found_id in self._begun:  # else the answer to a call that was given up earlier
            self._begun[found_id] = found

    def _has_connection(self) -> bool:
        """Tell whether one is up. After a break, what was asked and not answered before is given up."""
        line = self._line
        line.look()
        if not line.is_broken:
            return line.is_up
        while (message := line.receive()) is not None:
            self._take_reply(message)
        for call_id, result in list(self._begun.items()):
            if result is None:
                self._begun[call_id] = ConnectionLost("the connection broke")
        line.close()
        self._line = self._runtime.network.dealer(self.address, self._keys)
        return self._line.is_up

    def forget(self, call: PendingCall) -> None:
        """Give up a call that was begun; its reply is dropped when it comes."""
        self._begun.pop(call.id, None)

    def close(self) -> None:
        self._line.close()


@dataclass(frozen=True)
class PendingCall:
    """A call that was sent. `end` it once, or `Client.forget` it."""

    client: Client
    id: int
    op: str
    deadline_s: float
    end_s: float

    def end(self) -> Reply:
        """Return the reply.

        Raises:
            DeadlineExceeded, AsyncrlError: As `Client.call`.
        """
        return self.client.take(self)

    def is_over(self) -> bool:
        """Tell whether `end` would not wait: the answer or an error is here, or the time is over."""
        return self.client.has_ended(self)


class AsyncClient:
    """Calls from one event loop; up to 250 may be in flight (`asyncrl.core.sockets.options.UNSENT_REPLIES`).

    `counters`: `malformed` replies.

    The loop watches the socket itself: going through `zmq.asyncio` cost more than the sending.
    """

    def __init__(self, runtime: Runtime, address: str, keys: ClientKeys | None = None) -> None:
        self.address = address
        self.counters: Counter[str] = Counter()
        self._runtime, self._keys = runtime, keys
        self._line = runtime.network.dealer(address, keys)
        self._ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Reply]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._has_news = asyncio.Event()

    async def call(
        self, op: str, frames: Sequence[wire.Frame] = (), deadline_s: float = 10.0, **args: Any
    ) -> Reply:
        """As `Client.call`."""
        loop, call_id, is_sent = self._attach(), next(self._ids), False
        future: asyncio.Future[Reply] = loop.create_future()
        header = pack_request(call_id, op, args, self._runtime.now(), deadline_s)
        try:
            async with asyncio.timeout(deadline_s):
                while not self._try_send([header, *frames]):
                    self._has_news.clear()
                    await self._has_news.wait()
                is_sent = True
                self._waiting[call_id] = future
                return await future
        except ConnectionLost:
            raise _lost(op, self.address) from None
        except TimeoutError as error:
            if isinstance(error, AsyncrlError):
                raise
            if is_sent:
                raise _late(op, self.address, deadline_s) from None
            raise _unreachable(op, self.address, deadline_s, self._keys) from None
        finally:
            self._waiting.pop(call_id, None)

    async def ask(
        self,
        operation: Operation[Q, A],
        asked: Q,
        frames: Sequence[wire.Frame] = (),
        deadline_s: float = 10.0,
    ) -> Answer[A]:
        """As `Client.ask`."""
        return operation.read(await self.call(operation.name, frames, deadline_s, **fields_of(asked)))

    def _attach(self) -> asyncio.AbstractEventLoop:
        """Let the running loop watch the connection."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._detach()
            self._watch(loop)
        return loop

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        self._line.watch(loop, self._take_news)
        self._loop = loop

    def _detach(self) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._line.unwatch(self._loop)
        self._loop = None

    def _take_news(self) -> None:
        """Take in what has come, and let those try that wait to send: a connection, or room in it."""
        self._has_connection()
        self._read()
        self._has_news.set()

    def _try_send(self, parts: Sequence[wire.Frame]) -> bool:
        """Send if there is room; False while the service is away or far behind."""
        if not self._has_connection():
            return False
        is_sent = self._line.send(parts)
        if is_sent:
            self._has_news.set()  # this look may have taken the report that others wait for
        if self._loop is not None and self._line.has_news():
            self._loop.call_soon(self._take_news)
        return is_sent

    def _read(self) -> None:
        """Hand over all replies that are there."""
        line = self._line
        while (message := line.receive()) is not None:
            try:
                self._resolve(*read_reply(message))
            except WireError as error:
                self.counters["malformed"] += 1
                log.warning("a malformed reply from %s: %s", self.address, error)

    def _has_connection(self) -> bool:
        """Tell whether one is up. After a break, calls that were sent and not answered before are ended."""
        self._line.look()
        if not self._line.is_broken:
            return self._line.is_up
        self._read()
        for call_id in list(self._waiting):
            self._resolve(call_id, ConnectionLost("the connection broke"))
        self._connect_anew()
        return self._line.is_up

    def _connect_anew(self) -> None:
        loop = self._loop
        self._detach()
        self._line.close()
        self._line = self._runtime.network.dealer(self.address, self._keys)
        if loop is not None:
            self._watch(loop)

    def _resolve(self, call_id: int, result: Reply | AsyncrlError) -> None:
        future = self._waiting.get(call_id)
        if future is None or future.done():
            return  # the answer to a call that was given up earlier
        if isinstance(result, AsyncrlError):
            future.set_exception(result)
        else:
            future.set_result(result)

    def close(self) -> None:
        """Close the socket. Calls still in flight end at their deadlines."""
        self._detach()
        self._line.close()


def _late(op: str, address: str, deadline_s: float) -> DeadlineExceeded:
    return DeadlineExceeded(f"'{op}' at {address} gave no answer within {deadline_s:g} s")


def _lost(op: str, address: str) -> ConnectionLost:
    return ConnectionLost(f"'{op}' at {address}: the connection broke before an answer came")


def _unreachable(op: str, address: str, deadline_s: float, keys: ClientKeys | None) -> DeadlineExceeded:
    owned = " without keys" if keys is None else " with the keys that this process has"
    return DeadlineExceeded(
        f"'{op}' at {address} was not sent: no connection{owned} came about within {deadline_s:g} s",
        hint="Is the service up, and were the keys made for this start of its run?",
    )
