"""Echoes until killed, and may grow by 64 MiB only: `python -m tests.core.rpc.flooded_process ADDRESS`."""

from __future__ import annotations

import math
import sys
import time

from asyncrl.core.rpc import Limits, Request, Server
from asyncrl.core.runtime.threads import ThreadEvent, ThreadRuntime


class Echo:
    def handle(self, request: Request) -> None:
        if request.op == "stall":
            time.sleep(2.0)
        request.reply(request.frames, **request.args)

    def wake_at(self) -> float:
        return math.inf

    def tick(self, now: float) -> None: ...


def main() -> None:
    server = Server(ThreadRuntime(), sys.argv[1], limits=Limits(frame_bytes=1 << 20, memory_bytes=64 << 20))
    print(server.address, flush=True)
    server.serve(Echo(), ThreadEvent())


if __name__ == "__main__":
    main()
