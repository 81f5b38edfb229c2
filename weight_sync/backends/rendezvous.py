"""Rendezvous of a torch.distributed group, on a store that listens on one interface only.

By default, a `TCPStore` listens on every interface, whatever host it is given (seen with torch 2.13: `::`).
It authenticates no client, so it must not be reachable from where strangers are.
"""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any, cast
from urllib.parse import urlsplit

from torch.distributed import Store, TCPStore

from asyncrl.core.errors import SyncError
from weight_sync.backends.sealed import SealedStore


def open_store(host: str, port: int, timeout: timedelta) -> TCPStore:
    """Return a store that listens on `host` alone; port 0 takes a free one.

    Raises:
        SyncError: Nothing can listen there.
    """
    try:
        listener = socket.create_server((host, port))
    except OSError as error:
        raise SyncError(f"nothing can listen on {host}:{port}: {error.strerror}") from error
    port = listener.getsockname()[1]
    return TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timeout,
        master_listen_fd=listener.detach(),
    )


def join_store(rendezvous: str, rank: int, timeout: timedelta, secret: str = "") -> Store:
    """Return the store at `host:port`, which rank 0 opens; the others may come first.

    Args:
        secret: Of the ranks: whoever else connects reads nothing in it, and nothing of his is taken.

    Raises:
        SyncError: Rank 0 cannot listen there.
    """
    place = urlsplit(f"tcp://{rendezvous}")
    assert place.hostname is not None and place.port is not None, f"'{rendezvous}' is no host:port"
    host, port = place.hostname, place.port
    store = open_store(host, port, timeout) if rank == 0 else connect_store(None, host, port, timeout)
    return SealedStore(store, secret, "learner") if secret else store


def connect_store(store: TCPStore | None, host: str, port: int, timeout: timedelta) -> Store:
    """Return a connection of its own to `store`, or to the one at `host:port`.

    While one thread waits for a key, the others that share its connection wait too (seen with torch 2.13):
    a group that does not come together would hold up all that form after it.
    """
    if store is not None:
        known: Any = store  # a TCPStore, whose type stub lacks `clone`
        return cast(Store, known.clone())
    return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)


def own_address(peer: str) -> str:
    """Return the address of this host as the peer at the IP address or name `peer` sees it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((peer, 1))  # a datagram socket: nothing is sent
        return str(probe.getsockname()[0])
