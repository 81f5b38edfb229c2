"""Ray's side of a cluster: joining it, who its nodes are, work on each of them, and leaving it clean.

Owns no service. Ray is trusted here: its ports belong on a private interface. Invariant: after
`sweep` no process, socket or shared memory of the run is left on any node that answers.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import socket
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from asyncrl.control.machine.processes import (
    end_leftovers,
    end_service,
    is_alive,
    remove_leftovers,
    remove_segments,
)
from asyncrl.control.ray.inventory import Inventory, find_differences, needed_paths, take_inventory
from asyncrl.control.ray.launcher import lines_of, set_up_ray
from asyncrl.control.ray.placement import Node
from asyncrl.control.record.live import Start
from asyncrl.core.config.tree import Config
from asyncrl.core.errors import ConfigError

T = TypeVar("T")

log = logging.getLogger(__name__)

NEEDS_TOKEN = "Set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH as for its 'ray start', see docs/cluster.md"
CHECK_DEADLINE_S = 120.0
"""A node's first task starts a worker, which imports torch's metadata and xxhash: about 3 s when idle."""
SWEEP_DEADLINE_S = 30.0
ANSWER_S, MAX_PROBES = 0.5, 64
CLEAN_DEADLINE_S = 15.0


def join(address: str, namespace: str) -> None:
    """Join the cluster at `address` as the driver of a run; this machine must be one of its nodes.

    Raises:
        ConfigError: There is none, this machine is no node of it, or it lacks the cluster's token.
    """
    import ray
    import ray.exceptions

    set_up_ray()
    host, _, port = address.rpartition(":")
    try:
        if host and _refuses(host, int(port)):  # Ray would try for a quarter of an hour
            raise ConnectionRefusedError("nothing listens there")
        ray.init(address=address, namespace=namespace, log_to_driver=False, logging_level="ERROR")
    except (OSError, RuntimeError, ValueError, ray.exceptions.AuthenticationError) as error:
        is_refused = "AuthenticationError" in f"{error!r} {error.__cause__}"  # of which it holds the text
        raise ConfigError(
            f"launcher.ray: this machine cannot join the Ray cluster at {address}: {lines_of(error)[0]}",
            hint=NEEDS_TOKEN if is_refused else "Start its node with: ray start --address=HOST:PORT",
        ) from error


def home_node() -> str:
    """Return the id of the node of this process."""
    import ray

    return str(ray.get_runtime_context().get_node_id())


def control_store() -> str:
    """Return the HOST:PORT of Ray's control store, without which there is no cluster."""
    import ray

    return str(ray.get_runtime_context().gcs_address)


def own_address() -> str:
    """Return the address by which the cluster knows this node."""
    home = home_node()
    return next(node.address for node in living_nodes() if node.id == home)


def living_nodes() -> list[Node]:
    """Return the cluster's nodes that are alive, by address."""
    import ray

    alive = [node for node in ray.nodes() if node["Alive"]]
    with ThreadPoolExecutor(MAX_PROBES) as pool:  # a silent one keeps no other waiting
        refusing = pool.map(lambda one: _refuses(one["NodeManagerAddress"], one["NodeManagerPort"]), alive)
    found = [
        Node(
            id=str(node["NodeID"]),
            address=str(node["NodeManagerAddress"]),
            cpus=float(node["Resources"].get("CPU", 0.0)),
            gpus=float(node["Resources"].get("GPU", 0.0)),
        )
        for node, refuses in zip(alive, refusing, strict=True)
        if not refuses
    ]
    return sorted(found, key=lambda node: (node.address, node.id))


def _refuses(host: str, port: int) -> bool:
    """Tell whether a host refuses the connection, long before Ray notices; a silent host is left to Ray."""
    with socket.socket() as probe:
        probe.settimeout(ANSWER_S)
        return probe.connect_ex((host, port)) == errno.ECONNREFUSED


def check_nodes(config: Config) -> None:
    """Compare packages, models and data of every node with those of this one.

    Raises:
        ConfigError: Nodes differ; the message has a line for each difference.
    """
    keys, home = needed_paths(config), home_node()
    names = {node.id: f"{node.address} ({node.id[:6]})" for node in living_nodes()}
    found = ask_nodes(names, take_inventory, tuple(keys.values()), deadline_s=CHECK_DEADLINE_S)
    ours = found.pop(home)
    if isinstance(ours, str):
        raise ConfigError(f"launcher.ray: this node cannot run a task: {ours}")
    others: dict[str, Inventory | str] = {names[node]: one for node, one in found.items()}
    if problems := list(find_differences(ours, others, keys)):
        raise ConfigError("\n".join(problems), hint="Every node needs the same packages, model and data")
    log.info("%d nodes have the same packages, model and data", 1 + len(others))


