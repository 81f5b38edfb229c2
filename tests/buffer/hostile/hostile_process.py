"""Serves a buffer over a file journal until killed: `-m tests.buffer.hostile.hostile_process FOLDER`."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

from asyncrl.buffer.service import BufferService
from asyncrl.core.runtime.threads import ThreadEvent, ThreadRuntime
from tests.buffer.parts import make_store


def main() -> None:
    logging.basicConfig(level=logging.ERROR, stream=sys.stderr)
    store = make_store(
        Path(sys.argv[1]),
        max_lag=50,
        ready_batches=100,
        memory_bytes=1 << 20,
        max_attempts=1000,
        lease_s=60.0,
    )
    service = BufferService(store, ThreadRuntime())
    print(service.address, flush=True)
    service.run(ThreadEvent())


if __name__ == "__main__":
    main()
