"""Serves a buffer or a coordinator with keys until killed: arguments are its kind and its folder."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path

from asyncrl.buffer.service import BufferService
from asyncrl.core.runtime.threads import ThreadEvent, ThreadRuntime
from asyncrl.core.sockets.keys import ServerKeys, make_run_keys
from tests.buffer.parts import make_store
from weight_sync.coordination.coordinator import CoordinatorService
from weight_sync.memory.manifest import VersionBounds
from weight_sync.protocol.protocol import Coordination
from weight_sync.protocol.rounds import Timing

BOUNDS = VersionBounds(1 << 20, 1 << 16)


def make_buffer(folder: Path, keys: ServerKeys | None) -> BufferService:
    changes = {"max_lag": 50, "ready_batches": 100, "memory_bytes": 1 << 20, "max_attempts": 1000}
    return BufferService(make_store(folder, **changes), ThreadRuntime(), keys=keys)


def make_coordinator(folder: Path, keys: ServerKeys | None) -> CoordinatorService:
    clock = ThreadRuntime()
    return CoordinatorService(
        Coordination(Timing.of(8.0), token=1), clock, keys=keys, run_dir=folder, bounds=BOUNDS
    )


def main() -> None:
    logging.basicConfig(level=logging.ERROR, stream=sys.stderr)
    keys = make_run_keys()
    make = {"buffer": make_buffer, "coordinator": make_coordinator}[sys.argv[1]]
    service = make(Path(sys.argv[2]), keys.server)
    client = keys.client
    told = [
        service.status().address,
        *(one.decode() for one in (client.public, client.secret, client.server)),
    ]
    print(json.dumps(told), flush=True)
    service.run(ThreadEvent())


if __name__ == "__main__":
    main()
