"""A Ray node on this machine in processes of its own, to be killed by pid; what a run says of its nodes.

It has a `/dev/shm` and a run folder of its own, in a mount namespace, where this user may make one; the
network between nodes and the disk below are the same.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil

from asyncrl.core.runtime.faults import VARIABLE
from tests.system.parts.up_run import UpRun, asyncrl_command, leftovers

MEMORY_BYTES = 80 << 20
OWN_MOUNTS = 'mount -t tmpfs tmpfs /dev/shm && mount -t tmpfs tmpfs "$1" && shift && exec "$@"'
CAN_MOUNT = subprocess.run(["unshare", "-m", "true"], check=False).returncode == 0


class RayNode:
    """A Ray node with one CPU, at `ip`; the folder `hidden` is its own, a fault is for its services."""

    def __init__(self, address: str, ip: str, hidden: Path, fault: str = "") -> None:
        start = ("start", f"--address={address}", f"--node-ip-address={ip}", "--num-cpus=1", "--block")
        command = [sys.executable, "-m", "ray.scripts.scripts", *start]
        command += [f"--object-store-memory={MEMORY_BYTES}"]
        if CAN_MOUNT:
            command = ["unshare", "-m", "sh", "-c", OWN_MOUNTS, "sh", str(hidden), *command]
        environment = os.environ | ({VARIABLE: fault} if fault else {})
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self._process = subprocess.Popen(command, env=environment, **quiet)  # type: ignore[call-overload]

    def kill_raylet(self) -> None:
        """End its raylet at once, as a machine that loses power does."""
        started = psutil.Process(self._process.pid).children(recursive=True)
        (raylet,) = (one for one in started if one.name() == "raylet")
        os.kill(raylet.pid, signal.SIGKILL)

    def end(self) -> None:
        """End what is left of it."""
        left = [self._process.pid]
        if self._process.poll() is None:
            left += [one.pid for one in psutil.Process(self._process.pid).children(recursive=True)]
        for pid in left:
            with_pid = psutil.Process(pid) if psutil.pid_exists(pid) else None
            if with_pid is not None:
                with_pid.kill()
        self._process.wait(30.0)

    @staticmethod
    def joined(address: str, ip: str, hidden: Path, count: int, fault: str = "") -> RayNode:
        """Return a node that has joined the cluster as the living one of this number."""
        hidden.mkdir(exist_ok=True)
        node, end = RayNode(address, ip, hidden, fault), time.monotonic() + 120.0
        while len([one for one in ray_nodes(address) if one["Alive"]]) < count:
            assert time.monotonic() < end, f"the node {ip} has not joined"
            time.sleep(1.0)
        return node


def ray_nodes(address: str) -> list[dict[str, Any]]:
    """Return the nodes that Ray knows."""
    from ray._private.state import GlobalState
    from ray._raylet import GcsClientOptions

    state = GlobalState()
    state._initialize_global_state(GcsClientOptions.create(address, None, True, False))
    try:
        return list(state.node_table())
    finally:
        state.disconnect()


def addresses_of(address: str, status: dict[str, Any]) -> dict[str, str]:
    """Return the address of the node that each service's process says it is on."""
    address_of = {one["NodeID"]: one["NodeManagerAddress"] for one in ray_nodes(address)}
    return {
        name: ",".join(address_of[node] for node in nodes_told(found["pid"]))
        for name, found in status["services"].items()
        if found.get("pid")
    }


def nodes_told(pid: int) -> list[str]:
    """Return the ids of the nodes that a service's process was told to be on."""
    return psutil.Process(pid).environ()["ASYNCRL_NODE"].split(",")


def events_of(run: UpRun) -> list[str]:
    lines = (run.folder / "events.jsonl").read_text().splitlines()
    return [str(json.loads(line).get("text")) for line in lines]


def obstacles_of(status: dict[str, Any]) -> list[tuple[str, str]]:
    return [(one["service"], one["cause"]) for one in status.get("obstacles", ())]


def end_and_verify(run: UpRun) -> None:
    """End a run as Ctrl-C does; nothing is lost, nothing is left, and `verify` finds nothing."""
    run.interrupt()
    code, output = run.finish()
    assert code == 130, output
    assert run.summary()["ledger_residue"] == 0
    command = asyncrl_command("verify", run.folder.name, "--dir", str(run.runs_dir))
    verdict = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert verdict.returncode == 0, verdict.stdout + verdict.stderr
    assert leftovers(run.folder) == []
