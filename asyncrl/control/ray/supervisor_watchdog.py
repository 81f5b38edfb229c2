"""Watchdog in the head: restarts a dead supervisor, and detects the death of Ray itself.

consumes: the supervisor's status
waits for: its own pulse of `POLL_S`      unblocked by: time
produces: a supervisor that is started again when its process dies; its last status
Invariant: a supervisor that ended by itself, well or badly, is never started again; there are never two.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psutil

from asyncrl.control.fleet.budget import Budget
from asyncrl.control.machine.processes import end_service
from asyncrl.control.ray.launcher import Launcher
from asyncrl.control.roster import ServiceSpec
from asyncrl.core.errors import ServiceFailed
from asyncrl.core.runtime.clock import Clock
from asyncrl.core.states import RUN_ENDS, RunState, ServiceState
from asyncrl.core.status.service import ServiceStatus, SupervisorStatus

POLL_S = 0.2
STATUS_DEADLINE_S = 10.0
SILENCE_LIMIT_S = 60.0
RAY_PULSE_S = 0.5
END_S = 10.0
"""Time for the watching thread to end; it is a daemon, so a hanging one blocks no exit."""
ENDS = (ServiceState.ENDED, ServiceState.FAILED)
RAY_PROCESSES = ("gcs_server", "raylet")
"""Ray's processes without either of which no service survives."""


def keep(
    launcher: Launcher, spec: ServiceSpec, budget: Budget, clock: Clock, tell: Callable[[str], None]
) -> ServiceStatus:
    """Start the service, start it again whenever its process dies, and return its last status.

    Args:
        tell: Called with the reason of each restart.

    Raises:
        ServiceFailed: It died more often than the budget allows.
    """
    launcher.start(spec)
    heard_at = clock.now()
    while True:
        status = launcher.statuses([spec.name], STATUS_DEADLINE_S)[spec.name]
        run = status if isinstance(status, SupervisorStatus) else None
        if status.state in ENDS or (run is not None and run.run in RUN_ENDS):
            return status
        if status.state != ServiceState.SILENT:
            heard_at = clock.now()
        if (why := _death(status, clock.now() - heard_at)) is not None:
            _start_again(launcher, spec, budget, clock, why)
            tell(f"{why}; it was started again")
            heard_at = clock.now()
        if run is not None and run.run == RunState.RUNNING:
            budget.note_up(run.step)
        clock.sleep(POLL_S)


def _death(status: ServiceStatus, silent_s: float) -> str | None:
    """Return how the service died, None while it has not."""
    if status.state == ServiceState.DEAD:
        return f"its process died ({status.error or 'without a message'})"
    return f"it sent no heartbeat for {silent_s:.0f} s" if silent_s > SILENCE_LIMIT_S else None


def _start_again(launcher: Launcher, spec: ServiceSpec, budget: Budget, clock: Clock, why: str) -> None:
    delay_s = budget.ask(clock.now())
    if delay_s is None:
        raise ServiceFailed(
            f"{spec.name} died once more than launcher.max_restarts allows without a step in between: {why}",
            hint=f"See {spec.log_path}",
        )
    launcher.kill(spec.name)
    end_service(spec.context.run_id, spec.name)  # one that is stopped does not hear Ray
    clock.sleep(delay_s)
    launcher.start(spec)


@contextmanager
def watching_ray(on_death: Callable[[str], None]) -> Iterator[Counter[str]]:
    """Call `on_death` with the name of the first of Ray's own processes that dies.

    Only those that this process has started are watched: those of a cluster are not ours. Yields the count
    of looks that failed (`failed_looks`): for want of a descriptor, say, which tells nothing of Ray.
    """
    children = {child: child.name() for child in psutil.Process().children()}
    own = {child: name for child, name in children.items() if name in RAY_PROCESSES}
    ended, counters = threading.Event(), Counter[str]()
    arguments = (own, ended, on_death, counters)
    thread = threading.Thread(target=_watch, args=arguments, name="ray-watch", daemon=True)
    thread.start()
    try:
        yield counters
    except Exception:
        _tell_death(own, on_death, counters)  # it is the cause of whatever it broke here
        raise
    finally:
        ended.set()
        thread.join(END_S)


def _watch(
    processes: dict[psutil.Process, str],
    ended: threading.Event,
    on_death: Callable[[str], None],
    counters: Counter[str],
) -> None:
    while not ended.wait(RAY_PULSE_S):
        if _tell_death(processes, on_death, counters):
            return


def _tell_death(
    processes: dict[psutil.Process, str], on_death: Callable[[str], None], counters: Counter[str]
) -> bool:
    """Call `on_death` if one of the processes is dead; return whether one is."""
    dead = next((name for process, name in processes.items() if not _is_alive(process, counters)), None)
    if dead is not None:
        on_death(dead)
    return dead is not None


def _is_alive(process: psutil.Process, counters: Counter[str]) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
    except (OSError, psutil.Error) as error:
        if not counters["failed_looks"]:
            print(f"Ray's processes cannot be looked at for now: {error}", file=sys.stderr, flush=True)
        counters["failed_looks"] += 1
        return True
