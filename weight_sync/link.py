"""The replica's side of its receiver: what to load next, and how the load went."""

from __future__ import annotations

import itertools

from asyncrl.core.errors import DeadlineExceeded, FencedError
from asyncrl.core.rpc import AsyncClient
from asyncrl.core.runtime.interface import Runtime
from asyncrl.core.sockets.keys import ClientKeys
from weight_sync import messages as wire
from weight_sync.direct.seat import DeskAddress
from weight_sync.memory.manifest import Manifest
from weight_sync.memory.staging import Staged

CALL_DEADLINE_S = 10.0
MARGIN_S = 5.0


class ReceiverLink:
    """A client of the receiver beside this replica.

    Calls are numbered: one that was given up and comes late is not believed. Pins have numbers of their own,
    for polls go on meanwhile. A process that started before another one that has called is refused: it is
    thought dead, and lives on beside its successor.

    Args:
        is_direct: The engine's workers are to receive later versions themselves.
        started_ns: When the replica's process was given its work, in nanoseconds of the runtime's clock,
            which all processes of a host share; now, without one.

    >>> # staged = await link.next_staged(serving_number=0, wait_s=5.0)
    >>> # for name, tensor in open_tensors(staged): ...
    >>> # await link.report_loaded(staged.version.number, ok=True)

    Attributes:
        is_fenced: The coordinator's last word: the replica missed a deadline and may take no leases
            before it has caught up. Also while the receiver does not answer.
    """

    def __init__(
        self,
        runtime: Runtime,
        receiver_address: str,
        keys: ClientKeys | None = None,
        started_ns: int | None = None,
        *,
        is_direct: bool = False,
    ) -> None:
        self._desk = DeskAddress(receiver_address, keys) if is_direct else None
        self._client = AsyncClient(runtime, receiver_address, keys)
        self._started_ns = int(runtime.now() * 1e9) if started_ns is None else started_ns
        self._incarnation = runtime.new_id()
        self._seqs, self._pin_seqs = itertools.count(1), itertools.count(1)
        self.is_fenced = False

    async def next_staged(self, serving_number: int, wait_s: float) -> Staged | None:
        """Return the next version to load, or None after `wait_s` seconds without one.

        Args:
            serving_number: The version number that the engine has loaded; 0 for none. A smaller one than
                before means that the engine was started anew.

        Raises:
            DeadlineExceeded: The receiver does not answer.
            FencedError: Another process has taken this replica's place.
        """
        try:
            asked = wire.NextStaged(
                serving=serving_number,
                wait_s=wait_s,
                incarnation=self._incarnation,
                started_ns=self._started_ns,
                seq=next(self._seqs),
            )
            heard = await self._client.ask(wire.NEXT_STAGED, asked, deadline_s=wait_s + MARGIN_S)
        except DeadlineExceeded:
            self.is_fenced = True  # nobody could tell this replica if it were
            raise
        self.is_fenced = heard.message.fenced
        if heard.message.past:
            raise FencedError("another process has taken this replica's place at its receiver")
        if not heard.frames:
            return None
        manifest = Manifest.from_bytes(bytes(heard.frames[0]))
        return Staged(manifest.version, heard.message.path, manifest, self._desk)

    async def report_loaded(self, number: int, ok: bool, error: str = "") -> None:
        """Say that version `number` is loaded and served, or that the engine holds nothing usable."""
        told = wire.Loaded(
            number=number,
            ok=ok,
            error=error,
            incarnation=self._incarnation,
            started_ns=self._started_ns,
            seq=next(self._seqs),
        )
        await self._client.ask(wire.LOADED, told, deadline_s=CALL_DEADLINE_S)

    async def pin(self) -> None:
        """Hold this replica at its version: nothing is offered or handed over until `unpin`.

        It ends with this replica too: with the first poll of another one.
        """
        asked = wire.Pin(incarnation=self._incarnation, started_ns=self._started_ns, seq=next(self._pin_seqs))
        await self._client.ask(wire.PIN, asked, deadline_s=CALL_DEADLINE_S)

    async def unpin(self) -> None:
        """Follow again."""
        asked = wire.Unpin(
            incarnation=self._incarnation, started_ns=self._started_ns, seq=next(self._pin_seqs)
        )
        await self._client.ask(wire.UNPIN, asked, deadline_s=CALL_DEADLINE_S)

    async def drain(self) -> None:
        """Take no more versions; the replica is about to leave."""
        asked = wire.Drain(incarnation=self._incarnation, started_ns=self._started_ns)
        await self._client.ask(wire.DRAIN, asked, deadline_s=CALL_DEADLINE_S)

    def close(self) -> None:
        self._client.close()
