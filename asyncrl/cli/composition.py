"""Composition root of the supervisor's process."""

from __future__ import annotations

import msgspec

from asyncrl.control.api.server import ControlApi
from asyncrl.control.ray.bootstrap import make_launcher
from asyncrl.control.record.live import read_live, write_live
from asyncrl.control.record.rundir import RunDir
from asyncrl.control.record.sinks.opening import open_sinks
from asyncrl.control.roster import Roster
from asyncrl.control.rows.recorder import Recorder
from asyncrl.control.snapshot import values_of
from asyncrl.control.supervisor import Supervisor
from asyncrl.core.service import ServiceContext
from asyncrl.core.sockets.options import interface_of
from asyncrl.page.http.routes import page_routes


def build(context: ServiceContext) -> Supervisor:
    """Build the supervisor, open its API and say in `run.json` where it is."""
    assert context.sockets is not None, "the head has made them a folder"
    run_dir = RunDir(context.run_dir)
    config = context.config
    roster = Roster(
        config=config,
        run_dir=context.run_dir,
        run_id=context.run_id,
        socket_dir=context.sockets,
        rendezvous=context.rendezvous,
        first_port=int(context.addresses["first_port"]),
        keys=context.keys,
        interface=interface_of(config.launcher.host or "127.0.0.1"),
        secret=context.secret,
        num_publishers=context.world_size,
    )
    launcher = make_launcher(config, context.run_id)
    recorder = Recorder(run_dir.metrics, context.runtime, open_sinks(config, run_dir))
    supervisor = Supervisor(roster, launcher, recorder, context.runtime)
    live = read_live(run_dir.live)
    assert live is not None, "the head has written run.json"
    api = ControlApi(
        port=int(context.addresses["api_port"]),
        key=live.key,
        routes={
            "GET /status": lambda _: values_of(supervisor.snapshot()),
            "GET /weights": lambda _: msgspec.to_builtins(supervisor.weights()),
            **page_routes(supervisor.snapshot, config, context.run_dir),
            **supervisor.operations.routes(),
        },
    )
    supervisor.see_off = api.await_readers
    write_live(run_dir.live, msgspec.structs.replace(live, url=api.url))
    return supervisor
