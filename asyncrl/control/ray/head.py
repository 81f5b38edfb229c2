"""The head process of a run: owns its local Ray, keeps the supervisor alive, cleans up after both.

`python -m asyncrl.control.ray.head RUN_DIR LOCK SUPERVISOR` is started by `asyncrl up` in a session of its
own, so that the terminal only watches. `LOCK` is the descriptor of the run's lock, held from before the head
until its death: no second head of the run can be. `SUPERVISOR` names the supervisor's composition root. Its
standard input ends once `asyncrl up` has written down its pid; SIGTERM is held back until it can be heeded.
Everything that it starts dies with it or is ended by pid.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from msgspec.structs import replace

from asyncrl.control.fleet.budget import Budget
from asyncrl.control.machine.ports import HeldPort, held_row
from asyncrl.control.machine.process_limit import RefusedProcesses
from asyncrl.control.machine.processes import end_leftovers, remove_leftovers
from asyncrl.control.machine.resources import count_gpus
from asyncrl.control.phases import FIRST_START
from asyncrl.control.ray import bootstrap
from asyncrl.control.ray import launcher as ray_launcher
from asyncrl.control.ray.supervisor_watchdog import keep, watching_ray
from asyncrl.control.record.events import EventLog
from asyncrl.control.record.live import LiveRun, read_live, write_live
from asyncrl.control.record.outcome import Outcome, write_outcome
from asyncrl.control.record.rundir import RunDir, write_json
from asyncrl.control.roster import SERVERS, ServiceSpec
from asyncrl.core.config.load import load_config
from asyncrl.core.config.tree import Config
from asyncrl.core.files.durable import replace_text
from asyncrl.core.files.log_records import log_to_stderr
from asyncrl.core.runtime.clock import SystemClock
from asyncrl.core.runtime.faults import fault_point
from asyncrl.core.runtime.threads import ThreadRuntime
from asyncrl.core.service import ServiceContext
from asyncrl.core.sockets.keys import RunKeys, make_run_keys, write_client_keys
from asyncrl.core.states import RunState, ServiceState
from asyncrl.core.status.service import SupervisorStatus

HEAD, SUPERVISOR = "head.0", "supervisor.0"
EXIT_FAILED, EXIT_TERMINATED = 1, 143
REFUSED = RefusedProcesses()
"""Since this process began: a thread that a service lacks ends it in words that name no limit."""
TEAR_DOWN_DEADLINE_S = 90.0
"""Three times what the nodes of a cluster have to answer in. Ray waits for one that is gone as it likes."""


def main() -> int:
    """Run the head to the end of the run; returns the process's exit code."""
    log_to_stderr()
    run_dir = RunDir(Path(sys.argv[1]))
    os.set_inheritable(int(sys.argv[2]), False)
    sys.stdin.read()
    found = read_live(run_dir.live)
    assert found is not None, "asyncrl up writes run.json before it starts the head"
    live = replace(found, pid=os.getpid())  # `asyncrl up` may have died before it could
    write_live(run_dir.live, live)
    config = load_config(run_dir.resolved)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(EXIT_TERMINATED))
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        _run(run_dir, live, config, sys.argv[3])
    except SystemExit:
        _write_termination(run_dir)
        raise
    except Exception as error:  # process boundary: watchers must learn the outcome
        _write_failure(run_dir, f"{type(error).__name__}: {error}", HEAD)
        raise
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        _tear_down(run_dir, live, config)
    return 0


def tell_phase(run_dir: RunDir, state: str, phase: str) -> None:
    """Write the head's activity for readers while no supervisor answers."""
    try:
        write_json(run_dir.phase, {"state": state, "phase": phase, "time": time.time()})
    except OSError as error:  # a full disk ends nothing
        print(f"the phase '{phase}' could not be written: {error}", file=sys.stderr, flush=True)


def _run(run_dir: RunDir, live: LiveRun, config: Config, factory: str) -> None:
    """Hold the run's ports, own its Ray, and keep its supervisor until that has ended."""
    sockets = Path(live.sockets)
    sockets.mkdir(mode=0o700)
    if config.launcher.is_cluster:
        tell_phase(run_dir, RunState.STARTING, "joining the Ray cluster and checking its nodes")
        events = EventLog(run_dir.events, ThreadRuntime())
        config = bootstrap.enter(config, live.earlier, partial(events.add, "exit", "run"))
    host = config.launcher.host
    with (
        HeldPort(host or "127.0.0.1") as rendezvous,
        _held_ports(host) as first_port,
        HeldPort(number=config.launcher.api_port) as api,
    ):
        addresses = {"first_port": str(first_port), "api_port": str(api.number)}
        context = ServiceContext(
            config=config,
            name=SUPERVISOR,
            run_dir=run_dir.path,
            run_id=live.run_id,
            addresses=addresses,
            sockets=sockets,
            world_size=bootstrap.count_publishers(config),
            rendezvous=rendezvous.address,
            keys=_make_keys(config, run_dir),
        )
        if not config.launcher.is_cluster:
            tell_phase(run_dir, RunState.STARTING, "starting Ray")
            fault_point("head.ray")
            ray_launcher.start_local(sockets, num_cpus=os.cpu_count() or 1, num_gpus=count_gpus())
        give_up = partial(_give_up, run_dir, live)
        with watching_ray(give_up), bootstrap.watching_cluster(config, give_up):
            _keep_supervisor(run_dir, context, factory)


