"""Ray: its version, the ports beside it, its memory, what it and dead runs have left, and a cluster if asked.

Joins a cluster only where its address is given. Must never end or remove anything.
"""

from __future__ import annotations

import os
import shlex
import socket
from collections.abc import Iterator
from pathlib import Path

import psutil

from asyncrl.cli.doctor.files import MAX_NAMED, look_at
from asyncrl.cli.doctor.finding import Finding, judge
from asyncrl.cli.doctor.packages import (
    find_checkout,
    install_advice,
    installed_kind,
    installed_version,
    read_pins,
)
from asyncrl.control.machine.ports import PORTS, HeldPort
from asyncrl.control.machine.processes import SHM
from asyncrl.control.ray.host import address_towards
from asyncrl.control.ray.launcher import OBJECT_STORE_BYTES, base_folder, temporary_folder
from asyncrl.control.roster import RUN_VARIABLE, SERVERS
from asyncrl.core.errors import AsyncrlError
from asyncrl.core.sockets.options import interface_of

GB = 10**9
EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
WORKER_PORTS = range(10_002, 20_000)
"""Of Ray's workers, unless `ray start` is told otherwise: none of them is a server's."""
HEAD_MODULE = "asyncrl.control.ray.head"
CONNECT_S = 3.0
INVENTORY_S = 60.0
MUCH_BYTES, MAX_FILES = 10**9, 5_000


def check_version(requirements: Path | None = None) -> Iterator[Finding]:
    """Yield whether Ray is the one that asyncrl was tested with: all nodes of a cluster need the same."""
    tree, kind = find_checkout(), installed_kind()
    folder = requirements or (tree / "requirements" if tree else None)
    file, found = folder / f"{kind}.txt" if folder else None, installed_version("ray")
    tested = read_pins(file).get("ray") if file is not None and file.is_file() else None
    if found is None:
        yield Finding("ray", "fail", "missing", install_advice(kind))
        return
    told = f"{found}, as tested" if found == tested else f"{found} (tested: {tested or 'not known here'})"
    yield judge("ray", told, tested in (found, None), f"On every node: {install_advice(kind)}")


