"""Forks the parties of trials from one process that has imported everything: a party lives in 2 ms.

python -m tests.buffer.killed.killed_forkserver     one JSON request per line in, one answer per line out
    {"op": "start", "role": ..., "args": {...}, "fault": "..."}  ->  {"pid": ...}
    {"op": "poll"}                                               ->  {"ended": [[pid, exit code], ...]}
"""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

from asyncrl.core.runtime.faults import VARIABLE
from tests.buffer.killed.killed_parties import play


def main() -> None:
    running: set[int] = set()
    for line in sys.stdin:
        request = json.loads(line)
        if request["op"] == "start":
            pid = start(request)
            running.add(pid)
            answer: dict[str, Any] = {"pid": pid}
        else:
            answer = {"ended": reap(running)}
        print(json.dumps(answer), flush=True)
    for pid in running:
        os.kill(pid, signal.SIGKILL)


def start(request: dict[str, Any]) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        log = os.open(Path(request["args"]["folder"]) / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.environ[VARIABLE] = request["fault"]
        play(request["role"], request["args"])
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


def reap(running: set[int]) -> list[tuple[int, int]]:
    ended = []
    for pid in sorted(running):
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            running.discard(pid)
            ended.append((pid, os.waitstatus_to_exitcode(status)))
    return ended


if __name__ == "__main__":
    main()
