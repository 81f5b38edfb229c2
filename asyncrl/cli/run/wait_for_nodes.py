"""Wait for the nodes of a Ray cluster until all of them have joined.

`python -m asyncrl.cli.run.wait_for_nodes HOST:PORT NODES`: for batch scripts, which start Ray on
several machines at once. It must run on one of the nodes.
"""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Callable, Sequence

from asyncrl.cli.exits import say
from asyncrl.control.ray import membership
from asyncrl.control.ray.placement import Node
from asyncrl.core.errors import AsyncrlError, DeadlineExceeded

DEADLINE_S = 300.0
POLL_S = 1.0
NAMESPACE = "asyncrl-waiting"


def main(arguments: Sequence[str]) -> int:
    """Return the exit code: 0 when all are there, 1 after the deadline, 2 for wrong arguments."""
    if len(arguments) != 2 or ":" not in arguments[0] or not arguments[1].isdigit():
        say("usage: python -m asyncrl.cli.run.wait_for_nodes HOST:PORT NODES")
        return 2
    address, wanted = arguments[0], int(arguments[1])
    end = time.monotonic() + DEADLINE_S
    try:
        await_port(address, end)
        membership.join(address, NAMESPACE)
        nodes = await_nodes(membership.living_nodes, wanted, end)
    except AsyncrlError as error:
        say(f"error: {error}")
        return 1
    say(f"{len(nodes)} nodes: {', '.join(node.address for node in nodes)}")
    return 0


def await_port(address: str, end: float) -> None:
    """Wait until something listens at `address`; Ray itself would give up for good after a while.

    Raises:
        DeadlineExceeded: Nothing did at the time `end` (of `time.monotonic`).
    """
    host, _, port = address.rpartition(":")
    while True:
        try:
            socket.create_connection((host, int(port)), timeout=POLL_S).close()
            return
        except OSError as error:
            if time.monotonic() >= end:
                raise DeadlineExceeded(f"nothing listens at {address}: {error}") from error
            time.sleep(POLL_S)


def await_nodes(living: Callable[[], Sequence[Node]], wanted: int, end: float) -> Sequence[Node]:
    """Wait until there are so many nodes, and return them.

    Raises:
        DeadlineExceeded: There were fewer at the time `end` (of `time.monotonic`).
    """
    while len(nodes := living()) < wanted:
        if time.monotonic() >= end:
            there = ", ".join(node.address for node in nodes) or "none"
            raise DeadlineExceeded(f"{len(nodes)} of {wanted} nodes came: {there}")
        time.sleep(min(POLL_S, max(0.0, end - time.monotonic())))
    return nodes


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
