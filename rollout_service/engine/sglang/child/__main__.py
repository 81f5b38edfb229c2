"""The process that runs SGLang for one engine: `python -m rollout_service.engine.sglang.child DESCRIPTOR`.

Consumes: `Ask`s of the adapter, from the socket of that descriptor. Waits for: SGLang. Unblocked by: the
adapter's end of the socket. Produces: `Answer`s. SGLang kills the process tree of whoever started it when it
fails, so this process has a session of its own; when the adapter is gone, a thread ends all of the session,
whatever the others do at that moment.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import select
import shutil
import signal
import socket
import sys
import tempfile
import threading
from pathlib import Path

import msgspec

from rollout_service.engine.sglang.messages import (
    LENGTH_BYTES,
    LOAD_REQUEST,
    MAX_FRAME_BYTES,
    Channel,
    Failed,
    Start,
)

SHARED = re.compile(r"sem\.mp-|sglang_|sgl_shm_")
"""Shared memory that SGLang leaves behind when it is killed, by how its name begins."""


def main() -> None:
    """Serve until the adapter is gone."""
    end = socket.socket(fileno=int(sys.argv[1]))
    end.set_inheritable(False)
    ending = threading.Thread(target=_end_with, args=(end.fileno(),), daemon=True)
    ending.start()
    start = _read_start(end)
    os.environ[LOAD_REQUEST] = f"/proc/{os.getpid()}/fd/{os.memfd_create('load')}"
    try:
        from rollout_service.engine.sglang.child.serving import Asked, Serving, start_engine

        engine = start_engine(start.engine_args)
    except Exception as error:  # of any kind: the adapter says it
        end.sendall(frame_of(Failed(start.number, f"{type(error).__name__}: {error}")))
        raise

    async def serve() -> None:
        channel: Channel[Asked] = await Channel.over(end, Asked)
        await Serving(engine, channel, Path(os.environ[LOAD_REQUEST])).run(start.number)

    loop: asyncio.AbstractEventLoop = engine.loop
    loop.run_until_complete(serve())
    ending.join()  # else this process may be gone before all is removed


def frame_of(message: object) -> bytes:
    """Return `message` as the channel sends it."""
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(LENGTH_BYTES, "big") + body


def _read_start(end: socket.socket) -> Start:
    """Return the first message; only when SGLang is there, its loop reads the others."""
    size = int.from_bytes(end.recv(LENGTH_BYTES, socket.MSG_WAITALL), "big")
    assert size <= MAX_FRAME_BYTES
    return msgspec.msgpack.decode(end.recv(size, socket.MSG_WAITALL), type=Start)


def _end_with(descriptor: int) -> None:
    """End this session, and remove what it would leave, once the other end of the socket is closed."""
    watch = select.poll()
    watch.register(descriptor, select.POLLRDHUP)
    watch.poll()
    shutil.rmtree(tempfile.gettempdir(), ignore_errors=True)
    import psutil

    mapped = set()  # by inode: a semaphore's mapping has the name that it was made under
    for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        with contextlib.suppress(psutil.Error, OSError):
            maps = Path(f"/proc/{process.pid}/maps").read_text().splitlines()
            mapped |= {int(line.split()[4]) for line in maps if "/dev/shm/" in line}
    for file in Path("/dev/shm").iterdir():
        with contextlib.suppress(OSError):
            if SHARED.match(file.name) and file.stat().st_ino in mapped:
                file.unlink()
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
