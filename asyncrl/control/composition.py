"""Builds the supervisor in its own process."""

from __future__ import annotations

import psutil

from asyncrl.control.api.server import ControlApi
from asyncrl.control.launch.ray_launcher import RayLauncher
from asyncrl.control.record.recorder import Recorder
from asyncrl.control.record.rundir import RunDir, read_json, write_json
from asyncrl.control.roster import Roster
from asyncrl.control.supervisor import Supervisor
from asyncrl.service import ServiceContext


def build(context: ServiceContext) -> Supervisor:
    """Build the supervisor, open its API and say in `run.json` where it is."""
    from pathlib import Path

    run_dir = RunDir(context.run_dir)
    config = context.config
    roster = Roster(
        config=config,
        run_dir=context.run_dir,
        run_id=context.run_id,
        socket_dir=Path(context.addresses["sockets"]),
        rendezvous=context.rendezvous,
        first_port=int(context.addresses["first_port"]),
        keys=context.keys,
        interface=_interface_of(config.launcher.host or "127.0.0.1"),
    )
    tensorboard = context.run_dir / "tensorboard" if config.metrics.tensorboard else None
    launcher = RayLauncher(namespace=config.run.name)
    supervisor = Supervisor(roster, launcher, Recorder(run_dir.metrics, tensorboard))
    live = read_json(run_dir.live) or {}
    api = ControlApi(
        port=config.launcher.api_port,
        key=live["key"],
        routes={
            "GET /status": lambda _: supervisor.status(),
            "GET /weights": lambda _: supervisor.weights(),
            "POST /scale": lambda body: supervisor.command("scale", body),
            "POST /tighten": lambda body: supervisor.command("tighten", body),
            "POST /stop": lambda body: supervisor.command("stop", body),
        },
    )
    write_json(run_dir.live, {**live, "url": api.url}, mode=0o600)
    return supervisor


def _interface_of(host: str) -> str:
    """Return the name of this machine's interface with that address, empty if there is none."""
    found = (
        name for name, addresses in psutil.net_if_addrs().items() for one in addresses if one.address == host
    )
    return next(found, "")
