"""The head process of a run: owns its local Ray, starts the supervisor, cleans up after both.

`python -m asyncrl.control.launch.head RUN_DIR` is started by `asyncrl up` in a session of its own, so that
the terminal only watches. Everything that it starts dies with it or is ended by pid.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from asyncrl.config.load import load_config
from asyncrl.config.tree import Config
from asyncrl.control import plan
from asyncrl.control.launch import ray_launcher
from asyncrl.control.launch.ports import HeldPort, held_row
from asyncrl.control.launch.processes import end_leftovers, remove_leftovers
from asyncrl.control.launch.spec import ServiceSpec
from asyncrl.control.record.rundir import RunDir, read_json, write_json
from asyncrl.control.roster import SERVERS
from asyncrl.keys import RunKeys, make_run_keys, write_client_keys
from asyncrl.service import ServiceContext

POLL_S = 0.2
SUPERVISOR = "supervisor.0"
EXIT_TERMINATED = 143


def main() -> int:
    """Run the head to the end of the run; returns the process's exit code."""
    run_dir = RunDir(Path(sys.argv[1]))
    live = read_json(run_dir.live)
    assert live is not None, "asyncrl up writes run.json before it starts the head"
    live["pid"] = os.getpid()
    write_json(run_dir.live, live, mode=0o600)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(EXIT_TERMINATED))
    socket_dir = Path(live["sockets"])
    socket_dir.mkdir(mode=0o700)
    try:
        with HeldPort() as rendezvous:
            config = load_config(run_dir.resolved)
            with _held_ports(config.launcher.host) as first_port:
                addresses = {"sockets": str(socket_dir), "first_port": str(first_port)}
                _run(run_dir, live, config, addresses, rendezvous.address)
    except Exception as error:  # process boundary: whoever watches must learn how it ended
        _write_failure(run_dir, f"{type(error).__name__}: {error}", "head.0")
        raise
    finally:
        run_dir.keys.unlink(missing_ok=True)
        ray_launcher.shut_down()
        end_leftovers(live["run_id"])
        remove_leftovers(live["run_id"], socket_dir)
    return 0


def _run(
    run_dir: RunDir, live: dict[str, Any], config: Config, addresses: dict[str, str], rendezvous: str
) -> None:
    ray_launcher.start_local(num_cpus=os.cpu_count() or 1, num_gpus=plan.count_gpus())
    context = ServiceContext(
        config=config,
        name=SUPERVISOR,
        run_dir=run_dir.path,
        run_id=live["run_id"],
        addresses=addresses,
        rendezvous=rendezvous,
        keys=_make_keys(config, run_dir),
    )
    ray = ray_launcher.RayLauncher(namespace=config.run.name)
    factory = "asyncrl.control.composition:build"
    ray.start(ServiceSpec(factory, context, str(run_dir.log(SUPERVISOR))))
    _watch(run_dir, ray)


def _watch(run_dir: RunDir, ray: ray_launcher.RayLauncher) -> None:
    while True:
        status = ray.statuses([SUPERVISOR], deadline_s=30.0)[SUPERVISOR]
        if status["state"] in ("ended", "finished", "stopped"):
            return
        if status["state"] in ("failed", "gone"):
            if not run_dir.outcome.exists():
                _write_failure(run_dir, f"{SUPERVISOR} {status['state']}: {status.get('error')}", SUPERVISOR)
            return
        time.sleep(POLL_S)


def _write_failure(run_dir: RunDir, error: str, service: str) -> None:
    outcome = {"state": "failed", "error": error, "service": service, "tail": run_dir.tail(service)}
    write_json(run_dir.outcome, outcome)


def _make_keys(config: Config, run_dir: RunDir) -> RunKeys | None:
    """Return the keys of this start, None if its sockets are plain; write down what a client needs."""
    run_dir.keys.unlink(missing_ok=True)
    if not config.launcher.has_curve:
        return None
    keys = make_run_keys()
    write_client_keys(run_dir.keys, keys.client)
    return keys


def _held_ports(host: str | None) -> contextlib.AbstractContextManager[int]:
    """Hold a port for every server that there can be, also those that are started later; yield the first.

    Without `launcher.host` the services listen on socket files: 0.
    """
    return contextlib.nullcontext(0) if host is None else held_row(host, len(SERVERS))


if __name__ == "__main__":
    sys.exit(main())