def _keep_supervisor(run_dir: RunDir, context: ServiceContext, factory: str) -> None:
    """The same context at every start: a new supervisor finds the run's services, and watchers find it."""
    spec = ServiceSpec(factory, context, str(run_dir.log(SUPERVISOR)))
    events = EventLog(run_dir.events, ThreadRuntime())

    def tell(why: str) -> None:
        events.add("restart", SUPERVISOR, why)
        tell_phase(run_dir, RunState.STARTING, "starting the supervisor again")

    tell_phase(run_dir, RunState.STARTING, FIRST_START)
    fault_point("head.supervisor")
    last = keep(
        bootstrap.make_launcher(context.config, context.run_id),
        spec,
        Budget(context.config.launcher.max_restarts),
        SystemClock(),
        tell,
    )
    has_failed = isinstance(last, SupervisorStatus) and last.run == RunState.FAILED
    if (has_failed or last.state == ServiceState.FAILED) and not run_dir.outcome.exists():
        _write_failure(run_dir, f"{SUPERVISOR} failed: {last.error}", SUPERVISOR)


def _give_up(run_dir: RunDir, live: LiveRun, name: str) -> None:
    """Ray's own `name` has died: end what is left of the run and this process, which Ray may hold up."""
    with _exiting():
        if not run_dir.outcome.exists():
            _write_failure(run_dir, f"Ray's process {name} died", HEAD)
            if text := ray_launcher.read_log(Path(live.sockets), name):
                replace_text(run_dir.log(name), text)  # the one in Ray's folder goes with the run
        _clean_up(run_dir, live)


def _tear_down(run_dir: RunDir, live: LiveRun, config: Config) -> None:
    """Leave nothing: each step is taken, also after one that failed; after one that hangs, the last."""
    with _bounding(run_dir, live), contextlib.ExitStack() as steps:  # the last one first
        steps.callback(_clean_up, run_dir, live)
        steps.callback(ray_launcher.shut_down)
        if config.launcher.is_cluster:
            steps.callback(bootstrap.leave, config, live.run_id, Path(live.sockets))
        tell_phase(run_dir, RunState.STOPPING, "ending Ray")


@contextlib.contextmanager
def _bounding(run_dir: RunDir, live: LiveRun) -> Iterator[None]:
    """Clean up and end this process if what is done here takes longer than `TEAR_DOWN_DEADLINE_S`."""

    def abandon() -> None:
        with _exiting():
            print(f"Ray was not left within {TEAR_DOWN_DEADLINE_S:g} s", file=sys.stderr, flush=True)
            _clean_up(run_dir, live)

    timer = threading.Timer(TEAR_DOWN_DEADLINE_S, abandon)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextlib.contextmanager
def _exiting() -> Iterator[None]:
    """End this process after what is done here, also where that fails, and whatever its other threads do."""
    try:
        yield
    except Exception:  # process boundary: nothing comes after that could tell of it
        traceback.print_exc()
    finally:
        os._exit(EXIT_FAILED)


def _clean_up(run_dir: RunDir, live: LiveRun) -> None:
    _remove_keys(run_dir)
    end_leftovers(live.run_id)
    remove_leftovers(live.run_id, Path(live.sockets))


def _write_termination(run_dir: RunDir) -> None:
    """Write down how a run ended that SIGTERM has ended: in order, if it had no services yet."""
    if run_dir.outcome.exists():
        return
    live = read_live(run_dir.live)
    if live is not None and live.url:
        _write_failure(run_dir, "the head process was ended by SIGTERM", HEAD)
    else:
        _write_outcome(run_dir, Outcome(state=RunState.STOPPED))


def _write_failure(run_dir: RunDir, error: str, service: str) -> None:
    error = "; ".join(filter(None, (error, REFUSED.total())))
    tail = tuple(run_dir.tail(service))
    _write_outcome(run_dir, Outcome(state=RunState.FAILED, error=error, service=service, tail=tail))


def _write_outcome(run_dir: RunDir, outcome: Outcome) -> None:
    if why := write_outcome(run_dir, outcome):  # the steps after it are still performed
        print(f"'{outcome.error}' could not be written down: {why}", file=sys.stderr, flush=True)


def _make_keys(config: Config, run_dir: RunDir) -> RunKeys | None:
    """Return the keys of this start, None if its sockets are plain; write down what a client needs."""
    _remove_keys(run_dir)
    if not config.launcher.has_curve:
        return None
    keys = make_run_keys()
    write_client_keys(run_dir.keys, keys.of_generator().client)
    write_client_keys(run_dir.service_keys, keys.client)
    return keys


def _remove_keys(run_dir: RunDir) -> None:
    for path in (run_dir.keys, run_dir.service_keys):
        path.unlink(missing_ok=True)


def _held_ports(host: str | None) -> contextlib.AbstractContextManager[int]:
    """Hold a port for every server that there can be, also those that are started later; yield the first.

    Without `launcher.host` the services listen on socket files: 0.
    """
    return contextlib.nullcontext(0) if host is None else held_row(host, len(SERVERS))


if __name__ == "__main__":
    sys.exit(main())
