"""The head process of a run: owns its local Ray, starts the supervisor, cleans up after both.

`python -m asyncrl.control.launch.head RUN_DIR` is started by `asyncrl up` in a session of its own, so that
the terminal only watches. Everything that it starts dies with it or is ended by pid.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

from asyncrl.config.load import load_config
from asyncrl.config.tree import Config
from asyncrl.control import plan
from asyncrl.control.launch import ray_launcher
from asyncrl.control.launch.ports import HeldPort
from asyncrl.control.launch.processes import end_leftovers, remove_leftovers
from asyncrl.control.launch.spec import ServiceSpec
from asyncrl.control.record.rundir import RunDir, read_json, write_json
from asyncrl.control.roster import SERVERS
from asyncrl.errors import AsyncrlError
from asyncrl.keys import RunKeys, make_run_keys, write_client_keys
from asyncrl.service import ServiceContext

POLL_S = 0.2
SUPERVISOR = "supervisor.0"
EXIT_TERMINATED = 143
PORTS = range(20_000, 32_000)
PORT_TRIES = 50


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
            _run(run_dir, live, socket_dir, rendezvous.address)
    except Exception as error:  # process boundary: whoever watches must learn how it ended
        _write_failure(run_dir, f"{type(error).__name__}: {error}", "head.0")
        raise
    finally:
        run_dir.keys.unlink(missing_ok=True)
        ray_launcher.shut_down()
        end_leftovers(live["run_id"])
        remove_leftovers(live["run_id"], socket_dir)
    return 0


def _run(run_dir: RunDir, live: dict[str, Any], socket_dir: Path, rendezvous: str) -> None:
    config = load_config(run_dir.resolved)
    ray_launcher.start_local(num_cpus=os.cpu_count() or 1, num_gpus=plan.count_gpus())
    context = ServiceContext(
        config=config,
        name=SUPERVISOR,
        run_dir=run_dir.path,
        run_id=live["run_id"],
        addresses={"sockets": str(socket_dir), "first_port": str(_first_port(config.launcher.host))},
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


def _first_port(host: str | None) -> int:
    """Return the first of as many free ports in a row as there can be servers, 0 if none are needed.

    Below the range from which systems take ports for outgoing connections, and above Ray's.
    """
    if host is None:
        return 0
    for _ in range(PORT_TRIES):
        first = random.randrange(PORTS.start, PORTS.stop - len(SERVERS))
        if all(_is_free(host, port) for port in range(first, first + len(SERVERS))):
            return first
    raise AsyncrlError(
        f"launcher.host: {host} has no {len(SERVERS)} free ports in a row from {PORTS.start} to {PORTS.stop}",
        hint="Name an address of this machine",
    )


def _is_free(host: str, port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
        return True


if __name__ == "__main__":
    sys.exit(main())