def ask_nodes(
    nodes: Iterable[str], function: Callable[..., T], *args: object, deadline_s: float
) -> dict[str, T | str]:
    """Run `function` on some nodes; return what it returned by node id, or a text that says what failed."""
    import ray
    import ray.exceptions
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    task, pending = ray.remote(function), {}
    for node in nodes:
        there = NodeAffinitySchedulingStrategy(node, soft=False)
        placed = task.options(num_cpus=0, max_retries=0, scheduling_strategy=there)
        pending[placed.remote(*args)] = node
    done, late = ray.wait(list(pending), num_returns=len(pending), timeout=deadline_s)
    answers: dict[str, T | str] = {pending[one]: f"gave no answer within {deadline_s:g} s" for one in late}
    for reference in done:
        try:
            answers[pending[reference]] = ray.get(reference)
        except ray.exceptions.RayError as error:
            answers[pending[reference]] = f"cannot run asyncrl: {lines_of(error)[-1]}"
    return answers


def clear(namespace: str) -> list[str]:
    """End the services that an earlier start of the run left in the cluster; return their names."""
    import ray
    import ray.util

    left = [entry["name"] for entry in ray.util.list_named_actors(True) if entry["namespace"] == namespace]
    for name in left:
        with contextlib.suppress(ValueError):  # it ended meanwhile
            ray.kill(ray.get_actor(name, namespace=namespace))
    return left


def refuse_running(starts: Sequence[Start]) -> None:
    """Check that no node has the head of one of a run's earlier starts.

    Only its own machine sees that it runs, and a folder that nodes share may not lock.

    Raises:
        ConfigError: One has; a sweep would end that run.
    """
    if not any(start.pid for start in starts):
        return
    names = {node.id: node.address for node in living_nodes()}
    answers = ask_nodes(names, running_heads, tuple(starts), deadline_s=SWEEP_DEADLINE_S)
    for node, found in answers.items():
        if isinstance(found, list) and found:
            raise ConfigError(
                f"run.name: the run is live on node {names[node]} (pid {found[0]})",
                hint=f"End it with 'kill {found[0]}' on that node, or choose another run.name",
            )


def running_heads(starts: Sequence[Start]) -> list[int]:
    """Return the pids of those heads of a run's starts that run on this node."""
    return [start.pid for start in starts if start.pid and is_alive(start.pid, start.run_id)]


def sweep(namespace: str, starts: Sequence[Start]) -> list[str]:
    """End what is left of a run's starts on every node.

    Returns:
        A sentence for each node that something was left on, and for each that did not answer.
    """
    import ray

    if not ray.is_initialized():  # it was never joined, and asking would start a Ray here
        return []
    clear(namespace)
    if not starts:
        return []
    names = {node.id: node.address for node in living_nodes()}
    answers = ask_nodes(names, sweep_node, tuple(starts), deadline_s=SWEEP_DEADLINE_S)
    told = [_describe_sweep(names[node], answer) for node, answer in answers.items()]
    for sentence in filter(None, told):
        log.warning("%s", sentence)
    return [*filter(None, told)]


def _describe_sweep(address: str, answer: tuple[int, int] | str) -> str:
    """Return the sentence for a node's answer, empty if nothing was left there."""
    if isinstance(answer, str):
        return f"node {address} was not swept: it {answer}"
    processes, segments = answer
    if not any(answer):
        return ""
    return (
        f"on node {address}: ended {processes} processes that the run had left, "
        f"removed {segments} shared-memory segments"
    )


def clean_service(run_id: str, node: str, name: str) -> None:
    """End what a killed service has left on `node`; a node that is dead has nothing left."""
    if not any(living.id == node for living in living_nodes()):
        return
    answers = ask_nodes([node], clean_node, run_id, name, deadline_s=CLEAN_DEADLINE_S)
    if answers[node]:
        log.warning("%s was not cleaned up on node %s: %s", name, node, answers[node])


def clean_node(run_id: str, name: str) -> list[int]:
    """End a service's processes on this node and remove its shared memory; return who is still alive."""
    living = end_service(run_id, name)
    remove_segments(run_id, name)
    return living


def sweep_node(starts: Sequence[Start]) -> tuple[int, int]:
    """End the processes of a run's starts on this node, and remove their sockets and shared memory.

    Nothing else is touched: each process carries the id of its start, and so does each name.

    Returns:
        How many processes were ended, and how many segments removed.
    """
    ended = segments = 0
    for start in starts:
        ended += end_leftovers(start.run_id)
        segments += len(remove_leftovers(start.run_id, Path(start.sockets)))
    return ended, segments
