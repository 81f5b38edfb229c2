"""Peers of a replica: vLLM's executors on its further nodes, each in a Ray actor of its own.

vLLM's multiprocessing executor spans nodes: that of the first node has the engine core, each other one only
its node's workers. Owns those others, and the port where all workers meet. Invariants: a peer ends with the
process that has started it, whose actor it belongs to; the loss of one is told until all have ended.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from asyncrl.core.files.log_records import log_to_stderr
from asyncrl.core.files.private import keep_others_out, make_private
from asyncrl.core.service import INTERFACE_VARIABLES
from asyncrl.core.sockets.options import interface_of
from rollout_service.engine.vllm.environment import prepare_environment

log = logging.getLogger(__name__)

STANDARD_ERROR = 2
TELL_EVERY_S = 0.5


class Peers:
    """See the module. Called in the process of a Ray actor, or of a driver.

    Args:
        nodes: Ray's ids of the further nodes; the n-th has the workers of rank n + 1.
        cpus, gpus: That Ray reserves on each.
    """

    def __init__(self, nodes: Sequence[str], cpus: float, gpus: float) -> None:
        self._nodes, self._cpus, self._gpus = nodes, cpus, gpus
        self._actors: list[object] = []
        self._port: socket.socket | None = None
        self._is_closed = threading.Event()
        self.loss = ""
        """What ended a peer; empty while all live."""

    def start(self, arguments: Mapping[str, object], on_loss: Callable[[], None]) -> dict[str, object]:
        """Begin to start the peers; does not wait for them.

        Args:
            arguments: Of the engine, as on every node.
            on_loss: Called by another thread once one has ended, and again until all are: the engine's part
                here may be about to start.

        Returns:
            The arguments of the engine on this node.
        """
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        address = ray.util.get_node_ip_address()
        settle(address)
        self._port = _hold_port(address)
        shared = {
            **arguments,
            "nnodes": 1 + len(self._nodes),
            "master_addr": address,
            "master_port": self._port.getsockname()[1],
        }
        running = {}
        for rank, node in enumerate(self._nodes, start=1):
            remote = ray.remote(Peer).options(
                num_cpus=self._cpus,
                num_gpus=self._gpus,
                max_restarts=0,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
            )
            actor = remote.remote(os.environ.get("TMPDIR", ""), _log_path(rank))
            self._actors.append(actor)
            running[actor.run.remote({**shared, "node_rank": rank}, self._gpus > 0)] = rank
        threading.Thread(target=self._watch, args=(running, on_loss), name="peers", daemon=True).start()
        return {**shared, "node_rank": 0}

    def meet(self) -> None:
        """Let the port go: the workers have met there."""
        if self._port is not None:
            self._port.close()

    def close(self) -> None:
        """End the peers."""
        self._is_closed.set()
        self.meet()
        if self._actors:
            import ray

            for actor in self._actors:
                ray.kill(actor)
            self._actors = []

    def _watch(self, running: dict[object, int], on_loss: Callable[[], None]) -> None:
        import ray
        import ray.exceptions

        (ended,), _ = ray.wait(list(running), num_returns=1, timeout=None)  # it ends with the peers, or this
        if self._is_closed.is_set():
            return
        try:
            why = str(ray.get(ended))
        except ray.exceptions.RayError as error:
            said = [line for line in str(error).splitlines() if line.strip()]
            why = said[-1] if isinstance(error, ray.exceptions.RayTaskError) else said[0]
        self.loss = f"the workers on node {running[ended] + 1} of the replica are gone: {why}"
        log.error("%s", self.loss)
        while not self._is_closed.wait(TELL_EVERY_S):
            on_loss()


class Peer:
    """Actor that hosts the executor of one further node.

    Args:
        folder: For temporary files, private as the first node's; empty leaves them where they are.
        log_path: For all output of the process; empty leaves it to Ray.
    """

    def __init__(self, folder: str, log_path: str) -> None:
        keep_others_out()
        if log_path:
            _redirect_output(Path(log_path))
        if folder:
            make_private(Path(folder).parent)
            make_private(Path(folder))
            os.environ["TMPDIR"] = tempfile.tempdir = folder

    def run(self, arguments: dict[str, object], has_gpu: bool) -> str:
        """Run the node's workers until one ends; return what has ended them."""
        import ray

        settle(ray.util.get_node_ip_address())
        prepare_environment(has_gpu=has_gpu)
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.executor.multiproc_executor import MultiprocExecutor

        config = AsyncEngineArgs(**arguments).create_engine_config(headless=True)
        executor = MultiprocExecutor(config, monitor_workers=False)
        executor.start_worker_monitor(inline=True)
        return "a worker ended"


def settle(address: str) -> None:
    """Have the libraries of this process, and of its children, talk on the interface with this address."""
    os.environ["VLLM_HOST_IP"] = address
    if interface := interface_of(address):
        os.environ.update(dict.fromkeys(INTERFACE_VARIABLES, interface))


def _hold_port(address: str) -> socket.socket:
    """Return a socket that holds a free port of `address` for the one who listens there with SO_REUSEADDR."""
    held = socket.socket()
    held.bind((address, 0))
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return held


def _log_path(rank: int) -> str:
    """Return the log of a peer, beside this process's own; empty if that is no file of a run."""
    with contextlib.suppress(OSError):
        own = Path(os.readlink(f"/proc/self/fd/{STANDARD_ERROR}"))
        if own.suffix == ".log":
            return str(own.with_suffix(f".node{rank + 1}.log"))
    return ""


def _redirect_output(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for descriptor, stream in ((1, sys.stdout), (2, sys.stderr)):
        stream.flush()
        os.dup2(target, descriptor)
    os.close(target)
    log_to_stderr()
