"""Named points at which a test can kill or stop a process, exactly and not by luck of timing.

`ASYNCRL_FAULT=learner.updated@3` kills the process with SIGKILL when it passes the point
`learner.updated` at step 3; without `@3`, when it first passes the point. `receiver.bucket@2.1` is
bucket 1 of version 2. `stop:` before the name sends SIGSTOP instead; who planned that sends SIGCONT. `abort:`
sends SIGABRT, as NCCL's watchdog does.
`kill:receiver.bucket@2.1:812,813` strikes those processes, when this one passes the point. `interrupt:` sends
SIGINT, as Ctrl-C does: `interrupt:head.ray:812` to the `asyncrl up` of pid 812 when its head starts Ray.
Faults are separated by blanks. A simulated world sets a hook, which is called at each point instead.
Invariant: each fault strikes once in a process.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

VARIABLE = "ASYNCRL_FAULT"
_SIGNALS = {
    "kill": signal.SIGKILL,
    "stop": signal.SIGSTOP,
    "interrupt": signal.SIGINT,
    "abort": signal.SIGABRT,
}
_STRUCK = "TtZX"  # stopped, traced, zombie, dead: see proc(5)
_STRIKE_S = 1.0
Hook = Callable[[str, tuple[int | None, ...]], None]
"""Called with the name of a point and its place."""
_hook: Hook | None = None


def set_hook(hook: Hook | None) -> Hook | None:
    """Have `hook` called at each fault point, and heed the environment no more; return the hook before."""
    global _hook
    before, _hook = _hook, hook
    return before


def is_wanted(name: str, *place: int | None) -> bool:
    """Tell whether the environment asks for a fault here."""
    return _hook is None and _find(name, place) is not None


def fault_point(name: str, *place: int | None) -> None:
    """Strike here if the environment asks for it; do nothing otherwise.

    Args:
        place: Step or version, then what lies within it, such as a bucket.
    """
    if _hook is not None:
        _hook(name, place)
        return
    wanted = _find(name, place)
    if wanted is None:
        return
    left = os.environ.pop(VARIABLE).split()
    left.remove(wanted)
    if left:
        os.environ[VARIABLE] = " ".join(left)
    number, _, pids = _parse(wanted)
    others = [pid for pid in pids if pid != os.getpid()]
    for pid in others:
        os.kill(pid, number)
    for pid in others if number != signal.SIGINT else ():
        _wait_until_struck(pid)
    if len(others) == len(pids) != 0:
        return
    if number == signal.SIGKILL:
        os.kill(os.getpid(), number)
    else:
        # To this very thread: another one would take the signal later, when it is scheduled.
        signal.pthread_kill(threading.get_ident(), number)


def _find(name: str, place: tuple[int | None, ...]) -> str | None:
    """Return the first fault in the environment that is to strike here, None if there is none."""
    wanted = os.environ.get(VARIABLE)
    if wanted is None:
        return None
    spots = {name, *(f"{name}@{'.'.join(map(str, place[:depth]))}" for depth in range(1, len(place) + 1))}
    return next((one for one in wanted.split() if _parse(one)[1] in spots), None)


def _parse(wanted: str) -> tuple[signal.Signals, str, list[int]]:
    kind, colon, rest = wanted.partition(":")
    if not colon:
        kind, rest = "kill", wanted
    point, _, pids = rest.partition(":")
    return _SIGNALS[kind], point, [int(pid) for pid in pids.split(",") if pid]


def _wait_until_struck(pid: int) -> None:
    end = time.monotonic() + _STRIKE_S
    while time.monotonic() < end:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]
        except OSError:
            return  # gone
        if state in _STRUCK:
            return
        time.sleep(0.0005)
