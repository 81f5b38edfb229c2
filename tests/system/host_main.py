"""`python host_main.py RUN_DIR RUN_ID SOCKETS NAME RENDEZVOUS` hosts one service here, without Ray."""

from __future__ import annotations

import importlib
import logging
import signal
import sys
import threading
from pathlib import Path

from asyncrl.config.load import load_config
from asyncrl.control.roster import Roster


def main() -> None:
    run_dir, run_id, sockets, name = Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), sys.argv[4]
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    rendezvous = sys.argv[5]
    spec = Roster(load_config(run_dir / "resolved.yaml"), run_dir, run_id, sockets, rendezvous).spec(name)
    module, _, function = spec.factory.partition(":")
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    service = getattr(importlib.import_module(module), function)(spec.context)
    thread = threading.Thread(target=service.run, args=(stop,), daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(0.1)


if __name__ == "__main__":
    main()
