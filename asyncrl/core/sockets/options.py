"""The options of asyncrl's sockets: what bounds them in time and memory, and their keys.

Invariant: a socket is given its options here and nowhere else, before it is bound or connected; none
without keys gets them for an address that another machine could reach.
"""

from __future__ import annotations

from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

import psutil
import zmq

from asyncrl.core import wire
from asyncrl.core.errors import ConfigError
from asyncrl.core.runtime.limits import Limits
from asyncrl.core.sockets.keys import ClientKeys, ServerKeys

HANDSHAKE_MS = 10_000
"""A connection that has not finished its handshake by then is closed and its descriptor is free."""
HEARTBEAT_MS, SILENCE_MS = 5_000, 30_000
"""A peer is pinged so often, and its connection is dropped after so long without an answer."""
WAITING_BYTES = 64 << 20
"""Approximate memory for messages of one connection that wait for a busy server."""
MIN_WAITING, MAX_WAITING = 8, 1000
UNSENT_REPLIES = 512
"""Replies kept for a peer that does not read; further ones are dropped. libzmq learns in steps of half of
this what was read, so half is room for sure: `rpc.server.MAX_TURN`, whose replies may leave at once. With
256 here, 200 calls in flight lost up to 32 answers."""
CURVE_DOMAIN = b"asyncrl"


def num_waiting(limits: Limits) -> int:
    """Return how many messages of one connection may wait: about `WAITING_BYTES` of the longest."""
    return min(MAX_WAITING, max(MIN_WAITING, WAITING_BYTES // limits.message_bytes))


def stays_here(address: str) -> bool:
    """Tell whether no other machine can reach the ZMQ address: a file, this process, or loopback.

    >>> stays_here("tcp://127.0.0.1:5555"), stays_here("tcp://*:5555")
    (True, False)
    """
    place = urlsplit(address)
    if place.scheme in ("ipc", "inproc"):
        return True
    host = place.hostname or ""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:  # a name, an interface, or every interface: who knows where that leads
        return False


def interface_of(host: str) -> str:
    """Return the name of this machine's interface with that address, empty if there is none."""
    found = (
        name for name, addresses in psutil.net_if_addrs().items() for one in addresses if one.address == host
    )
    return next(found, "")


def refuse_plain(address: str, keys: ServerKeys | ClientKeys | None) -> None:
    """Raise ConfigError if a socket without keys would cross the network."""
    if keys is None and not stays_here(address):
        raise ConfigError(
            f"a socket at {address} would be open to the network without keys",
            hint="Set launcher.curve: auto, or give a client the keys.json of its run",
        )


def prepare_server(socket: zmq.Socket[bytes], address: str, limits: Limits, keys: ServerKeys | None) -> None:
    """Set what a ROUTER needs before it is bound to `address`.

    Raises:
        ConfigError: It has no keys, and other machines could reach it.
    """
    refuse_plain(address, keys)
    socket.setsockopt(zmq.LINGER, 200)
    socket.setsockopt(zmq.MAXMSGSIZE, limits.frame_bytes)
    socket.setsockopt(zmq.RCVHWM, num_waiting(limits))
    socket.setsockopt(zmq.SNDHWM, UNSENT_REPLIES)
    socket.setsockopt(zmq.BACKLOG, 1024)
    _bound_in_time(socket)
    if keys is not None:
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
        socket.setsockopt(zmq.ZAP_DOMAIN, CURVE_DOMAIN)
        # Without this libzmq lets every key in while nobody answers for the allow-list.
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)


def prepare_client(socket: zmq.Socket[Any], address: str, keys: ClientKeys | None) -> None:
    """Set what a DEALER needs before it connects to `address`.

    Raises:
        ConfigError: It has no keys, and what it says could be read on its way.
    """
    refuse_plain(address, keys)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, wire.MAX_FRAME_BYTES)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 2_000)
    _bound_in_time(socket)
    if keys is not None:
        socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
        socket.setsockopt(zmq.CURVE_SERVERKEY, keys.server)


def _bound_in_time(socket: zmq.Socket[Any]) -> None:
    socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
    socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, SILENCE_MS)
    socket.setsockopt(zmq.HEARTBEAT_TTL, SILENCE_MS)
