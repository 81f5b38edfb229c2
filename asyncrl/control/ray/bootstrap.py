"""Bootstrap of the Ray of a run: this machine's own, or an existing cluster, which is watched.

Ray gives a driver up 60 s after its control store was last heard, by an exit from C++ that runs no Python:
`watching` notices before. Invariant: one failed connection is no death; `LOST_AFTER` of them in a row are.
"""

from __future__ import annotations

import errno
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path

import xxhash

from asyncrl.control.ray import membership
from asyncrl.control.ray.cluster_launcher import ClusterLauncher
from asyncrl.control.ray.launcher import Launcher, RayLauncher, shut_down
from asyncrl.control.ray.placement import Placement
from asyncrl.control.record.live import Start
from asyncrl.core.config.tree import Config
from asyncrl.core.errors import ConfigError


def namespace_of(config: Config) -> str:
    """Return the run's namespace: in a cluster another user's run may have the same name.

    The folder's path is part of it, which is the same at a resume.
    """
    if not config.launcher.is_cluster:
        return config.run.name
    folder = Path(config.run.dir).absolute() / config.run.name
    return f"{config.run.name}-{xxhash.xxh3_64_hexdigest(str(folder).encode())[:8]}"


def make_launcher(config: Config, run_id: str) -> Launcher:
    """Return the launcher of a process that is connected to Ray."""
    launcher = RayLauncher(namespace_of(config))
    if not config.launcher.is_cluster:
        return launcher
    placement = Placement(membership.home_node(), config)
    clean = partial(membership.clean_service, run_id)
    return ClusterLauncher(launcher, placement, membership.living_nodes, clean)


def refuse_running(config: Config, starts: Sequence[Start]) -> None:
    """Join the cluster, ask its nodes for the heads of some starts of the run, and leave it.

    Raises:
        ConfigError: There is no such cluster, or one of the heads runs on a node.
    """
    membership.join(config.launcher.ray, namespace_of(config))
    try:
        membership.refuse_running(starts)
    finally:
        shut_down()


def enter(config: Config, earlier: Sequence[Start], tell: Callable[[str], None]) -> Config:
    """Join the cluster, end what earlier starts of the run left there, and check its nodes.

    Args:
        earlier: Lives of which a node may still hold something: their head was killed, or the node was away.
        tell: Told of each node that something was left on, and of each that could not be asked.

    Returns:
        `config` with this node's address as `launcher.host` where it names none.

    Raises:
        ConfigError: There is no such cluster, an earlier start runs on one of its nodes, or a node lacks
            something; nothing was started or ended.
    """
    membership.join(config.launcher.ray, namespace_of(config))
    try:
        membership.refuse_running(earlier)
    except ConfigError:
        shut_down()  # a head that leaves the cluster clears the namespace, which is also that run's
        raise
    for told in membership.sweep(namespace_of(config), earlier):
        tell(told)
    membership.check_nodes(config)
    launcher = config.launcher
    host = launcher.host or membership.own_address()
    return config.model_copy(update={"launcher": launcher.model_copy(update={"host": host})})


def count_publishers(config: Config) -> int:
    """Return how many nodes the learner's ranks begin on, each with a publisher; 1 if they have no room."""
    if config.launcher.is_cluster:
        placement, nodes = Placement(membership.home_node(), config), membership.living_nodes()
        with suppress(ConfigError):
            return len(
                {placement.choose(nodes, f"learner.{rank}") for rank in range(config.learner.num_ranks)}
            )
    return 1


def watching_cluster(config: Config, on_death: Callable[[str], None]) -> AbstractContextManager[None]:
    """Call `on_death` with the name of Ray's process that is gone, where Ray is a cluster's."""
    if not config.launcher.is_cluster:
        return nullcontext()
    store = partial(is_open, membership.control_store())
    return watching(store, lambda: on_death("gcs_server of the cluster"))


def leave(config: Config, run_id: str, sockets: Path) -> None:
    """End the run's remaining processes on every node."""
    membership.sweep(namespace_of(config), [Start(run_id, str(sockets))])


PULSE_S = 1.0
LOST_AFTER = 20
END_S = 10.0
"""Time for the watching thread to end; it is a daemon, so a hanging one blocks no exit."""
OUT_OF_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)
"""Errors of this process or machine, which do not show whether Ray listens."""


@contextmanager
def watching(
    listens: Callable[[], bool], on_death: Callable[[], None], pulse_s: float = PULSE_S
) -> Iterator[None]:
    """Call `on_death` once nothing has listened for `LOST_AFTER` pulses."""
    ended = threading.Event()
    arguments = (listens, on_death, pulse_s, ended)
    thread = threading.Thread(target=_watch, args=arguments, name="cluster-watch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(END_S)


def _watch(
    listens: Callable[[], bool], on_death: Callable[[], None], pulse_s: float, ended: threading.Event
) -> None:
    num_silent = 0
    while not ended.wait(pulse_s):
        num_silent = 0 if listens() else num_silent + 1
        if num_silent >= LOST_AFTER:
            on_death()
            return


def is_open(address: str) -> bool:
    """Tell whether something listens at `address`, HOST:PORT."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=PULSE_S).close()
        return True
    except OSError as error:
        return error.errno in OUT_OF_DESCRIPTORS
