"""Hosts one service in a process that was forked with its imports done, without Ray."""

from __future__ import annotations

import importlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

import torch

from asyncrl.control.roster import Roster
from asyncrl.core.config.load import load_config
from asyncrl.core.runtime.threads import ThreadEvent

NODE = "TEST_NODE"
"""Mark of the node that a receiver takes itself to be on: of another than the publisher's it gets bytes."""


def host(run_dir: Path, name: str, environment: Mapping[str, str], *places: str) -> None:
    """Run the service `name` to its end.

    Args:
        environment: Variables to set; a fault, for example.
        places: Of the run: its id, the folder of its sockets, its rendezvous, its secret.
    """
    log = os.open(run_dir / "logs" / f"{name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.environ.update(environment)
    torch.set_num_threads(1)
    run_id, sockets, rendezvous, secret = places
    form = "%(asctime)s %(levelname)s %(name)s: %(message)s"
    logging.basicConfig(level=logging.INFO, format=form, force=True)
    config = load_config(run_dir / "resolved.yaml")
    roster = Roster(config, run_dir, run_id, Path(sockets), rendezvous, secret=secret)
    spec = roster.spec(name)
    module, _, function = spec.factory.partition(":")
    stop = ThreadEvent()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    build = getattr(importlib.import_module(module), function)
    service = build(spec.context, node=environment[NODE]) if NODE in environment else build(spec.context)
    failures: list[BaseException] = []

    def run() -> None:
        try:
            service.run(stop)
        except BaseException as error:  # process boundary, SystemExit too: the exit code tells
            failures.append(error)
            logging.exception("%s failed", name)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(0.1)
    sys.exit(1 if failures else 0)
