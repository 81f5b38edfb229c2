"""Serves a buffer over a file journal until it is killed; started by `test_journal`.

python -m tests.buffer.journals.pushing_process <folder>
"""

from __future__ import annotations

import sys
from pathlib import Path

from asyncrl.buffer.service import BufferService
from asyncrl.core.runtime.threads import ThreadEvent, ThreadRuntime
from tests.buffer.parts import make_store


def main() -> None:
    service = BufferService(
        make_store(Path(sys.argv[1]), max_lag=50, ready_batches=100, memory_bytes=1 << 20), ThreadRuntime()
    )
    print(service.address, flush=True)
    service.run(ThreadEvent())


if __name__ == "__main__":
    main()