def check_ports(ephemeral: Path = EPHEMERAL) -> Iterator[Finding]:
    """Yield whether servers, and Ray's workers, find ports that outgoing connections do not take."""
    row = f"{len(SERVERS)} in a row"
    taken = sum(not _is_free(number) for number in PORTS[::100])
    advice = f"A run with launcher.host needs {row} there: end what listens in this range"
    found = f"{PORTS.start} to {PORTS.stop - 1}: {taken} of {len(PORTS[::100])} tried are taken"
    yield judge("server ports", found, taken <= len(PORTS[::100]) // 10, advice)
    low, high = map(int, ephemeral.read_text().split()) if ephemeral.exists() else (0, 0)
    is_apart = all(high < ports.start or low >= ports.stop for ports in (WORKER_PORTS, PORTS))
    advice = f"sysctl net.ipv4.ip_local_port_range='{PORTS.stop} {max(high, 60_999)}'"
    yield judge("outgoing ports", f"{low} to {high}, beside the servers' and Ray's", is_apart, advice)


def _is_free(number: int) -> bool:
    try:
        HeldPort(number=number).close()
    except OSError:
        return False
    return True


def check_object_store(shm: Path = SHM) -> Iterator[Finding]:
    """Yield whether the object store of a run's own Ray fits into shared memory."""
    stats = os.statvfs(shm)
    free = stats.f_bavail * stats.f_frsize
    found = f"{OBJECT_STORE_BYTES / GB:.2f} GB of {free / GB:.2f} GB that are free in {shm}"
    advice = (
        "Enlarge /dev/shm: Ray falls back to files in /tmp, and weights have no room. On a cluster: "
        f"ray start --object-store-memory={OBJECT_STORE_BYTES}, nothing of a run goes through it"
    )
    yield judge("object store", found, free >= 2 * OBJECT_STORE_BYTES, advice)


def check_processes() -> Iterator[Finding]:
    """Yield processes of runs without a head on this machine: on a cluster it may live on another node."""
    of_run: dict[str, list[psutil.Process]] = {}
    for process in psutil.process_iter():
        if run_id := _run_of(process):
            of_run.setdefault(run_id, []).append(process)
    dead = {run_id: found for run_id, found in of_run.items() if not any(map(_is_head, found))}
    found = f"of {len(of_run) - len(dead)} live runs"
    if dead:
        pids = " ".join(str(process.pid) for one in dead.values() for process in one)
        found += f"; without a head on this machine: {', '.join(sorted(dead))}, processes {pids}"
    advice = "If the run's head is on no other node either: 'asyncrl up' of the same run ends them"
    yield judge("processes", found, not dead, advice)


def _run_of(process: psutil.Process) -> str:
    """Return the id of the run that a process carries, empty if it has none or is not ours."""
    try:
        return process.environ().get(RUN_VARIABLE, "")
    except (psutil.Error, OSError):
        return ""


def _is_head(process: psutil.Process) -> bool:
    try:
        return HEAD_MODULE in process.cmdline()
    except (psutil.Error, OSError):
        return False


def check_sessions(folder: Path | None = None) -> Iterator[Finding]:
    """Yield the folders of Ray's sessions that have ended: Ray itself removes none.

    Those of a cluster, and those of runs whose head was killed.
    """
    of_cluster, of_runs = folder or temporary_folder(), folder or base_folder()
    named = [*of_cluster.glob("ray/session_*_*"), *of_runs.glob("asyncrl-*/ray/session_*_*")]
    sessions = [path for path in named if not path.is_symlink()]
    living = " ".join(" ".join(_command_of(process)) for process in psutil.process_iter())
    ended = sorted(path for path in sessions if path.name not in living and _is_ours(path))
    size, is_all = _measure(ended)
    more = "" if is_all else "at least "
    found = f"{len(sessions) - len(ended)} in use, {len(ended)} ended ones with {more}{size / GB:.2f} GB"
    those = " ".join(shlex.quote(str(path)) for path in ended[:MAX_NAMED])
    others = f", and {len(ended) - MAX_NAMED} more" if len(ended) > MAX_NAMED else ""
    advice = f"Remove those that ended: rm -r {those}{others}"
    yield judge("ray sessions", f"{found} in {of_cluster}", size < MUCH_BYTES and is_all, advice)


def _is_ours(path: Path) -> bool:
    found = look_at(path)
    return found is not None and found.st_uid == os.getuid()


def _command_of(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except (psutil.Error, OSError):
        return []


def _measure(folders: list[Path]) -> tuple[int, bool]:
    """Return the bytes of all files below, and whether these were all: of very many the first are counted."""
    size = num_files = 0
    for folder in folders:
        for where, _, names in os.walk(folder):
            num_files += len(names)
            found = (look_at(os.path.join(where, name)) for name in names)
            size += sum(one.st_size for one in found if one is not None)
            if num_files > MAX_FILES:
                return size, False
    return size, True


def check_cluster(address: str) -> Iterator[Finding]:
    """Yield whether the Ray cluster at `address`, HOST:PORT, can be joined and its nodes are alike."""
    what, (host, _, port) = f"cluster {address}", address.rpartition(":")
    try:
        if int(port) >= 1 << 16:  # of which the lower half would be called
            raise ValueError(f"{port} is no port")
        socket.create_connection((host, int(port)), timeout=CONNECT_S).close()
        own = address_towards(host)
    except (OSError, ValueError, OverflowError) as error:
        advice = (
            "Is its head up (ray start --head --port=PORT), and does a firewall let this machine through?"
        )
        yield Finding(what, "fail", f"nothing answers there: {error}", advice)
        return
    told = f"answers; it sees this machine as {own} ({interface_of(own) or 'no interface'})"
    yield Finding(what, "ok", f"{told}, where torch.distributed talks")
    yield from _check_nodes(address)


def _check_nodes(address: str) -> Iterator[Finding]:
    import ray.exceptions

    from asyncrl.control.ray import membership
    from asyncrl.control.ray.inventory import find_differences, take_inventory
    from asyncrl.control.ray.launcher import shut_down

    try:
        membership.join(address, "asyncrl-doctor")
        nodes = {node.id: node for node in membership.living_nodes()}
        answers = membership.ask_nodes(nodes, take_inventory, (), deadline_s=INVENTORY_S)
        ours = answers.pop(membership.home_node(), "is not among the living nodes")
    except (AsyncrlError, ray.exceptions.RayError, RuntimeError, ValueError) as error:
        why = " ".join(str(error.__cause__ or error).split())
        yield Finding("joining", "fail", why, getattr(error, "hint", "") or "See the log of Ray on this node")
        return
    finally:
        shut_down()
    sizes = (f"{node.address} {node.cpus:g} CPUs {node.gpus:g} GPUs" for node in nodes.values())
    yield Finding("nodes", "ok", "; ".join(sizes))
    if isinstance(ours, str):
        yield Finding("this node", "fail", f"it {ours}", "Start its Ray in the environment of this Python")
        return
    others = {nodes[node].address: found for node, found in answers.items()}
    problems = list(find_differences(ours, others, {}))
    told = "; ".join(problems) or "the same packages and the same asyncrl on every node"
    yield judge("packages of nodes", told, not problems, "Install the same on every node", "fail")
