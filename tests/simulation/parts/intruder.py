"""A process that is no client: what it sends must end no service, and be answered by none as a client's."""

from __future__ import annotations

from asyncrl.core import wire
from asyncrl.core.errors import AsyncrlError
from asyncrl.core.rpc import Client
from tests.simulation.kernel.network import Wires
from tests.simulation.kernel.runtime import SimRuntime
from tests.simulation.kernel.world import Process

MESSAGES: tuple[list[bytes], ...] = (
    [b""],
    [b"\xc1 no map"],
    [b"\x80"],
    [wire.pack_header({"id": 1, "op": "status", "args": {}}, 9999)],
    [wire.pack_header({"id": 2, "op": "x" * 200, "args": {}}, wire.RPC_VERSION)],
    [wire.pack_header({"id": 3, "op": "hello", "args": {"name": 5}}, wire.RPC_VERSION)],
    [wire.pack_header({"id": 4, "op": "status", "args": {}, "sent_s": float("nan"), "within_s": 1.0}, 1)],
    [wire.pack_header({"id": 5, "op": "no such thing", "args": {}}, wire.RPC_VERSION), *[b"x"] * 600],
    [wire.pack_header({"id": 6, "op": "no such thing", "args": {}}, wire.RPC_VERSION)],
)
PATIENCE_S = 3.0


def intrude(process: Process, wires: Wires, address: str) -> None:
    """Send every one of `MESSAGES` to an address, and ask for what no service knows."""
    runtime = SimRuntime(process, wires)

    def work() -> None:
        line = runtime.network.dealer(address, None)
        for parts in MESSAGES:
            line.send(parts)
            runtime.sleep(process.world.dice.random() * 0.1)
        client = Client(runtime, address)
        try:
            client.call("no such thing", deadline_s=PATIENCE_S)
        except AsyncrlError:
            pass
        runtime.sleep(PATIENCE_S)
        line.close()
        client.close()

    process.world.spawn(process, "main", work)
