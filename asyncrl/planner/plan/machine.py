"""Checks of this machine: CPUs, GPUs, limits of its user, the address and the port that a run takes.

Owns how many of each a configuration asks for.
"""

from __future__ import annotations

import errno
import os
import resource
import socket
from collections.abc import Iterator

import psutil

from asyncrl.control.machine.process_limit import find_limit
from asyncrl.control.machine.resources import count_gpus
from asyncrl.core.config.tree import Config

MIN_FILES, MIN_THREADS = 256, 512
"""Of each process, and of this user beside those that he has: else Ray does not start, and says no reason."""


def count_replicas(config: Config) -> int:
    """Return the rollout replicas that a run starts with, warm spares among them."""
    return config.rollout.replicas.start + config.rollout.standby


def count_replicas_here(config: Config) -> int:
    """Return those of them that are on this machine for certain: on a cluster it gets replicas last."""
    return 0 if config.launcher.is_cluster else count_replicas(config)


def count_ranks_here(config: Config) -> int:
    """Return the learner ranks that this machine holds: on a cluster the others go to other nodes.

    All if it can hold none: then it is not the machine that is meant.
    """
    learner = config.learner
    if not config.launcher.is_cluster:
        return learner.num_ranks
    there = ((os.cpu_count() or 1, learner.cpus), (count_gpus(), learner.gpus))
    room = min((int(has // needs) for has, needs in there if needs), default=learner.num_ranks)
    return min(room, learner.num_ranks) or learner.num_ranks


def count_learner_nodes(config: Config) -> int:
    """Return how many machines like this one the learner takes; each has a publisher of a share."""
    return -(-config.learner.num_ranks // count_ranks_here(config))


def count_receivers_here(config: Config) -> int:
    """Return the most replicas that this machine may have without `asyncrl scale`, each with a receiver."""
    rollout = config.rollout
    return 0 if config.launcher.is_cluster else rollout.replicas.max + rollout.standby


def check_limits(config: Config) -> Iterator[str]:
    """Say which limit of this user is too low for any run here; services raise soft ones of files."""
    yield from _check_container()
    files, threads = (
        resource.getrlimit(resource.RLIMIT_NOFILE)[1],
        resource.getrlimit(resource.RLIMIT_NPROC)[0],
    )
    if files != resource.RLIM_INFINITY and files < MIN_FILES:
        yield f"a process may open {files} files, those of a run need {MIN_FILES}; raise 'ulimit -Hn'"
    if os.geteuid() == 0 or threads == resource.RLIM_INFINITY:  # root is not limited
        return
    num_threads = _count_threads()
    if threads - num_threads < MIN_THREADS:
        yield (
            f"this user may have {threads} processes and threads and has {num_threads}, a run needs "
            f"{MIN_THREADS} more; raise 'ulimit -u', or end some"
        )


def _check_container() -> Iterator[str]:
    """Say if the container of this process has too few processes and threads left for any run."""
    limit = find_limit()
    if limit is not None and limit.most - limit.used < MIN_THREADS:
        yield (
            f"this container may have {limit.most} processes and threads and has {limit.used}, a run needs "
            f"{MIN_THREADS} more; raise its limit ({limit.file}; docker run --pids-limit), or end some"
        )


def _count_threads() -> int:
    """Return how many threads the processes of this user have."""
    processes = (one.info for one in psutil.process_iter(["uids", "num_threads"]))
    return sum(
        one["num_threads"] or 0 for one in processes if one["uids"] and one["uids"].real == os.getuid()
    )


def check_host(config: Config) -> Iterator[str]:
    """Say if nothing can listen on `launcher.host`."""
    host = config.launcher.host
    if host is None:
        return
    with socket.socket() as probe:
        try:
            probe.bind((host, 0))
        except OSError as error:
            yield (
                f"launcher.host: nothing can listen on {host} here ({error.strerror}); "
                "name the address of an interface of this machine"
            )


def check_port(config: Config) -> Iterator[str]:
    """Say if `launcher.api_port` is taken."""
    port = config.launcher.api_port
    if port and not _is_free("127.0.0.1", port):
        yield f"launcher.api_port: port {port} is in use; choose another, or 0 for any free one"


def check_gateway_ports(config: Config) -> Iterator[str]:
    """Say which port of a replica's gateway on this machine is taken."""
    gateway, host = config.rollout.gateway, config.launcher.host or "127.0.0.1"
    if gateway is None or not gateway.port:
        return
    ports = [gateway.port + index for index in range(count_replicas_here(config))]
    taken = [port for port in ports if not _is_free(host, port)]
    if taken:
        which = f"port {taken[0]}" if len(taken) == 1 else f"ports {', '.join(map(str, taken))}"
        yield (
            f"rollout.gateway: {which} of {host}, one for each replica from {gateway.port} on, in use; "
            "choose another rollout.gateway.port, or 0 for any free ones"
        )


def _is_free(host: str, port: int) -> bool:
    """Tell whether a service could listen there; an address that is not of this machine is told elsewhere."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return error.errno == errno.EADDRNOTAVAIL
    return True
